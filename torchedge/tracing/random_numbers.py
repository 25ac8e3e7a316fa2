"""Random operators of ATen as one counter-based operator, `random_uniform`, and arithmetic on its draws.

`random_uniform(seed, counter)` with the attributes `shape` and `offset` fills a float32 tensor with numbers
in [0, 1): element i (row-major) is ``w >> 8`` times 2^-24, w being the first word of Philox 4x32-10 with the
counter (i, offset, step counter, 0) and the key (seed, 0), all modulo 2^32. So a step draws the same numbers
on every device and in every order; `offset` differs between the random operators of a step, the counter
between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torchedge.errors import CaptureError
from torchedge.graphs.steps import GraphBuilder, Ref

SEED, COUNTER = "random.seed", "random.counter"
Form = tuple[tuple[int, ...], str]
_Rule = Callable[["Randomness", Mapping[str, Any], Form, str], int]


class Randomness:
    """The random operators of one step: they share a seed and a counter, both 0-d int64 states."""

    def __init__(self, builder: GraphBuilder, seed: int) -> None:
        self.builder, self._seed = builder, seed
        self._drawn = 0
        self._sources: tuple[int, int] | None = None

    @property
    def initial(self) -> dict[int, float]:
        """The seed before the first step (the counter is zero); empty if no number is drawn."""
        return {} if self._sources is None else {self._sources[0]: self._seed}

    def updates(self) -> list[tuple[int, int]]:
        """Add the increment of the counter; returns its update, or nothing if no number is drawn."""
        if self._sources is None:
            return []
        counter = self._sources[1]
        return [(counter, self.builder.apply("add", counter, 1, "random"))]

    def add(self, kind: str, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
        """Add the random operator `kind` (one of `RANDOM`) of a shape and dtype."""
        return RANDOM[kind](self, attrs, form, scope)

    def add_dropout(self, attrs: Mapping[str, Any], form: Form, scope: str) -> list[int | None]:
        """Add a dropout; returns its output and its mask, as `aten.native_dropout` does."""
        p, source, (shape, _), builder = float(attrs["p"]), attrs["input"], form, self.builder
        if attrs.get("train") is False or p == 0.0:
            ones = builder.call(
                "full", {"size": shape, "fill_value": True, "dtype": "bool"}, [(shape, "bool")]
            )
            return [source.value, ones[0]]
        drawn = Ref(self.uniform(shape, scope))
        mask = builder.call("gt", {"input": drawn, "other": p}, [(shape, "bool")], scope=scope)[0]
        masked = builder.call("mul", {"input": source, "other": Ref(mask)}, [form], scope=scope)[0]
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return [builder.apply("mul", masked, scale, scope), mask]

    def uniform(self, shape: tuple[int, ...], scope: str) -> int:
        """Add a draw of float32 numbers in [0, 1)."""
        builder = self.builder
        if self._sources is None:
            self._sources = (
                builder.add(SEED, (), "int64", "state"),
                builder.add(COUNTER, (), "int64", "state"),
            )
        seed, counter = map(Ref, self._sources)
        attrs = {"seed": seed, "counter": counter, "shape": shape, "offset": self._drawn}
        self._drawn += 1
        return builder.call("random_uniform", attrs, [(shape, "float32")], scope=scope)[0]


def _rand(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    return r.builder.cast(r.uniform(form[0], scope), form[1], scope)


def _uniform(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    low, high = attrs.get("from", 0.0), attrs.get("to", 1.0)
    return _affine(r, _rand(r, attrs, form, scope), high - low, low, scope)


def _affine(r: Randomness, value: int, scale: Any, shift: Any, scope: str) -> int:
    if scale != 1:
        value = r.builder.apply("mul", value, scale, scope)
    return value if shift == 0 else r.builder.apply("add", value, shift, scope)


def _bernoulli(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    """Return ones where a draw is below the probability: the argument `p`, or the input itself."""
    chance = attrs.get("p", attrs["input"])
    drawn = Ref(r.uniform(form[0], scope))
    below = r.builder.call("lt", {"input": drawn, "other": chance}, [(form[0], "bool")], scope=scope)[0]
    return r.builder.cast(below, form[1], scope)


def _randn(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    """Return the Box-Muller transform of two draws; ``1 - u`` keeps the logarithm finite."""
    first, second = r.uniform(form[0], scope), r.uniform(form[0], scope)
    flipped = r.builder.apply("rsub", first, 1.0, scope)
    logarithm = r.builder.apply("log", flipped, scope=scope)
    scaled = r.builder.apply("mul", logarithm, -2.0, scope)
    radius = r.builder.apply("sqrt", scaled, scope=scope)
    angle = r.builder.apply("mul", second, 2.0 * math.pi, scope)
    cosine = r.builder.apply("cos", angle, scope=scope)
    return r.builder.cast(r.builder.apply("mul", radius, Ref(cosine), scope), form[1], scope)


def _normal(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    mean, std = attrs.get("mean", 0.0), attrs.get("std", 1.0)
    return _affine(r, _randn(r, attrs, form, scope), std, mean, scope)


def _exponential(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    drawn = r.uniform(form[0], scope)
    flipped = r.builder.apply("rsub", drawn, 1.0, scope)
    logarithm = r.builder.apply("log", flipped, scope=scope)
    return r.builder.cast(_affine(r, logarithm, -1.0 / attrs.get("lambd", 1.0), 0, scope), form[1], scope)


def _randint(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
    low, high = attrs.get("low", 0), attrs["high"]
    if high - low > 1 << 24:
        raise CaptureError(
            f"randint draws from {high - low} numbers; expected at most 2^24 of them, as draws have 24 bits"
        )
    drawn = r.uniform(form[0], scope)
    scaled = _affine(r, drawn, high - low, 0, scope)
    floor = r.builder.apply("floor", scaled, scope=scope)
    return _affine(r, r.builder.cast(floor, form[1], scope), 1, low, scope)


RANDOM: dict[str, _Rule] = {
    "rand": _rand, "rand_like": _rand, "uniform": _uniform, "bernoulli": _bernoulli, "randn": _randn,
    "randn_like": _randn, "normal_functional": _normal, "normal": _normal, "randint": _randint,
    "randint_like": _randint, "exponential": _exponential,
}  # fmt: skip
"""The rule that expresses each random operator of ATen with one result by uniform numbers."""
