"""Programs written by hand, for tests of the executor and of what plans memory."""

from dataclasses import replace
from itertools import pairwise

from torchedge.expressions.dialect import SAMPLER
from torchedge.lowering.arenas import planned
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor
from torchedge.textures.layouts import row_major

ALIGNMENT = 512


def tensor(name, shape, role="intermediate", dtype="float32", layout=None, fill=0.0):
    return StoredTensor(name, shape, dtype, role, layout or row_major(len(shape)), fill)


def pointwise(name, statement, access, types=None, **about):
    """A kernel over element i; its arguments are a, b, c... in the order of `access`."""
    names = "abcdefgh"[: len(access)]
    types = types or ["float"] * len(access)
    arguments = ", ".join(
        f"__global {'const ' if how == 'read' else ''}{kind} *{letter}"
        for letter, how, kind in zip(names, access, types, strict=True)
    )
    source = (
        f"__kernel void {name}({arguments}) {{\n    const int i = get_global_id(0);\n    {statement}\n}}\n"
    )
    return Kernel(name, source, tuple(access), **about)


def program(tensors, kernels, launches, inputs=None, outputs=None, hyperparameters=(), arena=None):
    """A program by names: launches are (kernel, tensors, global size[, local size]).

    Tensors with the role of an input or an output are the inputs and outputs, in their order, unless named.
    """
    index = {t.name: i for i, t in enumerate(tensors)}
    number = {k.name: i for i, k in enumerate(kernels)}
    made = Program(
        name="small",
        tensors=tuple(tensors),
        kernels=tuple(kernels),
        launches=tuple(
            Launch(number[kernel], tuple(index[t] for t in names), tuple(size), *more)
            for kernel, names, size, *more in launches
        ),
        inputs=tuple(index[name] for name in inputs or [t.name for t in tensors if t.role == "input"]),
        outputs=tuple(index[name] for name in outputs or [t.name for t in tensors if t.role == "output"]),
        arena=arena or Arena(0),
        hyperparameters={name: index[name] for name in hyperparameters},
    )
    return made if arena else planned(made, ALIGNMENT)


def vector_add(count=1000):
    return program(
        [tensor("x", (count,), "input"), tensor("y", (count,), "input"), tensor("z", (count,), "output")],
        [pointwise("add", "c[i] = a[i] + b[i];", ["read", "read", "write"])],
        [("add", ["x", "y", "z"], [count])],
    )


def chain(length=6, count=1000, in_place=False):
    """x -> t0 -> t1 -> ... -> z, each adding one: two places suffice (one where in place is allowed)."""
    middle = [f"t{i}" for i in range(length)]
    names = ["x", *middle, "z"]
    add = pointwise("add1", "b[i] = a[i] + 1;", ["read", "write"], in_place=((0, 1),) if in_place else ())
    return program(
        [
            tensor("x", (count,), "input"),
            *[tensor(n, (count,)) for n in middle],
            tensor("z", (count,), "output"),
        ],
        [add],
        [("add1", [a, b], [count]) for a, b in pairwise(names)],
    )


def sgd(count=10):
    """w -= lr * x, with a step counter; the loss is what w was, summed."""
    return program(
        [
            tensor("x", (count,), "input"),
            tensor("lr", (), "input"),
            tensor("w", (count,), "parameter"),
            tensor("steps", (), "state", "int64", fill=5),
            tensor("total", (), "output"),
        ],
        [
            pointwise(
                "total", "float s = 0; for (int j = 0; j < 10; j++) s += b[j]; a[i] = s;", ["write", "read"]
            ),
            pointwise("sgd", "a[i] -= b[0] * c[i];", ["update", "read", "read"]),
            pointwise("count", "a[0] += 1;", ["update"], ["long"]),
        ],
        [("total", ["total", "w"], [1]), ("sgd", ["w", "lr", "x"], [count]), ("count", ["steps"], [1])],
        hyperparameters=["lr"],
    )


def image_copy(shape, layout, dtype="float32", storage="image", count=3):
    """x -> image -> ... -> image -> z over texels: intermediates share slots."""
    held = replace(layout, storage=storage)
    width, height = held.extent(shape)
    source = SAMPLER + (
        "__kernel void texels(read_only image2d_t a, write_only image2d_t b) {\n"
        "    const int2 at = (int2)(get_global_id(0), get_global_id(1));\n"
        "    write_imagef(b, at, read_imagef(a, te_sampler, at) + 1.0f);\n}\n"
    )
    middle = [f"t{i}" for i in range(count)]
    names = ["x", *middle, "z"]
    roles = ["input", *["intermediate"] * count, "output"]
    return program(
        [tensor(n, shape, r, dtype, held) for n, r in zip(names, roles, strict=True)],
        [Kernel("texels", source, ("read", "write"))],
        [("texels", [a, b], [width, height]) for a, b in pairwise(names)],
    )
