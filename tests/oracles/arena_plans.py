"""The best arena of a few buffers by trying every order, and lifetimes as a training step has them."""

from itertools import permutations

import numpy as np


def least_bytes(sizes, lifetimes):
    """The smallest arena: in some order, putting each buffer at its lowest free place is best."""
    return min(_height(order, sizes, lifetimes) for order in permutations(sizes))


def _height(order, sizes, lifetimes):
    offsets = {}
    for new in order:
        begin, end = lifetimes[new]
        near = [o for o in offsets if lifetimes[o][0] < end and begin < lifetimes[o][1]]
        candidates = [0, *[offsets[o] + sizes[o] for o in near]]
        offsets[new] = min(
            at
            for at in candidates
            if all(at >= offsets[o] + sizes[o] or at + sizes[new] <= offsets[o] for o in near)
        )
    return max(offsets[o] + sizes[o] for o in offsets)


def training_lifetimes(layers, seed):
    """Activations that nest as in a training step, gradients that live for two launches, and workspaces."""
    chance = np.random.default_rng(seed)
    sizes, lifetimes = {}, {}
    end = 2 * layers

    def add(size, start, stop):
        sizes[len(sizes)] = size
        lifetimes[len(lifetimes)] = (start, stop)

    for layer in range(layers):
        size = int(2 ** chance.uniform(10, 22))
        kept = chance.random() < 0.7
        add(size, layer, end - layer if kept else layer + 2)  # the activation
        add(size, end - layer - 1, min(end - layer + 1, end + 1))  # its gradient
        if chance.random() < 0.3:
            add(int(2 ** chance.uniform(8, 24)), end - layer - 1, end - layer)
    return sizes, lifetimes
