"""Spaces of candidates: genes with their choices, and a candidate's module or ForwardGraph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import CaptureError, InputError, described
from torchedge.graphs import ForwardGraph, GraphFamily, Mode

if TYPE_CHECKING:
    from torch import nn

Genes = npt.NDArray[np.int16]
"""Candidates as rows (C, G): for each gene the index of its choice."""

_MOST_CHOICES = 10_000


class SearchSpace(ABC):
    """A space for `torchedge.search`; your own subclass defines three things.

    choices: each gene's name with its choices, in order; input_size: the shape of one sample; `build`: the
    module of a candidate. A candidate is encoded as a dict of gene name to choice. Override `graph` where a
    graph exists without a module (it is captured from `build` otherwise), `sketch` where many graphs share
    one structure, `encode` and `decode` for another encoding, `canonical` where genes may have no effect,
    `landmarks` for candidates to evaluate first.
    """

    name: str = "space"
    choices: Mapping[str, Sequence[Any]]
    input_size: tuple[int, ...] = (3, 224, 224)

    @abstractmethod
    def build(self, encoding: Any) -> nn.Module:  # noqa: ANN401 - what `decode` gives
        """Build the module of a candidate."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of choices of each gene, (G,)."""
        return np.array([len(options) for options in self.choices.values()], dtype=np.int64)

    def decode(self, genes: Sequence[int]) -> Any:  # noqa: ANN401 - a space's own
        """Return the encoding of one row of genes: plain data that `build`, `graph` and the score get."""
        return {name: options[g] for (name, options), g in zip(self.choices.items(), genes, strict=True)}

    def encode(self, encoding: Any) -> list[int]:  # noqa: ANN401 - a space's own
        """Return the genes of an encoding; raises InputError for an encoding outside the space."""
        check_keys(encoding, self.choices)
        return [choice_of(name, encoding[name], options) for name, options in self.choices.items()]

    def canonical(self, genes: Genes) -> Genes:
        """Return the genes (C, G) with those without effect set to 0: equal rows are equal networks."""
        return genes

    def landmarks(self) -> Sequence[Any]:
        """Return encodings to begin with beside random ones, such as the smallest and the largest."""
        return ()

    def random(self, rng: np.random.Generator) -> Any:  # noqa: ANN401 - a space's own
        """Draw an encoding: every gene uniformly of its choices."""
        return self.decode(self.canonical(draw(self, rng, 1))[0].tolist())

    def sample_size(self, encoding: Any) -> tuple[int, ...]:  # noqa: ANN401
        """Return the shape of one sample for a candidate."""
        return self.input_size

    def graph(self, encoding: Any, mode: Mode = "train") -> ForwardGraph:  # noqa: ANN401
        """Return the ForwardGraph of a candidate, as `torchedge.capture` gives it for the module."""
        from torchedge.tracing.capturing import capture

        module = self._built(encoding)
        try:
            return capture(module, input_size=self.sample_size(encoding), mode=mode, name=self.name)
        except CaptureError as error:
            raise CaptureError(f"the candidate {encoding}: {error}") from error

    def _built(self, encoding: Any) -> nn.Module:  # noqa: ANN401
        """Build a candidate, on the meta device where that works: no memory and no time for weights."""
        import torch

        try:
            with torch.device("meta"):
                return self.build(encoding)
        except Exception:
            try:
                return self.build(encoding)
            except Exception as error:
                raise InputError(
                    f"{type(self).__name__}.build({encoding}) raised {type(error).__name__}: {error}; "
                    "every combination of choices has to give a module"
                ) from error

    def sketch(self, genes: Genes, mode: Mode) -> list[tuple[GraphFamily, npt.NDArray[np.int64], list[int]]]:
        """Return the graphs of candidates (C, G) by families.

        Each entry: a family, the values (D, M) of its symbols for M members, and which rows these are.
        """
        nothing = np.zeros((0, 1), dtype=np.int64)
        return [
            (GraphFamily(self.graph(self.decode(row.tolist()), mode), ()), nothing, [place])
            for place, row in enumerate(genes)
        ]


def check_keys(encoding: object, expected: Iterable[str]) -> None:
    """Raise InputError unless an encoding is a dict with the expected keys."""
    if not isinstance(encoding, Mapping) or set(encoding) != set(expected):
        keys = sorted(encoding) if isinstance(encoding, Mapping) else type(encoding).__name__
        raise InputError(f"encoding holds {keys}; expected a dict of {', '.join(expected)}")


def choice_of(name: str, value: object, options: Sequence[Any]) -> int:
    """Return the index of a choice; raises InputError naming the gene and its choices."""
    for place, option in enumerate(options):
        if option == value and isinstance(option, bool) == isinstance(value, bool):
            return place
    raise InputError(f"{name} is {value!r}; expected one of {', '.join(map(repr, options))}")


def draw(space: SearchSpace, rng: np.random.Generator, count: int) -> Genes:
    """Draw candidates (C, G), every gene uniformly."""
    counts = space.counts
    return rng.integers(counts, size=(count, len(counts))).astype(np.int16)


def check_space(space: object) -> SearchSpace:
    """Return the space; raises InputError where it is none or has no genes or no choices."""
    if isinstance(space, type):
        raise InputError(
            f"space is the class {space.__name__}; expected one made of it: {space.__name__}(...)"
        )
    if not isinstance(space, SearchSpace):
        raise InputError(
            f"space is {described(space)}; expected a SearchSpace: OFAResNet50Space(), "
            "PruningSpace(model), or your own subclass of torchedge.SearchSpace"
        )
    choices = getattr(space, "choices", None)
    if not isinstance(choices, Mapping) or not choices:
        raise InputError(f"{type(space).__name__}.choices is {choices!r}; expected gene names with choices")
    for name, options in choices.items():
        if not isinstance(options, Sequence) or isinstance(options, str) or not options:
            raise InputError(f"choices[{name!r}] is {options!r}; expected a list of choices")
        if len(options) > _MOST_CHOICES:
            raise InputError(
                f"choices[{name!r}] has {len(options)} entries; expected at most {_MOST_CHOICES}"
            )
    return space
