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
from torchedge.graphs.steps import GraphBuilder, Ref, Term

SEED, COUNTER = "random.seed", "random.counter"
Form = tuple[tuple[int, ...], str]
_Rule = Callable[["Randomness", Mapping[str, Any], Form, str], Term]


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
        counter = Term(self.builder, self._sources[1], "random")
        return [(counter.value, (counter + 1).value)]

    def add(self, kind: str, attrs: Mapping[str, Any], form: Form, scope: str) -> int:
        """Add the random operator `kind` (one of `RANDOM`) of a shape and dtype."""
        return RANDOM[kind](self, attrs, form, scope).value

    def add_dropout(self, attrs: Mapping[str, Any], form: Form, scope: str) -> list[int | None]:
        """Add a dropout; returns its output and its mask, as `aten.native_dropout` does."""
        p, source, (shape, _), builder = float(attrs["p"]), attrs["input"], form, self.builder
        if attrs.get("train") is False or p == 0.0:
            ones = builder.call(
                "full", {"size": shape, "fill_value": True, "dtype": "bool"}, [(shape, "bool")]
            )
            return [source.value, ones[0]]
        drawn = Ref(self.uniform(shape, scope).value)
        mask = builder.call("gt", {"input": drawn, "other": p}, [(shape, "bool")], scope=scope)[0]
        masked = builder.call("mul", {"input": source, "other": Ref(mask)}, [form], scope=scope)[0]
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return [(Term(builder, masked, scope) * scale).value, mask]

    def uniform(self, shape: tuple[int, ...], scope: str) -> Term:
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
        (drawn,) = builder.call("random_uniform", attrs, [(shape, "float32")], scope=scope)
        return Term(builder, drawn, scope)


def _rand(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    return r.uniform(form[0], scope).cast(form[1])


def _uniform(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    low, high = attrs.get("from", 0.0), attrs.get("to", 1.0)
    return _affine(_rand(r, attrs, form, scope), high - low, low)


def _affine(value: Term, scale: Any, shift: Any) -> Term:
    value = value if scale == 1 else value * scale
    return value if shift == 0 else value + shift


def _bernoulli(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    """Return ones where a draw is below the probability: the argument `p`, or the input itself."""
    chance = attrs.get("p", attrs["input"])
    drawn = Ref(r.uniform(form[0], scope).value)
    below = r.builder.call("lt", {"input": drawn, "other": chance}, [(form[0], "bool")], scope=scope)[0]
    return Term(r.builder, below, scope).cast(form[1])


def _randn(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    """Return the Box-Muller transform of two draws; ``1 - u`` keeps the logarithm finite."""
    first, second = r.uniform(form[0], scope), r.uniform(form[0], scope)
    radius = ((1.0 - first).apply("log") * -2.0).apply("sqrt")
    return (radius * (second * (2.0 * math.pi)).apply("cos")).cast(form[1])


def _normal(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    mean, std = attrs.get("mean", 0.0), attrs.get("std", 1.0)
    return _affine(_randn(r, attrs, form, scope), std, mean)


def _exponential(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    logarithm = (1.0 - r.uniform(form[0], scope)).apply("log")
    return _affine(logarithm, -1.0 / attrs.get("lambd", 1.0), 0).cast(form[1])


def _randint(r: Randomness, attrs: Mapping[str, Any], form: Form, scope: str) -> Term:
    low, high = attrs.get("low", 0), attrs["high"]
    if high - low > 1 << 24:
        raise CaptureError(
            f"randint draws from {high - low} numbers; expected at most 2^24 of them, as draws have 24 bits"
        )
    floor = _affine(r.uniform(form[0], scope), high - low, 0).apply("floor")
    return _affine(floor.cast(form[1]), 1, low)


RANDOM: dict[str, _Rule] = {
    "rand": _rand, "rand_like": _rand, "uniform": _uniform, "bernoulli": _bernoulli, "randn": _randn,
    "randn_like": _randn, "normal_functional": _normal, "normal": _normal, "randint": _randint,
    "randint_like": _randint, "exponential": _exponential,
}  # fmt: skip
"""The rule that expresses each random operator of ATen with one result by uniform numbers."""
