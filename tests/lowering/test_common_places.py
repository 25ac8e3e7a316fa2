"""Places that are computed alike are computed once, and caches are written together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.targets import target_here
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

KEEP = frozenset(all_rules())


class Caches(nn.Module):
    """Writes two rows of several tables at the same places, or at others."""

    def __init__(self, apart=False):
        super().__init__()
        self.apart = apart

    def forward(self, tables, rows, places):
        return [
            table.index_copy(1, places + k * self.apart, row)
            for k, (table, row) in enumerate(zip(tables, rows, strict=True))
        ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize(("apart", "maps", "writes"), [(False, 1, 1), (True, 3, 3)])
def test_tables_are_written_at_shared_places_by_one_kernel(apart, maps, writes, target):
    torch.manual_seed(0)
    tables, rows = [torch.randn(2, 20, 5) for _ in range(3)], [torch.randn(2, 2, 5) for _ in range(3)]
    places, model = torch.tensor([6, 1]), Caches(apart)
    captured = capture_step(model, (tables, rows, places), keep=KEEP)
    program = lower(captured.step, target_here(target))
    names = [launch.reference.partition(" over")[0] for launch in program.launches]
    written = [
        launch
        for launch in program.launches
        if any(program.tensors[index].shape == (2, 20, 5) for index in launch.tensors[:1])
    ]
    assert (names.count("scatter"), len(written)) == (maps, writes)
    with Executor(program) as executor:
        results = executor.run(*[t.numpy() for t in (*tables, *rows, places)])
    for result, tensor in zip(results, model(tables, rows, places), strict=True):
        np.testing.assert_array_equal(result, tensor)


class TwoReaders(nn.Module):
    """The second table's row is read from the first table as it was written."""

    def forward(self, first, second, row, places):
        written = first.index_copy(1, places, row)
        return written, second.index_copy(1, places, written.flip(1)[:, :2])


def test_a_table_that_another_one_needs_is_written_before():
    random = np.random.default_rng(0)
    first, second, row = (torch.from_numpy(random.random((2, n, 5), np.float32)) for n in (20, 20, 2))
    places = torch.tensor([3, 8])
    captured = capture_step(TwoReaders(), (first, second, row, places), keep=KEEP)
    with Executor(lower(captured.step)) as executor:
        results = executor.run(*[t.numpy() for t in (first, second, row, places)])
    for result, tensor in zip(results, TwoReaders()(first, second, row, places), strict=True):
        np.testing.assert_array_equal(result, tensor)
