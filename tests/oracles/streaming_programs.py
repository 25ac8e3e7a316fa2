"""Programs with weights, overlap instances of them, and plans at random, for tests of streaming."""

from dataclasses import replace

import numpy as np
from oracles.small_programs import pointwise, program, tensor

from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.plans import make_plan
from torchedge.streaming.schedules import weight_uses
from torchedge.textures.layouts import Layout

STORAGES = {
    "buffer": lambda columns: Layout((0, 1)),
    "image": lambda columns: Layout((0, 1), "image", 1),
    "image_buffer": lambda columns: Layout((0, 1), "image_buffer", 1, row_texels=-(-columns // 4 // 64) * 64),
}


def instance_of(made, chunk_bytes=4096, omit=()):
    """The overlap instance of a program: a layer for each launch, a weight for each parameter or the like."""
    weights = []
    for index, (first, last) in weight_uses(made).items():
        stored = made.tensors[index]
        if stored.name not in omit:
            chunks = -(-stored.nbytes // chunk_bytes)
            weights.append(Weight(stored.name, stored.nbytes, chunks, first + 1, last + 1))
    layers = tuple([Layer(f"launch {i}", 2**31, 1.0, "reusable") for i in range(len(made.launches))])
    return Instance(chunk_bytes, layers, tuple(weights), lam=0.5, name=made.name)


def random_plan(instance, seed):
    """A plan that streams about two thirds of the weights, the chunks of each in random earlier layers."""
    chance = np.random.default_rng(seed)
    streamed = {}
    for weight in instance.weights:
        if weight.first_use == 1 or chance.random() < 0.3:
            continue
        loads = {}
        for layer in chance.integers(1, weight.first_use, weight.chunks).tolist():
            loads[layer] = loads.get(layer, 0) + 1
        streamed[weight.name] = loads
    return make_plan(instance, streamed, {"strategy": "random"})


def weighted_chain(weights, count=64):
    """x -> ... -> z: launch k adds weight k, a vector of `weights[k]` floats, in all `count` elements."""
    names = ["x", *[f"t{k}" for k in range(len(weights) - 1)], "z"]
    kernels = [
        pointwise(
            f"add{size}",
            f"float s = b[i]; for (int j = 0; j < {size}; j++) s = s * 0.9f + a[j] * (1 + j % 3); c[i] = s;",
            ["read", "read", "write"],
        )
        for size in sorted(set(weights))
    ]
    tensors = [tensor("x", (count,), "input"), tensor("z", (count,), "output")]
    tensors += [tensor(name, (count,)) for name in names[1:-1]]
    tensors += [tensor(f"w{k}", (size,), "parameter") for k, size in enumerate(weights)]
    launches = [(f"add{size}", [f"w{k}", names[k], names[k + 1]], [count]) for k, size in enumerate(weights)]
    return program(tensors, kernels, launches)


def data_of(made, seed=0):
    """Logical arrays for the weights of a program, by name."""
    chance = np.random.default_rng(seed)
    return {
        t.name: chance.standard_normal(t.shape).astype(t.dtype)
        for t in made.tensors
        if t.role in ("parameter", "buffer", "constant")
    }


def packed_data(made, data):
    """The arrays of `data_of`, packed by the layouts of their tensors."""
    return {t.name: t.layout.pack(data[t.name]) for t in made.tensors if t.name in data}


def program_of_amounts(rows):
    """A launch for each (load class, FLOPs, bytes read, bytes written), of 125 work-items; no weights."""
    tensors, kernels, launches = [], [], []
    for k, (load_class, _, read, written) in enumerate(rows):
        tensors += [
            tensor(f"in{k}", (read,), "input", "uint8"),
            tensor(f"out{k}", (written,), "output", "uint8"),
        ]
        kernels.append(pointwise(f"k{k}", "", ["read", "write"], load_class=load_class))
        launches.append((f"k{k}", [f"in{k}", f"out{k}"], (125,)))
    made = program(tensors, kernels, launches)
    pairs = zip(made.launches, rows, strict=True)
    return replace(made, launches=tuple([replace(launch, flops=row[1]) for launch, row in pairs]))


def streamed_chain(count, kib, flops=0, values=1024):
    """x -> ... -> z through `count` launches that each may load much beside them, weights of `kib` KiB."""
    made = weighted_chain([kib * 256] * count, values)
    kernels = tuple([replace(kernel, load_class="reusable") for kernel in made.kernels])
    launches = tuple([replace(launch, flops=flops) for launch in made.launches])
    return replace(made, kernels=kernels, launches=launches)
