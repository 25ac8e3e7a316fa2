"""Generation of text by the methods "prefill" (a chunk of tokens) and "decode" (one) of a bundle.

A third one, "encode", runs the encoder of an encoder-decoder before them. Methods "decode_64" and the like
are "decode" for tokens at the first 64 places: their attention reads no more of the caches; "prefill_256" is
"prefill" for chunks at the first 256.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchedge.bundles.manifests import Port
from torchedge.errors import InputError, check_function, check_whole, described

PREFILL, DECODE, ENCODE = "prefill", "decode", "encode"
_SPAN = re.compile(rf"({PREFILL}|{DECODE})_([1-9][0-9]{{0,8}})")
USUAL_TOKENS = 64
"""How many tokens follow a prompt where nothing is said, and the caches hold them."""
CACHES = ("keys.", "values.")
"""How names of caches begin; they are [texts, heads, tokens, width]."""
Column = tuple[int | None, ...]
"""Tokens of several texts at one place; None before a text begins."""


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

    kept: tuple[Column, ...]

    def step(self, *inputs: object, method: str | None = None) -> list[npt.NDArray[Any]]:
        """Run a method and forget what is kept."""


@dataclass(frozen=True)
class Windows:
    """chunk: tokens of a text that a prefill takes; length: those that the caches hold; texts: at once.

    source: the tokens or features that the encoder takes; None where the model has no encoder. methods: those
    that take a chunk or one token.
    """

    chunk: int
    length: int
    texts: int = 1
    source: Port | None = None
    methods: tuple[str, ...] = (PREFILL, DECODE)

    @classmethod
    def of(cls, methods: Mapping[str, Ports], states: Iterable[Port]) -> Windows:
        """Return those of methods, by the inputs and outputs of each; raises InputError for other methods."""
        pair = [methods[name] for name in (PREFILL, DECODE) if name in methods]
        shapes = [[port.shape for port in inputs] for inputs, _ in pair]
        logits = [[port.shape for port in outputs if port.dtype == "float32"] for _, outputs in pair]
        sizes = {
            (p.shape[0], p.shape[2]) if len(p.shape) == 4 else (0, 0)
            for p in states
            if p.name.startswith(CACHES)
        }
        texts, chunk = shapes[0][0] if shapes and shapes[0] and len(shapes[0][0]) == 2 else (0, 0)
        begins = [(texts,)][: texts - 1]
        takes = shapes == [[(texts, tokens), (1,), (1,), *begins] for tokens in (chunk, 1)]
        gives = all(
            len(shape) == 1 and len(shape[0]) == 2 and shape[0][0] == texts and shape[0][1]
            for shape in logits
        )
        if takes and gives and texts and len(sizes) == 1:
            held, length = sizes.pop()
            source, fits = _source(methods.get(ENCODE))
            if held == texts and 0 < chunk <= length and fits:
                alike = tuple(
                    [n for n, ports in methods.items() if ports == methods.get(n.partition("_")[0])]
                )
                return cls(chunk, length, texts, source, alike)
        raise InputError(
            f"a bundle with the methods {', '.join(methods)} generates no text; expected one of "
            "torchedge.export_lm"
        )


def shortest(method: str, methods: Iterable[str], end: int) -> str:
    """Return the method like "prefill" or "decode" that reads least of the caches, for places below `end`."""
    matches = [match for match in map(_SPAN.fullmatch, methods) if match and match[1] == method]
    spans = [(int(match[2]), match[0]) for match in matches if int(match[2]) >= end]
    return min(spans, default=(0, method))[1]


def _source(encode: Ports | None) -> tuple[Port | None, bool]:
    """Return what an encoder takes, and whether "encode" is such a method or there is none."""
    if encode is None:
        return None, True
    inputs, outputs = encode
    kinds = [(len(port.shape), port.dtype) for port in inputs]
    fits = kinds in ([(2, "int64"), (1, "int64")], [(3, "float32")])
    gives = [(port.shape, port.dtype) for port in outputs] == [((1,), "int64")]
    return inputs[0], fits and gives and inputs[0].shape[0] == 1


def generate(
    runner: Stepping,
    windows: Windows,
    ids: Iterable[Any],
    max_new_tokens: int | None,
    sampling: Sampling,
    stop: Iterable[int],
    seed: int,
    stream: Callable[[Any], object] | None,
    begin_with: Iterable[int] | None = None,
) -> list[Any]:
    """Return the tokens that follow a prompt, or each of several; see `Bundle.generate`."""
    chunk, length = windows.chunk, windows.length
    opening = None if begin_with is None else _tokens("begin_with", begin_with)
    fed: list[npt.NDArray[Any]] = []
    if windows.source is not None:
        fed, several = _encoder_inputs(windows.source, ids)
        prompts = [[0] if opening is None else opening]
    elif opening is None:
        prompts, several = _prompts(ids)
    else:
        raise InputError("begin_with is given, and the bundle has no encoder; expected a prompt alone")
    if not all(prompts):
        raise InputError("begin_with has no token; expected at least one, or omit it")
    ends = {*_tokens("stop", stop)}
    if max_new_tokens is not None:
        check_whole("max_new_tokens", max_new_tokens)
    check_whole("seed", seed, 0)
    sampling.check()
    if stream is not None:
        check_function("stream", stream)
    if len(prompts) > windows.texts:
        raise InputError(
            f"{len(prompts)} prompts are given, and the bundle takes {windows.texts} at once; expected no "
            "more, or a bundle of torchedge.export_lm(..., batch=)"
        )
    most = max(map(len, prompts))
    if max_new_tokens is None:
        max_new_tokens = max(1, min(USUAL_TOKENS, length - most + 1))
    if most + max_new_tokens - 1 > length:
        raise InputError(
            f"{most} tokens and {max_new_tokens} new ones are given, and the caches hold {length}; "
            "expected fewer, or a bundle with a larger max_length"
        )
    if fed:
        (first,) = runner.step(*fed, method=ENCODE)
        prompts = [_tokens("the encoder's result", first)] if opening is None else prompts
    rows = [[None] * (most - len(prompt)) + prompt for prompt in prompts]
    unused = windows.texts - len(rows)  # they compute what the first text does
    columns: list[Column] = [*zip(*rows, *[rows[0]] * unused, strict=True)]
    begins = np.array([most - len(prompt) for prompt in prompts + [prompts[0]] * unused])

    def step(part: Sequence[Column], begin: int, tokens: int) -> npt.NDArray[Any]:
        """Run tokens at a position; return the logits that follow the last ones.

        What fills up a chunk lies behind: later tokens overwrite it before any of them reads it.
        """
        padded = np.zeros((windows.texts, tokens), np.int64)
        padded[:, : len(part)] = np.array([[token or 0 for token in column] for column in part]).T
        method = shortest(PREFILL if tokens > 1 else DECODE, windows.methods, begin + tokens)
        kept = runner.kept
        places = np.array([begin]), np.array([len(part) - 1])
        (logits,) = runner.step(padded, *places, *[begins][: windows.texts - 1], method=method)
        runner.kept = kept
        if not np.isfinite(logits.max(-1)).all():
            raise InputError(
                f"the logits after token {begin + len(part) - 1} are no numbers; expected weights and a "
                "precision with which the model computes numbers: export it again"
            )
        return logits

    known = 0  # the last token is computed again: its logits are not kept
    for before, column in zip(runner.kept, columns[:-1], strict=False):
        if before != column:
            break
        known += 1
    logits = np.zeros(0)
    while known < most:
        begin = max(0, min(known, length - chunk))
        part = columns[begin : begin + chunk]
        logits = step(part, begin, chunk)
        known = begin + len(part)
        runner.kept = tuple(columns[:known])
    generators = [Generator(seed + number) for number in range(len(prompts))]
    new: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    while True:
        drawn: list[int | None] = [None] * len(prompts)
        for number, text in enumerate(new):
            if not ended[number]:
                drawn[number] = token = sampling.draw(logits[number], generators[number])
                text.append(token)
                ended[number] = token in ends
        if stream is not None:
            stream(drawn if several else drawn[0])
        if all(ended) or max(map(len, new)) == max_new_tokens:
            return new if several else new[0]
        last = [text[-1] for text in new]
        column, kept = (*last, *[last[0]] * unused), runner.kept
        logits = step([column], len(kept), 1)
        runner.kept = (*kept, column)


def _encoder_inputs(source: Port, ids: Any) -> tuple[list[npt.NDArray[Any]], bool]:  # noqa: ANN401
    """Return tokens, filled up, and their number, or features; and whether they were given as several."""
    if source.dtype == "int64":
        prompts, several = _prompts(ids)
        most = source.shape[1]
        if len(prompts) > 1:
            raise InputError(
                f"{len(prompts)} prompts are given to an encoder-decoder; expected one at a time"
            )
        if len(prompts[0]) > most:
            raise InputError(
                f"{len(prompts[0])} tokens are given, and the encoder takes {most}; expected fewer, or a "
                "bundle with a larger encoder_length"
            )
        padded = np.zeros(source.shape, np.int64)
        padded[0, : len(prompts[0])] = prompts[0]
        return [padded, np.array([len(prompts[0])])], several
    try:
        features = np.asarray(ids, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"ids is {described(ids)}; expected features of shape {source.shape}") from error
    if features.shape not in (source.shape, source.shape[1:]):
        raise InputError(
            f"ids has shape {features.shape}, and the encoder takes features of shape {source.shape}; "
            "expected those: fill them up as the model's feature extractor does"
        )
    return [features.reshape(source.shape)], False


def _prompts(ids: Iterable[Any]) -> tuple[list[list[int]], bool]:
    """Return prompts, and whether they were given as several."""
    given: Any = ids if hasattr(ids, "__array__") or not isinstance(ids, Iterable) else list(ids)
    several = getattr(given, "ndim", 0) == 2 or (
        isinstance(given, list)
        and any(isinstance(item, (list, tuple)) or getattr(item, "ndim", 0) for item in given)
    )
    prompts = [_tokens("ids", row) for row in given] if several else [_tokens("ids", given)]
    if not prompts or not all(prompts):
        raise InputError("ids has no token; expected a prompt of at least one")
    return prompts, several


def _tokens(name: str, ids: Any) -> list[int]:  # noqa: ANN401 - whatever users give
    try:
        array = np.asarray(ids if hasattr(ids, "__array__") else list(ids))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is {described(ids)}; expected numbers of tokens") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; expected whole numbers in one row"
        )
    return [int(token) for token in array]
