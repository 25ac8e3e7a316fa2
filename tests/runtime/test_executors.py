"""The executor on PoCL, with programs written by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from oracles.small_programs import chain, image_copy, pointwise, program, sgd, tensor, vector_add

from torchedge.errors import InputError, KernelBuildError, KernelCheckError, OpenCLError, PlanError
from torchedge.lowering.arenas import planned
from torchedge.lowering.programs import Arena, Kernel
from torchedge.runtime import Executor
from torchedge.textures.layouts import PATTERNS, Layout, channels_last

pytest.importorskip("pyopencl")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("checks", [False, True])
def test_a_chain_reuses_two_places(checks):
    made = chain(length=6)
    with Executor(made, checks=checks) as executor:
        np.testing.assert_array_equal(executor.run(np.zeros(1000, np.float32))[0], np.full(1000, 7))
        assert executor.arena_bytes == made.arena.nbytes == 4096 + 4000
        assert made.arena.live_bytes == 8000


@pytest.mark.parametrize("whole_arena", [False, True])
def test_an_arena_of_several_buffers(whole_arena):
    made = chain(length=6)
    split = planned(replace(made, arena=Arena(0, allocation_bytes=5000)), 512)
    assert split.arena.pieces == (4096, 4096)
    with Executor(split, whole_arena=whole_arena, checks=not whole_arena) as executor:
        np.testing.assert_array_equal(executor.run(np.zeros(1000, np.float32))[0], np.full(1000, 7))
        assert executor.arena_bytes == 8192


def test_a_chain_in_place_takes_one():
    made = chain(length=6, in_place=True)
    with Executor(made, checks=True) as executor:
        np.testing.assert_array_equal(executor.run(np.zeros(1000, np.float32))[0], np.full(1000, 7))
        assert executor.arena_bytes == made.arena.live_bytes == 4000


def test_launches_pass_sizes():
    """One kernel, two launches: the sizes stand behind the tensors."""
    source = (
        "__kernel void shift(__global const int* a, __global int* b, const int begin, const int step) {\n"
        "  b[get_global_id(0)] = a[begin + step * get_global_id(0)];\n}\n"
    )
    shift = Kernel("shift", source, ("read", "write"), sizes=2)
    made = program(
        [tensor("x", (9,), "input", "int32"), tensor("y", (3,), "output", "int32"),
         tensor("z", (9,), "output", "int32")],
        [shift],
        [("shift", ("x", "y"), (3,), None, "", (2, 3)), ("shift", ("x", "z"), (9,), None, "", (8, -1))],
    )  # fmt: skip
    with Executor(made) as executor:
        y, z = executor.run(np.arange(9, dtype=np.int32))
        assert y.tolist() == [2, 5, 8] and z.tolist() == list(range(8, -1, -1))


def test_parameters_and_states_stay_from_step_to_step():
    with Executor(sgd()) as executor:
        executor.load({"w": np.arange(10, dtype=np.float32)})
        executor.set("lr", 0.5)
        assert executor.run(np.ones(10, np.float32))[0] == 45
        executor.run(np.ones(10, np.float32))
        np.testing.assert_array_equal(executor.read("w"), np.arange(10) - 1)
        assert executor.read("steps") == 7 and executor.read("steps").dtype == np.int64
        executor.set("lr", 0)
        executor.run(np.ones(10, np.float32))
        np.testing.assert_array_equal(executor.read("w"), np.arange(10) - 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("fold", [1, 3])
def test_images_of_every_pattern(pattern, fold, dtype):
    shape = (3, 7, 5, 6)
    layout = Layout((0, 2, 3, 1), "image", 2, pattern, fold)
    made = image_copy(shape, layout, dtype)
    x = np.round(normal(*shape) * 8) / 4
    with Executor(made, checks=True) as executor:
        (z,) = executor.run(x.astype(dtype))
        np.testing.assert_array_equal(z, x.astype(dtype) + 4)
        width, height = layout.extent(shape)
        assert made.arena.slots == ((width, height, dtype),) * 2
        assert executor.arena_bytes == made.arena.live_bytes == 2 * layout.nbytes(shape, dtype)


def test_a_larger_slot_holds_a_smaller_image():
    layout = Layout((0, 1), "image", 1)
    tensors = [
        tensor("x", (4, 8), "input", layout=layout),
        tensor("big", (9, 40), layout=layout),
        tensor("small", (4, 8), layout=layout),
        tensor("z", (4, 8), "output", layout=layout),
        tensor("y", (9, 40), "output", layout=layout),
    ]
    texels = image_copy((4, 8), layout).kernels[0]
    made = program(
        tensors,
        [texels],
        [
            ("texels", ["y", "big"], [10, 9]),
            ("texels", ["big", "y"], [10, 9]),
            ("texels", ["x", "small"], [2, 4]),
            ("texels", ["small", "z"], [2, 4]),
        ],
        ["x"],
        ["z"],
    )
    assert made.arena.slots == ((10, 9, "float32"),)
    x = normal(4, 8)
    with Executor(made, checks=True) as executor:
        np.testing.assert_array_equal(executor.run(x)[0], x + 1 + 1)


def test_half_storage_takes_and_gives_half_floats():
    made = program(
        [tensor("x", (8,), "input", "float16"), tensor("z", (8,), "output", "float16")],
        [pointwise("twice", "vstore_half(2 * vload_half(i, a), i, b);", ["read", "write"], ["half", "half"])],
        [("twice", ["x", "z"], [8])],
    )
    x = normal(8)
    with Executor(made) as executor:
        (z,) = executor.run(x)  # float32 is rounded
        assert z.dtype == np.float16
        np.testing.assert_array_equal(z, 2 * x.astype(np.float16))


def test_channels_last_and_empty_tensors():
    shape = (2, 3, 4, 5)
    layout = channels_last(4)
    made = program(
        [
            tensor("x", shape, "input", layout=layout),
            tensor("e", (0, 3), "input"),
            tensor("z", shape, "output", layout=layout),
            tensor("f", (0, 3), "output"),
        ],
        [pointwise("same", "b[i] = a[i];", ["read", "write"])],
        [("same", ["x", "z"], [120])],
    )
    x = normal(*shape)
    with Executor(made) as executor:
        z, f = executor.run(x, np.zeros((0, 3), np.float32))
        np.testing.assert_array_equal(z, x)
        assert f.shape == (0, 3)


def test_two_programs_share_parameters():
    with Executor(sgd()) as first, Executor(sgd(), shared=first) as second:
        first.load({"w": np.zeros(10)})
        for executor in (first, second):
            executor.set("lr", 1)
            executor.run(np.ones(10, np.float32))
        np.testing.assert_array_equal(first.read("w"), np.full(10, -2.0))
        assert first.read("steps") == second.read("steps") == 7
        first.close()
        np.testing.assert_array_equal(second.read("w"), np.full(10, -2.0))
    other = sgd()
    w = [t.name for t in other.tensors].index("w")
    tensors = [*other.tensors]
    tensors[w] = replace(tensors[w], dtype="float16")
    with Executor(sgd()) as first, pytest.raises(InputError, match=r"parameter w is .*same layouts"):
        Executor(replace(other, tensors=tuple(tensors)), shared=first)


def test_times_of_launches():
    with Executor(chain(length=2), profile=True) as executor:
        executor.run(np.zeros(1000, np.float32))
        times = executor.timings()
        assert [t.launch for t in times] == [0, 1, 2] and {t.kernel for t in times} == {"add1"}
        assert all(t.ns > 0 for t in times)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(times))
    with Executor(vector_add()) as executor, pytest.raises(InputError, match="profile=True"):
        executor.timings()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), r"got 0 inputs, expected 2 \(x, y\)"),
        ((np.zeros(999, np.float32), np.zeros(1000, np.float32)), r"x has shape \[999\], expected \[1000\]"),
        ((np.zeros(1000, np.int64), np.zeros(1000, np.float32)), r"x has dtype int64, expected float32"),
        (([[1.0], [1.0, 2.0]], np.zeros(1000, np.float32)), r"x: list is no array .* pass a numpy array"),
    ],
)
def test_wrong_inputs(inputs, message):
    with Executor(vector_add()) as executor, pytest.raises(InputError, match=message):
        executor.run(*inputs)


def test_a_torch_tensor_that_requires_a_gradient_is_refused():
    torch = pytest.importorskip("torch")
    ones = torch.ones(1000)
    with Executor(vector_add()) as executor:
        np.testing.assert_array_equal(executor.run(ones, ones)[0], np.full(1000, 2.0))
        with pytest.raises(InputError, match="x: Tensor is no array"):
            executor.run(ones.requires_grad_(), ones)


def test_what_was_never_written_is_asked_for():
    with Executor(sgd()) as executor:
        with pytest.raises(InputError, match=r"nothing was written to w, lr; load parameters with load\(\)"):
            executor.run(np.ones(10, np.float32))
        with pytest.raises(InputError, match=r"'momentum' is no hyperparameter .* expected one of: lr"):
            executor.set("momentum", 1.0)
        with pytest.raises(InputError, match=r"has no tensor 'ww'; did you mean w\?"):
            executor.load({"ww": np.ones(10)})
        with pytest.raises(InputError, match=r"has no tensor 't0'"):
            executor.read("t0")


def test_a_closed_executor_says_so():
    executor = Executor(vector_add())
    executor.close()
    executor.close()
    with pytest.raises(OpenCLError, match="closed"):
        executor.run(np.zeros(1000, np.float32), np.zeros(1000, np.float32))


def test_a_kernel_that_does_not_compile_is_named_with_its_line():
    made = vector_add()
    broken = replace(made, kernels=(pointwise("add", "c[i] = a[i] + q[i];", ["read", "read", "write"]),))
    with pytest.raises(
        KernelBuildError, match=r"kernel add does not build, line 3, `c\[i\] = .*'q'"
    ) as caught:
        Executor(broken)
    assert caught.value.kernel == "add" and "error" in caught.value.log


def test_two_kernels_of_one_name_are_refused():
    made = vector_add()
    other = replace(made.kernels[0], source=made.kernels[0].source + "\n")
    with pytest.raises(InputError, match="two kernels called add"):
        Executor(replace(made, kernels=(*made.kernels, other)))


def test_a_launch_that_the_driver_refuses_is_named():
    made = vector_add(1024)
    kernel = made.kernels[0]
    fixed = "__kernel __attribute__((reqd_work_group_size(8, 1, 1))) void"
    kernel = replace(kernel, source=kernel.source.replace("__kernel void", fixed))
    made = replace(
        made, kernels=(kernel,), launches=(replace(made.launches[0], local_size=(16,), scope="net.add"),)
    )
    with Executor(made) as executor, pytest.raises(OpenCLError, match=r"launch 0, kernel add of net\.add"):
        executor.run(normal(1024), normal(1024))


def checked_kernel(reach):
    source = f"""__kernel void add1(__global const float *a, __global float *b, __global int *check) {{
    const int i = get_global_id(0);
    const int at = i + {reach};
    if (at < 0 || at >= 1000) {{
        if (!check[0]) {{ check[1] = at; check[2] = 0; check[3] = 1000; check[0] = 1; }}
        return;
    }}
    b[i] = a[at] + 1;
}}
"""
    return Kernel("add1", source, ("read", "write"), checks=True)


def test_an_access_outside_a_tensor_is_reported_where_checks_are_asked_for():
    x = np.zeros(1000, np.float32)
    made = replace(chain(length=1), kernels=(checked_kernel(0),))
    with Executor(made, checks=True) as executor:
        assert executor.run(x)[0][0] == 2
    made = replace(chain(length=1), kernels=(checked_kernel(1),))
    with Executor(made) as executor:
        executor.run(x)
    message = r"launch 0, kernel add1: x is accessed at 1000, expected 0 to 999"
    with Executor(made, checks=True) as executor:
        for _ in range(2):
            with pytest.raises(KernelCheckError, match=message):
                executor.run(x)


def test_checks_refuse_a_wrong_arena():
    made = chain(length=3)
    arena = replace(made.arena, offset=dict.fromkeys(made.arena.offset, 0))
    with pytest.raises(PlanError, match="writes t1 over t0"):
        Executor(replace(made, arena=arena), checks=True)


def test_memory_that_no_launch_has_written_is_nan_under_checks():
    made = program(
        [tensor("x", (8,), "input"), tensor("t", (8,)), tensor("z", (8,), "output")],
        [
            pointwise("four", "if (i < 4) b[i] = a[i];", ["read", "write"]),
            pointwise("same", "b[i] = a[i];", ["read", "write"]),
        ],
        [("four", ["x", "t"], [8]), ("same", ["t", "z"], [8])],
    )
    with Executor(made, checks=True) as executor:
        (z,) = executor.run(np.ones(8, np.float32))
        np.testing.assert_array_equal(np.isnan(z), [False] * 4 + [True] * 4)


def test_an_executor_that_is_only_dropped_frees_parts_that_overlap_last_made_first():
    from torchedge.runtime.memory import ArenaMemory

    freed = []

    class Part:
        def __init__(self, offset):
            self.offset = offset

        def __del__(self):
            freed.append(self.offset)

    memory = ArenaMemory({}, None, (), [Part(offset) for offset in (0, 512, 256)])
    memory.memory.update(enumerate(memory.parts))
    del memory
    assert freed == [256, 512, 0]
    sizes = (900, 500, 300, 800, 200, 700)
    made = program(
        [
            tensor("x", (1000,), "input"),
            *[tensor(f"t{n}", (n,)) for n in sizes],
            tensor("z", (100,), "output"),
        ],
        [pointwise("add1", "b[i] = a[i] + 1;", ["read", "write"])],
        [
            ("add1", [a, b], [size])
            for (a, b), size in zip(
                pairwise(["x", *[f"t{n}" for n in sizes], "z"]),
                (*[min(p) for p in pairwise([1000, *sizes])], 100),
                strict=True,
            )
        ],
    )
    executor = Executor(made)
    assert executor.run(np.zeros(1000, np.float32))[0][0] == 7
    del executor
