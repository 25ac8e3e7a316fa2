"""Rows that replace those of a state: written by source, the same as in PyTorch."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.targets import target_here
from torch import nn

from torchedge.lowering.inference import capture_inference_step, lower_inference

pytest.importorskip("pyopencl")
from torchedge.runtime import Executor

ROWS = 40


class Cache(nn.Module):
    """Replaces rows of a table that stays on the device, along a dimension, and returns a sum of all."""

    def __init__(self, dim, how):
        super().__init__()
        self.dim, self.how = dim, how
        shape = [2, 3, 8]
        shape[dim] = ROWS
        self.register_buffer("table", torch.arange(float(prod(shape))).reshape(shape) % 7)

    def forward(self, places, rows):
        new = torch.tanh(rows) * 2
        if self.how == "index_copy":
            self.table.index_copy_(self.dim, places, new)
        else:
            self.table[(slice(None),) * self.dim + (places,)] = new
        return self.table.sum(self.dim)

    def example(self, count):
        shape = list(self.table.shape)
        shape[self.dim] = count
        return torch.zeros(count, dtype=torch.int64), torch.randn(shape)


def written(table, dim, places, rows):
    """Return the table after its rows were replaced one after the other."""
    table = np.moveaxis(table.copy(), dim, 0)
    for place, row in zip(places, np.moveaxis(rows, dim, 0), strict=True):
        table[place] = row
    return np.moveaxis(table, 0, dim)


@pytest.fixture(scope="module")
def executors():
    made = {}

    def of(dim, how, count, target):
        key = dim, how, count, target
        if key not in made:
            model = Cache(dim, how)
            captured = capture_inference_step(model, model.example(count))
            program = lower_inference(captured, target_here(target)).program
            made[key] = program, captured, model
        return made[key]

    return of


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
@settings(max_examples=10, deadline=None)
@given(st.sampled_from([0, 1, 2]), st.sampled_from(["index_copy", "index_put"]), st.integers(1, 5), st.data())
def test_rows_that_are_written_are_the_last_ones(executors, target, dim, how, count, data):
    least = -ROWS if how == "index_put" else 0
    places = np.array([data.draw(st.integers(least, ROWS - 1)) for _ in range(count)])
    program, captured, model = executors(dim, how, count, target)
    rows = model.example(count)[1].numpy()
    before = model.table.numpy()
    with Executor(program) as executor:
        executor.load({name: tensor.numpy() for name, tensor in captured.tensors.items()})
        (total,) = executor.run(places, rows)
        found = executor.read("table")
    expected = written(before, dim, places, np.tanh(rows) * 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(total, expected.sum(dim), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("how", ["index_copy", "index_put"])
def test_a_launch_visits_what_it_writes_alone(executors, how, count):
    """One work-item or more for each new element, not for each of the table; made where it is computed."""
    program, _, model = executors(1, how, count, "gpu")
    table = next(i for i, tensor in enumerate(program.tensors) if tensor.name == "table")
    writes = [launch for launch in program.launches if table in launch.tensors[:1]]
    assert len(writes) == 1
    assert prod(writes[0].global_size) <= 64 * count < model.table.numel()
    assert any(program.tensors[i].role == "input" for i in writes[0].tensors)  # tanh is no launch of its own


class Followed(Cache):
    """Everything that is computed from the table reads all of it."""

    def forward(self, places, rows):
        self.table.index_copy_(self.dim, places, rows)
        return self.table * 3 + 1


@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_what_follows_a_write_covers_the_table(target):
    torch.manual_seed(0)
    model = Followed(1, "index_copy")
    places, rows = torch.tensor([5, 31]), model.example(2)[1]
    captured = capture_inference_step(model, (places, rows))
    with Executor(lower_inference(captured, target_here(target)).program) as executor:
        executor.load({name: tensor.numpy() for name, tensor in captured.tensors.items()})
        (found,) = executor.run(places.numpy(), rows.numpy())
    expected = model.table.clone().index_copy(1, places, rows) * 3 + 1
    np.testing.assert_array_equal(found, expected.numpy())


class Attended(Cache):
    """A product reads the table, and a token's rows are returned as well."""

    def forward(self, places, rows):
        self.table.index_copy_(self.dim, places, torch.tanh(rows) * 2)
        return rows[0] @ self.table.transpose(1, 2), self.table.clone()


@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_a_product_reads_what_was_written(target):
    torch.manual_seed(0)
    model = Attended(1, "index_copy")
    places, rows = torch.tensor([31, 5, 31, 0]), model.example(4)[1]
    captured = capture_inference_step(model, (places, rows))
    with Executor(lower_inference(captured, target_here(target)).program) as executor:
        executor.load({name: tensor.numpy() for name, tensor in captured.tensors.items()})
        found = executor.run(places.numpy(), rows.numpy())
    table = written(model.table.numpy(), 1, places.numpy(), np.tanh(rows.numpy()) * 2)
    np.testing.assert_allclose(found[0], rows.numpy()[0] @ table.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], table, rtol=1e-6, atol=1e-6)
