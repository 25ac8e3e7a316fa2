"""Random overlap instances: seeded ones for long runs, hypothesis' for those that shrink."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from hypothesis import strategies as st

from torchedge.lowering.programs import LoadClassName
from torchedge.streaming.instances import Distance, Instance, Layer, Residency, Weight

Size = Literal["tiny", "small", "medium"]
Tight = Literal["weights", "chunks", "large"]

SIZES: dict[Size, tuple[int, int, int]] = {"tiny": (7, 5, 4), "small": (24, 14, 12), "medium": (150, 90, 60)}
"""Most layers, weights, chunks a weight."""

LAMBDAS = (0.0, 0.1, 0.5, 0.9, 1.0)
SHARES = (0.03, 0.05, 0.12, 0.6, 0.2)
"""How often each lambda is drawn: where preloading is cheap, plans are dull."""
CHUNK_BYTES = 1024


def layer(number: int, capacity: int) -> Layer:
    """A layer of whatever class."""
    classes = get_args(LoadClassName)
    return Layer(f"layer{number}", capacity, 0.25 * (1 + number % 3), classes[number % 3])


def weight(number: int, chunks: int, first: int, last: int, *, missing_bytes: int = 0) -> Weight:
    """A weight whose last chunk lacks some bytes."""
    return Weight(f"w{number}", chunks * CHUNK_BYTES - missing_bytes, chunks, first, last)


def random_instance(seed: int, size: Size = "tiny") -> Instance:
    """An instance drawn from a seed: limits, shared weights, layers without capacity, all of it at times."""
    rng = np.random.default_rng(seed)
    most_layers, most_weights, most_chunks = SIZES[size]
    count = int(rng.integers(most_layers // 2, most_layers + 1)) if rng.random() < 0.95 else 1
    weight_count = int(rng.integers(most_weights // 3, most_weights + 1)) if rng.random() < 0.97 else 0
    weights = _weights(rng, count, weight_count, most_chunks)
    total = sum(w.chunks for w in weights)
    # From far too little capacity to more than enough, a part of the layers without any.
    mean = total / count * float(rng.choice([0.5, 1.0, 2.0, 4.0]))
    capacities = rng.integers(0, max(1, round(2 * mean)) + 1, count)
    capacities[rng.random(count) < rng.choice([0.0, 0.0, 0.3, 0.5])] = 0
    lam = float(rng.choice(LAMBDAS, p=SHARES)) if rng.random() < 0.8 else round(rng.uniform(0.5, 1), 3)
    instance = Instance(
        CHUNK_BYTES,
        tuple(layer(n, int(c)) for n, c in enumerate(capacities, 1)),
        weights,
        lam=lam,
        residency=get_args(Residency)[int(rng.integers(2))],
        distance=get_args(Distance)[int(rng.integers(2))],
        name=f"{size}-{seed}",
    )
    if rng.random() < 0.5:
        instance = replace(instance, m_peak_chunks=int(rng.integers(total // 4, 3 * total // 4 + 2)))
    if rng.random() < 0.35:
        instance = replace(instance, memory_chunks=int(rng.integers(3 * total // 4, total + 2)))
    return instance


def any_instance(seed: int) -> Instance:
    """An instance of whatever size and options: to 100,000 layers and weights, to 10^9 chunks a weight."""
    rng = np.random.default_rng([seed, 12])
    most = float(rng.choice([1.5, 3.0, 4.0, 5.0], p=[0.5, 0.35, 0.1, 0.05]))
    count, weight_count = (round(10 ** rng.uniform(0, most)) for _ in range(2))
    weight_count *= bool(rng.random() > 0.01)
    largest = float(rng.choice([1, 2, 3, 6, 9]))
    smallest = float(rng.choice([0, 0, largest / 2, largest]))
    sizes = (10 ** rng.uniform(smallest, largest, weight_count)).astype(np.int64)
    if rng.random() < 0.3:  # few sizes, as models have
        sizes = rng.choice(sizes[: int(rng.integers(1, 8))], weight_count) if weight_count else sizes
    first = rng.integers(1, count + 1, weight_count)
    if rng.random() < 0.3:
        first = np.sort(rng.choice(first, weight_count)) if weight_count else first
    tied = rng.random(weight_count) < rng.choice([0.0, 0.0, 0.1, 0.5])
    last = np.where(tied, rng.integers(first, count + 1), first)
    total = int(sizes.sum())
    mean = total / count * 10 ** rng.uniform(-1, 1)
    capacities = rng.exponential(max(mean, 1e-9), count).astype(np.int64)
    capacities[rng.random(count) < rng.choice([0.0, 0.3, 0.8])] = 0
    if rng.random() < 0.05:
        capacities[:] = 0 if rng.random() < 0.5 else 2**31
    limit = (None, total, 3 * total // 4, total // 2, total // 10, total // 100, int(sizes.max(initial=0)), 0)
    return Instance(
        1,
        tuple(layer(n, min(int(c), 2**31)) for n, c in enumerate(capacities, 1)),
        tuple(
            Weight(f"w{n}", int(c), int(c), int(i), int(j))
            for n, (c, i, j) in enumerate(zip(sizes, first, last, strict=True))
        ),
        m_peak_chunks=limit[int(rng.choice(8, p=[0.4, 0.05, 0.05, 0.1, 0.15, 0.1, 0.1, 0.05]))],
        lam=float(rng.choice(LAMBDAS)) if rng.random() < 0.8 else round(rng.uniform(0, 1), 3),
        memory_chunks=limit[int(rng.choice(8, p=[0.55, 0.05, 0.15, 0.15, 0.05, 0.02, 0.02, 0.01]))],
        residency=get_args(Residency)[int(rng.integers(2))],
        distance=get_args(Distance)[int(rng.integers(2))],
        name=f"any-{seed}",
    )


def tight_instance(seed: int, kind: Tight = "weights") -> Instance:
    """An instance with little in flight, of 7 to 36 layers and 43 to 56 weights.

    kind: the residency, or "large" for 2 layers and 300 weights of 10^6 to 10^9 chunks.
    """
    rng = np.random.default_rng([seed, 7])
    if kind == "large":
        count, sizes = 2, (10 ** rng.uniform(6, 9, 300)).astype(np.int64)
    else:
        count, sizes = int(rng.integers(7, 37)), rng.integers(1, 101, int(rng.integers(43, 57)))
    first = rng.integers(1, count + 1, len(sizes))
    last = np.where(rng.random(len(sizes)) < 0.1, rng.integers(first, count + 1), first)
    total = int(sizes.sum())
    mean = total / count * rng.uniform(0.3, 2)
    return Instance(
        1,
        tuple(layer(n, min(int(c), 2**31)) for n, c in enumerate(rng.exponential(mean, count), 1)),
        tuple(
            Weight(f"w{n}", int(c), int(c), int(i), int(j))
            for n, (c, i, j) in enumerate(zip(sizes, first, last, strict=True))
        ),
        m_peak_chunks=int(total * rng.uniform(0.02, 0.15)),
        lam=float(rng.choice(LAMBDAS[1:])),
        memory_chunks=int(total * rng.uniform(0.8, 1)) if kind != "large" and rng.random() < 0.3 else None,
        residency="chunks" if kind == "chunks" else "weights",
        name=f"tight-{kind}-{seed}",
    )


def _weights(rng: np.random.Generator, layers: int, count: int, most_chunks: int) -> tuple[Weight, ...]:
    equal = int(rng.integers(1, most_chunks + 1)) if rng.random() < 0.2 else 0
    big = int(rng.integers(count)) if count and rng.random() < 0.2 else -1
    found = []
    for number in range(count):
        chunks = equal or int(rng.integers(1, max(most_chunks // 2, 3) + 1))
        chunks = most_chunks if number == big else chunks
        first = int(rng.integers(min(2, layers), layers + 1)) if rng.random() < 0.95 else 1
        last = int(rng.integers(first, layers + 1)) if rng.random() < 0.3 else first
        found.append(weight(number, chunks, first, last, missing_bytes=int(rng.integers(CHUNK_BYTES))))
    return tuple(found)


@st.composite
def instances(
    draw: st.DrawFn, *, max_layers: int = 7, max_weights: int = 5, max_chunks: int = 4, limits: bool = True
) -> Instance:
    """Instances that shrink to few layers, few weights, no limits."""
    count = draw(st.integers(1, max_layers))
    capacities = draw(st.lists(st.integers(0, 2 * max_chunks), min_size=count, max_size=count))
    found = []
    for number in range(draw(st.integers(0, max_weights))):
        first = draw(st.integers(1, count))
        last = draw(st.just(first) | st.integers(first, count))
        found.append(weight(number, draw(st.integers(1, max_chunks)), first, last))
    total = sum(w.chunks for w in found)
    limit = st.none() | st.integers(0, total + 1) if limits else st.none()
    return Instance(
        CHUNK_BYTES,
        tuple(layer(n, c) for n, c in enumerate(capacities, 1)),
        tuple(found),
        m_peak_chunks=draw(limit),
        lam=draw(st.sampled_from(LAMBDAS)),
        memory_chunks=draw(limit),
        residency=draw(st.sampled_from(get_args(Residency))),
        distance=draw(st.sampled_from(get_args(Distance))),
    )
