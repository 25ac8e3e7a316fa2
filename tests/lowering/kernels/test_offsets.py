"""Kernels with offsets into the arena compute the same bits as kernels that get parts of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.small_programs import chain, image_copy

from torchedge.lowering.assembly import lower
from torchedge.lowering.kernels.offsets import offset_kernels, with_offsets
from torchedge.lowering.programs import MAX_ARGUMENT_BYTES, Kernel
from torchedge.lowering.rules import all_rules
from torchedge.runtime import Executor
from torchedge.textures.layouts import Layout
from torchedge.tracing.steps import capture_step

pytest.importorskip("pyopencl")

KERNEL = Kernel(
    "add_1",
    "\n__kernel void add_1(__global float* restrict t0, __global const uchar* t1, const int n0) {\n"
    "  t0[get_global_id(0)] = t1[n0];\n}\n",
    ("write", "read"),
    sizes=1,
)


@pytest.mark.parametrize(
    "kernel",
    [
        replace(KERNEL, source=KERNEL.source.replace(") {", ")\n{")),
        replace(KERNEL, source=KERNEL.source.replace("__global const uchar* t1", "TYPE t1")),
        replace(KERNEL, sizes=MAX_ARGUMENT_BYTES // 4 - 4),
    ],
    ids=["another head", "another argument", "too many arguments"],
)
def test_kernels_that_cannot_take_offsets_stay_as_they_are(kernel):
    assert with_offsets(kernel, [0, 1]).kernel is kernel
    assert not with_offsets(kernel, [0, 1]).moved


def test_a_device_that_takes_more_arguments_gets_more_offsets():
    kernel = replace(KERNEL, sizes=MAX_ARGUMENT_BYTES // 4 - 4)
    assert with_offsets(kernel, [0, 1], MAX_ARGUMENT_BYTES + 8).moved == (0, 1)
    form = replace(chain(length=3).kernels[0], sizes=MAX_ARGUMENT_BYTES // 4)
    program = replace(chain(length=3), kernels=(form,))
    assert [f.moved for f in offset_kernels(program)] == [()]
    assert [f.moved for f in offset_kernels(program, 2 * MAX_ARGUMENT_BYTES)] == [(0, 1)]


def test_only_arguments_in_the_arena_have_an_offset():
    forms = offset_kernels(chain(length=3))
    assert [form.moved for form in forms] == [(0, 1)]
    assert [form.moved for form in offset_kernels(chain(length=0))] == [()]


def test_images_made_of_the_arena_exclude_offsets():
    program = image_copy((4, 8), Layout((0, 1), "image", 1, row_texels=64), storage="image_buffer")
    assert not any(form.moved for form in offset_kernels(program))


def test_a_kernel_without_offsets_gets_parts_beside_one_that_has_them():
    program = chain(length=4, count=1000)
    plain, other = program.kernels[0], replace(program.kernels[0], name="add2")
    other = replace(other, source=plain.source.replace("add1", "add2").replace(") {", ")\n{"))
    launches = [replace(launch, kernel=k % 2) for k, launch in enumerate(program.launches)]
    mixed = replace(program, kernels=(plain, other), launches=tuple(launches))
    with Executor(mixed, whole_arena=True, checks=True) as executor:
        assert set(executor.run(np.zeros(1000, np.float32))[0]) == {5.0}


@pytest.mark.parametrize("in_place", [False, True])
def test_launches_on_the_whole_arena(in_place):
    with Executor(chain(length=5, count=777, in_place=in_place), whole_arena=True) as executor:
        x = np.arange(777, dtype=np.float32)
        np.testing.assert_array_equal(executor.run(x)[0], x + 6)
        assert not executor._arena.parts


@pytest.mark.parametrize("target", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_training_steps_have_the_same_bits_with_offsets_and_with_parts(target):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.GELU(), torch.nn.Linear(8, 5))
    x, y = torch.randn(4, 12), torch.tensor([0, 3, 1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.nn.functional.cross_entropy
    captured = capture_step(
        model, (x,), targets=(y,), loss=loss, optimizer=optimizer, keep=frozenset(all_rules())
    )
    program = lower(captured.step, target)
    results = []
    for whole in (False, True):
        with Executor(program, whole_arena=whole) as executor:
            executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
            losses = [executor.run(x.numpy(), y.numpy())[0].tobytes() for _ in range(3)]
            names = [t.name for t in program.tensors if t.role in ("parameter", "buffer", "state")]
            results.append((losses, [executor.read(name).tobytes() for name in names]))
            assert whole == (not executor._arena.parts)
    assert results[0] == results[1]
