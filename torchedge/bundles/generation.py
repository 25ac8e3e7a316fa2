"""Generation of text by the methods "prefill" (a chunk of tokens) and "decode" (one) of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchedge.bundles.manifests import Port
from torchedge.errors import InputError, check_function, check_whole, described

PREFILL, DECODE = "prefill", "decode"
CACHES = ("keys.", "values.")
"""How names of caches begin; they are [1, heads, tokens, width]."""


@dataclass(frozen=True)
class Sampling:
    """How a token follows from its logits; temperature 0: the most likely one.

    top_k: among so many of the most likely tokens. top_p: among the fewest most likely ones whose
    probabilities add up to it. Both as transformers has them, after the temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Raise InputError for a setting that is out of range."""
        for name, value, most in (("temperature", self.temperature, 1e6), ("top_p", self.top_p, 1.0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InputError(f"{name} is {described(value)}; expected a number")
            least = 0.0 if name == "temperature" else 1e-9
            if value is not None and not least <= value <= most:
                raise InputError(f"{name} is {value}; expected a number from {least:g} to {most:g}")
        if self.top_k is not None:
            check_whole("top_k", self.top_k)

    def draw(self, logits: npt.NDArray[Any], generator: Generator) -> int:
        """Return a token. Arithmetic is such that the native runner gets the same one, on any machine."""
        scores = np.asarray(logits, np.float64)
        if not self.temperature:
            return int(scores.argmax())
        scores = (scores - scores.max()) / self.temperature
        if self.top_k is not None and self.top_k < scores.size:
            scores = np.where(scores < np.partition(scores, -self.top_k)[-self.top_k], -np.inf, scores)
        order = np.argsort(-scores, kind="stable")
        sums = np.cumsum(exp(scores[order]))
        kept = sums.size
        if self.top_p is not None:
            kept = min(kept, int(sums.searchsorted(self.top_p * sums[-1])) + 1)
        chosen = int(sums[:kept].searchsorted(generator.random() * sums[kept - 1], "right"))
        return int(order[min(chosen, kept - 1)])


class Generator:
    """Numbers from 0 to 1 in 53 bits, by SplitMix64."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def random(self) -> float:
        """Return the next number."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        bits = (self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return float((bits ^ (bits >> 31)) >> 11) * 2.0**-53


def exp(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return exp of numbers up to 0, by products and sums alone: libraries' own differ in the last bit."""
    kept = np.maximum(values, -700.0)
    whole = np.rint(kept * float.fromhex("0x1.71547652b82fep+0"))
    rest = kept - whole * float.fromhex("0x1.62e42feep-1") - whole * float.fromhex("0x1.a39ef35793c76p-33")
    sums = np.ones_like(kept)
    for n in range(13, 0, -1):
        sums = 1 + sums * rest / n
    return np.where(values > -700, np.ldexp(sums, whole.astype(np.int32)), 0.0)


Ports = tuple[Sequence[Port], Sequence[Port]]
"""Inputs and outputs of a method."""


class Stepping(Protocol):
    """What runs the methods: `bundles.bundle.Runner`. kept: the tokens that its caches hold."""

    kept: tuple[int, ...]

    def step(self, *inputs: object, method: str | None = None) -> list[npt.NDArray[Any]]:
        """Run a method and forget what is kept."""


@dataclass(frozen=True)
class Windows:
    """chunk: tokens that a prefill takes; length: those that the caches hold."""

    chunk: int
    length: int

    @classmethod
    def of(cls, methods: Mapping[str, Ports], states: Iterable[Port]) -> Windows:
        """Return those of methods, by the inputs and outputs of each; raises InputError for other methods."""
        pair = [methods[name] for name in (PREFILL, DECODE) if name in methods]
        shapes = [[port.shape for port in inputs] for inputs, _ in pair]
        logits = [[port.shape for port in outputs if port.dtype == "float32"] for _, outputs in pair]
        sizes = {p.shape[2] if len(p.shape) == 4 else 0 for p in states if p.name.startswith(CACHES)}
        chunk = shapes[0][0][-1] if shapes and shapes[0] and shapes[0][0] else 0
        takes = shapes == [[(1, tokens), (1,), (1,)] for tokens in (chunk, 1)]
        gives = all(
            len(shape) == 1 and len(shape[0]) == 2 and shape[0][0] == 1 <= shape[0][1] for shape in logits
        )
        if takes and gives and len(sizes) == 1 and 0 < chunk <= min(sizes):
            return cls(chunk, *sizes)
        raise InputError(
            f"a bundle with the methods {', '.join(methods)} generates no text; expected one of "
            "torchedge.export_lm"
        )


def generate(
    runner: Stepping,
    windows: Windows,
    ids: Iterable[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Iterable[int],
    seed: int,
    stream: Callable[[int], object] | None,
) -> list[int]:
    """Return the tokens that follow a prompt; see `Bundle.generate`."""
    chunk, length = windows.chunk, windows.length
    prompt = _tokens("ids", ids)
    ends = {*_tokens("stop", stop)}
    check_whole("max_new_tokens", max_new_tokens)
    check_whole("seed", seed, 0)
    sampling.check()
    if stream is not None:
        check_function("stream", stream)
    if not prompt:
        raise InputError("ids has no token; expected a prompt of at least one")
    if len(prompt) + max_new_tokens - 1 > length:
        raise InputError(
            f"{len(prompt)} tokens and {max_new_tokens} new ones are given, and the caches hold {length}; "
            "expected fewer, or a bundle with a larger max_length"
        )
    generator = Generator(seed)
    known = 0  # the last token is computed again: its logits are not kept
    for before, token in zip(runner.kept, prompt[:-1], strict=False):
        if before != token:
            break
        known += 1
    tokens, logits = list(prompt), np.zeros(0)
    while known < len(prompt):
        begin = max(0, min(known, length - chunk))
        part = prompt[begin : begin + chunk]
        logits = _step(runner, part, begin, chunk)
        known = begin + len(part)
        runner.kept = tuple(prompt[:known])
    new: list[int] = []
    while True:
        token = sampling.draw(logits, generator)
        new.append(token)
        tokens.append(token)
        if stream is not None:
            stream(token)
        if token in ends or len(new) == max_new_tokens:
            return new
        kept = runner.kept
        logits = _step(runner, [token], len(tokens) - 1, 1)
        runner.kept = (*kept, token)


def _step(runner: Stepping, part: list[int], begin: int, chunk: int) -> npt.NDArray[Any]:
    """Run tokens at a position; return the logits that follow the last one.

    What fills up a chunk lies behind: later tokens overwrite it before any of them reads it.
    """
    padded = np.zeros((1, chunk), np.int64)
    padded[0, : len(part)] = part
    method = PREFILL if chunk > 1 else DECODE
    kept = runner.kept
    (logits,) = runner.step(padded, np.array([begin]), np.array([len(part) - 1]), method=method)
    runner.kept = kept
    row: npt.NDArray[Any] = logits[0]
    if not np.isfinite(row.max()):
        raise InputError(
            f"the logits after token {begin + len(part) - 1} are no numbers; expected weights and a "
            "precision with which the model computes numbers: export it again"
        )
    return row


def _tokens(name: str, ids: Iterable[int]) -> list[int]:
    try:
        array = np.asarray(ids if hasattr(ids, "__array__") else list(ids))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is {described(ids)}; expected numbers of tokens") from error
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; expected whole numbers in one row"
        )
    return [int(token) for token in array]
