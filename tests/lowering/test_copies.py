"""Tensors that are copied into another layout: trained weights in images, operands for one kernel."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge.lowering import assembly, tuning
from torchedge.lowering.assembly import lower
from torchedge.lowering.copies import copied_reads
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
from torchedge.lowering.tuning import layout_options
from torchedge.runtime import trainers
from torchedge.runtime.executors import Executor
from torchedge.textures.coefficients import default_coefficients
from torchedge.textures.layouts import Layout
from torchedge.tracing.steps import capture_step

pytest.importorskip("pyopencl")
MOBILE = TARGETS["mobile"]


def with_slow_buffers():
    """Return coefficients of a phone whose kernels read buffers slowly; images and copies are fast."""
    phone = default_coefficients("mobile")
    slow = replace(
        phone.buffer, hit_ns=40 * phone.buffer.hit_ns, issue_ns=40 * max(1.0, phone.buffer.issue_ns)
    )
    return replace(phone, buffer=slow, launch_us=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 32),
    )  # fmt: skip


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 4, 8, 8, generator=generator), torch.randint(32, (2,), generator=generator)


def captured_step(model, optimizer):
    x, y = batch(0)
    return capture_step(
        model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=optimizer, keep=frozenset(all_rules())
    )


def images_of(program, role="parameter"):
    return {t.name for t in program.tensors if t.role == role and t.layout.storage != "buffer"}


def eager_steps(model, optimizer, count):
    losses = []
    for number in range(count):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def held_against_eager(captured, program, model, optimizer, count=3):
    """Run steps of a program with checks, and hold losses and all that is trained against PyTorch."""
    with Executor(program, checks=True) as executor:
        executor.load(captured.tensors)
        found = [float(executor.run(*batch(number))[0]) for number in range(count)]
        weights = {name: executor.read(name) for name, _ in model.named_parameters()}
    np.testing.assert_allclose(found, eager_steps(model, optimizer, count), rtol=1e-4)
    for name, weight in model.named_parameters():
        np.testing.assert_allclose(weights[name], weight.detach().numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "checks"), [pytest.param("row", False, marks=pytest.mark.slow), ("block-4", True)]
)
def test_weights_that_other_programs_keep_in_images_are_trained_there(pattern, checks):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    captured = captured_step(model, optimizer)
    layouts = {
        "2.weight": Layout((2, 3, 1, 0), "image", 2, pattern),
        "5.weight": Layout((2, 3, 1, 0), "image", 3, pattern),
        "8.weight": Layout((1, 0), "image", 1, pattern),
    }
    program = lower(captured.step, replace(MOBILE, checks=checks), layouts)
    assert images_of(program) == layouts.keys()
    assert {t.name: t.layout for t in program.tensors if t.name in layouts} == layouts
    for launch in program.launches:  # no kernel both reads and writes an image
        access = program.kernels[launch.kernel].access
        stored = [program.tensors[index].layout.storage for index in launch.tensors]
        assert ("update", "image") not in set(zip(access, stored, strict=True))
    held_against_eager(captured, program, model, optimizer)


@pytest.mark.slow
def test_weights_lie_in_images_where_their_readers_gain_more_than_a_copy():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    captured = captured_step(model, optimizer)
    program = lower(captured.step, replace(MOBILE, coefficients=with_slow_buffers()))
    assert "2.weight" in images_of(program) and not images_of(program, "state")
    dear = replace(with_slow_buffers(), launch_us=1e5)
    assert not images_of(lower(captured.step, replace(MOBILE, coefficients=dear)))


@pytest.mark.slow
def test_a_trainer_shares_images_among_its_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path))
    target = replace(MOBILE, coefficients=with_slow_buffers())
    monkeypatch.setattr(trainers, "target_for", lambda *_: target)
    model = network()
    eager = copy.deepcopy(model)
    mine = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9)
    accumulation = 2
    with torchedge.Trainer(
        model, *batch(0), loss=F.cross_entropy, optimizer=mine, accumulation=accumulation
    ) as trainer:
        for number in range(2 * accumulation):
            x, y = (tensor[: 1 + number % 2] for tensor in batch(number))  # two sizes: two programs each
            (F.cross_entropy(eager(x), y) / accumulation).backward()
            if (number + 1) % accumulation == 0:
                theirs.step()
                theirs.zero_grad()
            trainer.step(x, y)
        images = [images_of(executor.program) for executor in trainer._executors()]
        assert images[0] and all(names == images[0] for names in images)
        eager.eval()
        torch.testing.assert_close(trainer.predict(batch(9)[0]), eager(batch(9)[0]), rtol=1e-3, atol=1e-4)
        trainer.sync()
        saved = copy.deepcopy(model.state_dict())
        trainer.step(*batch(5))
        model.load_state_dict(saved)
        trainer.load()
        torch.testing.assert_close(trainer.predict(batch(9)[0]), eager(batch(9)[0]), rtol=1e-3, atol=1e-4)
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kernels_that_read_copies_compute_the_same(monkeypatch, seed):
    chance = np.random.default_rng(seed)
    copied = []

    def tune(groups, layouts, fixed, target, coefficients, timer=None, forms=None):
        placed, copies = dict(layouts), {}
        for group in groups:
            operands = [node for node in group.reads if node not in group.stored.values()]
            options = [
                (node, option)
                for node in operands
                for option in layout_options(node, layouts[node], target)[1:]
            ]
            if options:
                copies[group] = options[chance.integers(len(options))]
        changed = copied_reads(groups, copies, placed)
        copied.append(len(changed) - len(groups))
        return tuning.Tuned(changed, placed, {}, 0.0, 0.0, 0.0)

    monkeypatch.setattr(assembly, "tune", tune)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    captured = captured_step(model, optimizer)
    program = lower(captured.step, replace(MOBILE, coefficients=default_coefficients("mobile")))
    assert copied[0] > 10
    held_against_eager(captured, program, model, optimizer)


@pytest.mark.slow
def test_operands_are_copied_where_that_pays():
    """A product of 256 x 256 reads an operand 256 times: with slow buffers a copy into an image pays."""

    def run(coefficients):
        product = nn.Linear(256, 256, bias=False)
        x = torch.randn(256, 256)
        captured = capture_step(product, (x,), training=False, keep=frozenset(all_rules()))
        program = lower(captured.step, replace(MOBILE, coefficients=coefficients))
        with Executor(program, checks=True) as executor:
            executor.load(captured.tensors)
            (found,) = executor.run(x)
        np.testing.assert_allclose(found, product(x).detach().numpy(), rtol=1e-4, atol=1e-5)
        return program

    program = run(with_slow_buffers())
    reads = [program.tensors[i] for i in program.launches[-1].tensors]
    assert len(program.launches) == 2
    assert [t.role for t in reads if t.layout.storage == "image"] in (
        ["parameter", "intermediate"],
        ["intermediate", "parameter"],
    )
    assert len(run(replace(with_slow_buffers(), launch_us=1e5)).launches) == 1
