"""Leaves a model, and the random states of the process, as they were found."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def kept_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Put back every module's attributes afterwards, and what lies in lists, dicts and sets among them.

    A forward pass may count steps, cache masks or assign buffers; traced, it would leave stand-ins behind.
    """
    homes = [vars(module) for module in model.modules()]
    before = [(home, home.copy(), list(map(id, home.values()))) for home in homes]
    boxes = [box for home in homes for box in home.values() if isinstance(box, (dict, list, set))]
    filled: list[tuple[Any, Any, Any]] = [(box, box.copy(), _identities(box)) for box in boxes if box]
    empty = [box for box in boxes if not box]
    try:
        yield
    finally:
        for home, content, identities in before:
            if list(map(id, home.values())) != identities:
                home.clear()
                home.update(content)
        for box, held, marks in filled:
            if _identities(box) != marks:
                box.clear()
                (box.extend if isinstance(box, list) else box.update)(held)
        for box in empty:
            if box:
                box.clear()


def _identities(box: Any) -> Any:
    """Return what tells whether a container holds the same objects."""
    if isinstance(box, dict):
        return list(map(id, box.values()))
    return list(map(id, box)) if isinstance(box, list) else set(map(id, box))


@contextmanager
def kept_modes(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """Put the model into the mode asked for; every module's own flag comes back afterwards."""
    if model.training == training:
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Start from fixed seeds and bring the generators of torch (CPU), Python and numpy back afterwards.

    Models that draw numbers in Python (stochastic depth, layer drop) so give the same graph every time.
    """
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy.random")
    drawn = numpy.get_state() if numpy is not None else None
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if numpy is not None:
        numpy.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(drawn)


def forget_cached(kinds: tuple[type, ...]) -> None:
    """Clear each `functools.lru_cache` that holds a stand-in, which the next real run must not meet."""
    caches: list[Any] = [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]
    for cached in caches:
        if cached.cache_info().currsize and any(type(held) in kinds for held in _held(cached)):
            cached.cache_clear()


def _held(cached: Any) -> Iterator[Any]:
    """Everything within three steps of a cache: its entries, and what lies in containers there."""
    found = gc.get_referents(cached)
    for _ in range(3):
        yield from found
        found = gc.get_referents(
            *[f for f in found if isinstance(f, (tuple, list, dict)) or "lru" in type(f).__name__]
        )
