"""Launches and weights of a program: classes by kernel, amounts and uses by their definitions."""

import pytest
import torch
from oracles.small_programs import pointwise, program, tensor
from oracles.streaming_programs import weighted_chain
from torch import nn

from torchedge.graphs import WEIGHT_ROLES
from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.lowering.targets import TARGETS
from torchedge.streaming.instances import Weight
from torchedge.streaming.schedules import LaunchWork, weights_of, works_of


def lowered(model, *example, target="cpu"):
    return lower_inference(capture_inference_step(model, example), TARGETS[target]).program


def small():
    """b = a + w; c = b * w + v, w kept at 8 bytes, v at 16."""
    return program(
        [
            tensor("a", (2,), "input"),
            tensor("w", (2,), "parameter"),
            tensor("v", (4,), "constant"),
            tensor("unused", (8,), "buffer"),
            tensor("b", (2,)),
            tensor("c", (2,), "output"),
        ],
        [
            pointwise("add", "c[i] = a[i] + b[i];", ["read", "read", "write"]),
            pointwise("fma", "d[i] = a[i] * b[i] + c[i];", ["read"] * 3 + ["write"], load_class="reusable"),
        ],
        [("add", "awb", (2,), (1,), "first", (), 2), ("fma", "bwvc", (2,))],
    )


def test_amounts_of_launches():
    assert works_of(small()) == (
        LaunchWork("first add", "elemental", 2, 16, 8, 2, 1),
        LaunchWork("fma", "reusable", 0, 32, 8, 2, None),
    )
    assert [work.bytes_moved for work in works_of(small())] == [24, 40]


def test_uses_of_weights():
    assert weights_of(small(), 10) == (Weight("w", 8, 1, 1, 2), Weight("v", 16, 2, 2, 2))


def test_weights_that_are_written_or_returned_are_not_streamed():
    tensors = [tensor("a", (2,), "input"), tensor("b", (2,), "output")]
    tensors += [tensor(name, (2,), "buffer") for name in ("returned", "counted", "plain")]
    kernels = [
        pointwise("copy", "b[i] = a[i];", ["read", "write"]),
        pointwise("count", "a[i] += b[i];", ["update", "read"]),
    ]
    launches = [("copy", ["a", "b"], (2,)), ("copy", ["returned", "b"], (2,))]
    launches += [("count", ["counted", "plain"], (2,)), ("copy", ["a", "b"], (2,))]
    made = program(tensors, kernels, launches, ["a"], ["b", "returned"])
    assert weights_of(made, 4) == (Weight("plain", 8, 2, 3, 3),)


@pytest.mark.parametrize(
    ("floats", "kept"),
    [
        ([10_000, 50, 49, 1], ["w0"]),  # 0.99 % of all
        ([10_000, 200], ["w0", "w1"]),
        ([4_000_000, 16_384, 16_385], ["w0", "w2"]),  # 64 KiB, and more
        ([1], ["w0"]),
        ([1] * 300, [f"w{k}" for k in range(3, 300)]),
    ],
)
def test_the_smallest_weights_are_not_streamed(floats, kept):
    weights = weights_of(weighted_chain(floats), 4096)
    assert [weight.name for weight in weights] == kept
    left_out = 4 * sum(floats) - sum(weight.nbytes for weight in weights)
    assert left_out <= 4 * sum(floats) / 100


@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_classes_follow_from_kernels(target):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Softmax(-1), nn.Linear(64, 64))
    made = lowered(model, torch.zeros(4, 64), target=target)
    works = works_of(made)
    assert {w.load_class for w in works} >= {"reusable", "hierarchical"}
    for work, launch in zip(works, made.launches, strict=True):
        kernel = made.kernels[launch.kernel]
        contraction = "contraction" in kernel.name and kernel.kind != "sum of slices"
        rows = kernel.name.startswith("rows")
        wanted = "reusable" if contraction else "hierarchical" if rows else "elemental"
        assert (work.load_class, work.flops) == (wanted, launch.flops)
        assert work.bytes_moved == launch.nbytes
    stored = {t.name: t.nbytes for t in made.tensors if t.role in WEIGHT_ROLES}
    streamed = {w.name: w.nbytes for w in weights_of(made, 100)}
    assert streamed.items() <= stored.items() and {"0.weight", "3.weight"} <= streamed.keys()
    assert sum(work.flops for work in works) >= 2 * 2 * 4 * 64 * 64
