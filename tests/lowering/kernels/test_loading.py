"""Loading slots on PoCL: a kernel's own results stay bit for bit, and the target holds the source's bytes."""

from dataclasses import replace

import pytest
import torch
from oracles.node_runs import program_of
from oracles.rule_checks import apply
from oracles.slot_runs import SlotRuns

from torchedge.errors import LoweringError
from torchedge.lowering.building import contraction, elementwise
from torchedge.lowering.fusion import form_groups
from torchedge.lowering.kernels.loading import TURN, loading_size, slot_numbers, with_slot
from torchedge.lowering.kernels.updates import write_updates
from torchedge.lowering.nodes import Stored
from torchedge.lowering.programs import Arena, Kernel, Program, StoredTensor
from torchedge.lowering.schedules import NARROW, SMALL, TILE, ContractionSchedule
from torchedge.lowering.targets import TARGETS
from torchedge.lowering.translation import Translation
from torchedge.textures.layouts import Layout, row_major

pytest.importorskip("pyopencl")

ATEN = torch.ops.aten


@pytest.fixture(scope="module")
def runs():
    return SlotRuns()


def product(rows=37, cols=44, inner=70):
    a, b = Stored((rows, inner), "float32", "a", 0), Stored((inner, cols), "float32", "b", 1)
    made = contraction(
        (rows, cols),
        ("row", "col"),
        (inner,),
        lambda out, over: a.at(out[0], over[0]),
        lambda out, over: b.at(over[0], out[1]),
        "float32",
    )
    return [elementwise(lambda x: x * 2 + 1, made, dtype="float32")]


def convolution():
    x, w, b = torch.zeros(1, 8, 9, 9), torch.zeros(16, 8, 3, 3), torch.zeros(16)
    more = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    return apply(ATEN.convolution.default, (x, w, b, *more), {}, [ATEN.convolution(x, w, b, *more)])[0]


def softmax(rows=5, length=1000):
    x = torch.zeros(rows, length)
    return apply(ATEN._softmax.default, (x, 1, False), {}, [x])[0]


def pooling():
    x = torch.zeros(2, 16, 19, 19)
    made = ATEN.avg_pool2d(x, [7, 7], [2, 2])
    return apply(ATEN.avg_pool2d.default, (x, [7, 7], [2, 2]), {}, [made])[0]


def activation(count=1001):
    x = Stored((count, 3), "float32", "x", 0)
    return [elementwise(lambda a: a * 3 - 1, x, dtype="float32")]


CASES = {
    "panel": (product, "cpu", ContractionSchedule("panel", 8, 32, 16, 4, 2, 8)),
    "panel in slices": (product, "cpu", ContractionSchedule("panel", 8, 32, 16, 4, 2, 8, slices=3)),
    "panel of a convolution": (convolution, "cpu", None),
    "local": (product, "gpu", SMALL),
    "local in slices": (product, "gpu", replace(SMALL, slices=2)),
    "local of a convolution": (convolution, "gpu", None),
    "register": (product, "mobile", TILE),
    "register in slices": (product, "mobile", replace(NARROW, slices=3)),
    "rows": (softmax, "cpu", None),
    "rows of a group": (softmax, "gpu", None),
    "rows of texels": (softmax, "mobile", None),
    "windows": (pooling, "cpu", None),
    "pointwise": (activation, "cpu", None),
    "pointwise in groups": (activation, "gpu", None),
    "pointwise of texels": (activation, "mobile", None),
}

BUFFER = StoredTensor("w", (1031,), "float32", "parameter", row_major(1))
"""4,124 bytes: a page of 4,096 bytes, one vector and 12 bytes."""
LARGE = StoredTensor("w", (70_001,), "float16", "parameter", row_major(1))
TEXTURE = StoredTensor("w", (23, 37), "float32", "parameter", Layout((0, 1), "image", 1))
HALVES = replace(TEXTURE, dtype="float16")
LOADS = {
    "nothing": (BUFFER, 0, 0),
    "some bytes": (BUFFER, 4112, 4124),
    "one vector": (BUFFER, 4096, 4112),
    "a page": (BUFFER, 0, 4096),
    "all of a buffer": (BUFFER, 0, 4124),
    "many more than work-items": (LARGE, 0, LARGE.nbytes),
    "no rows": (TEXTURE, 1600, 1600),
    "one row": (TEXTURE, 160, 320),
    "all rows": (TEXTURE, 0, TEXTURE.nbytes),
    "the last rows of halves": (HALVES, 20 * 80, HALVES.nbytes),
}


