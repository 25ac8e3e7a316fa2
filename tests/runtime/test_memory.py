"""Tensors to the device and back, in every order of their dimensions."""

import itertools

import numpy as np
import pytest
import torch

from torchedge.lowering.programs import StoredTensor
from torchedge.opencl import open_context
from torchedge.runtime.memory import DeviceTensor
from torchedge.runtime.tensor_memory import TensorMemory, transposition
from torchedge.textures.layouts import Layout

pytest.importorskip("pyopencl")


@pytest.fixture(scope="module")
def device():
    context = open_context()
    return TensorMemory(context, context.queue)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(5, 4, 3, 2), (35, 3, 1, 20), (17, 40), (6,), ()])
def test_every_order_there_and_back(device, shape):
    plain = torch.randn(shape)
    for order in itertools.permutations(range(len(shape))):
        stored = StoredTensor("x", shape, "float32", "input", Layout(order))
        memory = device.allocate(stored)
        for strides in itertools.permutations(range(len(shape))):
            tensor = torch.empty_permuted(shape, strides).copy_(plain) if shape else plain
            device.to_device(tensor, stored.layout, memory)
            read = device.read(DeviceTensor(stored, memory))
            np.testing.assert_array_equal(read, plain)
            found = device.to_host(stored, memory, tensor)
            wide = [d for d in range(len(shape)) if shape[d] != 1]
            assert torch.equal(found, plain)
            assert [found.stride(d) for d in wide] == [tensor.stride(d) for d in wide]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "int32", "int64"])
@pytest.mark.parametrize("layout", [Layout((2, 1, 0)), Layout((1, 0, 2)), Layout((0, 1, 2), "image", 1)])
def test_every_dtype(device, dtype, layout):
    if layout.storage == "image" and dtype == "int64":
        pytest.skip("no images of int64")
    plain = torch.randint(0, 2, (3, 20, 18)).to(getattr(torch, dtype))
    stored = StoredTensor("x", (3, 20, 18), dtype, "input", layout)
    memory = device.allocate(stored)
    view = torch.randint(0, 2, (3, 40, 18)).to(plain.dtype)[:, ::2]
    view.copy_(plain)
    device.to_device(view, layout, memory)
    found = device.to_host(stored, memory, torch.empty_strided((3, 20, 18), (1000, 18, 1)))
    assert torch.equal(found, plain) and found.stride() == (1000, 18, 1)


def test_what_turns_round():
    assert transposition((8, 4, 3, 3), (0, 1, 2, 3), (2, 3, 1, 0)) == (1, 8, 4, 9)
    assert transposition((8, 4, 3, 3), (2, 3, 1, 0), (0, 1, 2, 3)) == (1, 9, 4, 8)
    assert transposition((2, 4, 5, 6), (0, 1, 2, 3), (0, 2, 3, 1)) == (2, 4, 1, 30)
    assert transposition((8, 1, 3, 3), (0, 1, 2, 3), (2, 3, 0, 1)) == (1, 8, 1, 9)
    assert transposition((8, 4), (0, 1), (0, 1)) == ()
    assert transposition((2, 3, 4), (0, 1, 2), (1, 0, 2)) is None