EVERY_KERNEL, EVERY_LOAD = ("all of a buffer", "all rows"), ("panel", "rows of a group", "pointwise")
PAIRS = [
    (case, load) for case in CASES for load in LOADS if case in EVERY_LOAD or load in EVERY_KERNEL
]  # fmt: skip
"""Every kernel beside a load of each storage, and every load beside a kernel of each kind of loop."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "load"), PAIRS)
def test_a_kernel_computes_the_same_beside_a_load(case, load, runs):
    make, target, schedule = CASES[case]
    runs.compare(program_of(make(), target, schedule), *LOADS[load])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_with_checks_load(target, runs):
    runs.compare(program_of(product(), replace(TARGETS[target], checks=True)), BUFFER, 0, BUFFER.nbytes)


def test_small_updates_load(runs):
    """Each work-item of this kernel returns after its own update: it copies before it returns."""
    stored = [Stored((7 + k,), "float32", f"w{k}", k) for k in range(3)]
    updates = tuple([(w, elementwise(lambda a: a * 2, w, dtype="float32")) for w in stored])
    groups = form_groups(Translation((), updates, {w.index: w for w in stored}), TARGETS["gpu"]).groups
    source = write_updates(groups, {w: row_major(1) for w in stored}, TARGETS["gpu"])
    tensors = [StoredTensor(w.name, w.shape, w.dtype, "parameter", row_major(1)) for w in source.tensors]
    launch = replace(source.launch, tensors=tuple(range(len(tensors))))
    program = Program("updates", tuple(tensors), (source.kernel,), (launch,), (), (), Arena(0))
    assert source.kernel.source.count("return;") == 3
    runs.compare(program, LARGE, 0, LARGE.nbytes)


@pytest.mark.parametrize("device_class", TARGETS)
@pytest.mark.parametrize("load", LOADS)
def test_loading_kernels_load(load, device_class, runs):
    runs.load(*LOADS[load], device_class)


def test_the_source_begins_at_any_vector(runs):
    runs.compare(program_of(activation()), BUFFER, 0, BUFFER.nbytes, shift=48)


def test_main_loops_have_a_turn():
    """Contractions and long rows copy in their loop; kernels without a loop copy before they end."""
    turns = {name: make for name, make in CASES.items() if not name.startswith(("pointwise", "windows"))}
    for name in turns:
        make, target, schedule = CASES[name]
        kernels = program_of(make(), target, schedule).kernels
        assert all(TURN in k.source for k in kernels if k.kind != "sum of slices"), name
    (kernel,) = program_of(activation()).kernels
    assert TURN not in kernel.source
    loaded = with_slot(kernel, "buffer", "gpu")
    assert TURN not in loaded.source and loaded.name != kernel.name and loaded.name in loaded.source
    assert with_slot(kernel, "float32 image", "gpu").name not in (kernel.name, loaded.name)
    assert replace(loaded, name=kernel.name, source=kernel.source) == kernel


def test_numbers_out_of_place_are_refused():
    assert slot_numbers(TEXTURE, 160, 480, 4096) == (256, 1, 320, 10)
    assert slot_numbers(BUFFER, 4096, 4124, 0) == (0, 256, 28)
    for tensor, start, stop, offset in (
        (BUFFER, 8, 16, 0),
        (BUFFER, 0, 16, 8),
        (BUFFER, 32, 16, 0),
        (TEXTURE, 16, 160, 0),
        (TEXTURE, 0, 168, 0),
    ):
        with pytest.raises(LoweringError, match="expected multiples of"):
            slot_numbers(tensor, start, stop, offset)
    assert loading_size(0, "cpu") == ((1,), (1,)) and loading_size(1, "gpu") == ((256,), (256,))


def test_kernels_of_others_have_no_slot():
    with pytest.raises(LoweringError, match="kernel other has no head as this package writes it"):
        with_slot(Kernel("other", "kernel void other(global float* a)\n{\n}\n", ("write",)), "buffer", "cpu")
    with pytest.raises(LoweringError, match="lies in an image of int32"):
        from torchedge.lowering.kernels.loading import destination_of

        destination_of(replace(TEXTURE, dtype="int32"))
