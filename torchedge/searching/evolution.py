"""Evolution of candidates under hard constraints (perf4sight, section 6.4; Once-for-All, Cai et al., 2020).

The population is within the constraints. In each iteration the best quarter become parents; half of their
children are mutants, half are crossed. A child that exceeds a constraint or was drawn before is replaced by
another draw. Seed, iteration and round determine all draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.errors import InputError, check_whole
from torchedge.searching.evaluation import Workers
from torchedge.searching.spaces import Genes, SearchSpace, draw
from torchedge.storage.codecs import shortened
from torchedge.storage.documents import writing
from torchedge.storage.journals import Journal
from torchedge.storage.replacing import make_folder

Score = Callable[[Sequence[Any]], Any]

_ROUNDS = 30
"""Limit of rounds of an iteration, and of rounds without progress for the initial population."""

_GUIDED_FROM = 4
"""From this round on, draws of the initial population descend from the nearest candidates."""

_LEAST_YIELD = 0.1


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers of an evolution; the defaults are the paper's.

    population: candidates per iteration. mutation: probability that a gene changes. parents: share of the
    population that become parents.
    """

    population: int = 100
    iterations: int = 500
    mutation: float = 0.1
    parents: float = 0.25

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("iterations", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("mutation", "parents"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise InputError(f"{name} is {value!r}; expected a share above 0 and up to 1")


@dataclass(slots=True)
class Archive:
    """All candidates evaluated so far: genes, figures, scores (NaN: not valid), one array per round."""

    genes: list[Genes]
    figures: list[FloatArray]
    scores: list[FloatArray]
    drawn: int = 0
    known: int = 0

    def table(self) -> tuple[Genes, FloatArray, FloatArray]:
        """Return genes, figures and scores of all."""
        return np.concatenate(self.genes), np.concatenate(self.figures), np.concatenate(self.scores)


class Evolution:
    """One evolution; `start` draws the initial population, each `step` runs an iteration."""

    def __init__(
        self,
        space: SearchSpace,
        workers: Workers,
        journal: SearchJournal,
        score: Score,
        limits: FloatArray,
        recipe: Recipe,
        seed: int,
    ) -> None:
        self.space, self.workers, self.journal, self.score = space, workers, journal, score
        self.limits, self.recipe, self.seed = limits, recipe, seed
        self.archive = Archive([], [], [])
        self.parents: Genes = np.zeros((0, len(space.counts)), dtype=np.int16)
        self.parent_scores: FloatArray = np.zeros(0)
        self._seen: set[bytes] = set()
        self._yield = 1.0

    # drawing ----------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Draw the initial population; return whether a candidate is within the constraints."""
        genes: list[Genes] = []
        scores: list[FloatArray] = []
        nearest: Genes = self.parents
        least: FloatArray = np.zeros(0)
        idle = round_ = 0
        while sum(map(len, scores)) < self.recipe.population and idle < _ROUNDS:
            rng = np.random.default_rng([self.seed, 0, round_])
            if round_ < _GUIDED_FROM or not len(nearest):
                drawn = draw(self.space, rng, self.recipe.population)
            else:
                drawn = offspring(
                    nearest, rng, self.recipe.population, self.space.counts, self.recipe.mutation
                )
            if round_ == 0:
                rows = [self.space.encode(encoding) for encoding in self.space.landmarks()]
                landmarks = np.array(rows, dtype=np.int16).reshape(-1, len(self.space.counts))
                drawn = np.concatenate([landmarks, drawn])
            new, figures, judged = self._judge(drawn, None)
            valid = ~np.isnan(judged)
            genes.append(new[valid])
            scores.append(judged[valid])
            idle = 0 if valid.any() else idle + 1
            before = least[0] if len(least) else np.inf
            excess = np.concatenate([least, self.excess(figures)])
            order = np.argsort(excess, kind="stable")[: self._parent_count]
            nearest, least = np.concatenate([nearest, new])[order], excess[order]
            if len(least) and least[0] < before:
                idle = 0
            round_ += 1
        self._select(np.concatenate(genes), np.concatenate(scores))
        return len(self.parents) > 0

    def step(self, iteration: int) -> int:
        """Run one iteration (from 1 on); return the number of new candidates within the constraints."""
        genes, scores = [self.parents], [self.parent_scores]
        count_valid = 0
        for round_ in range(_ROUNDS):
            missing = self.recipe.population - count_valid
            if missing <= 0:
                break
            count = int(np.ceil(missing / max(self._yield, _LEAST_YIELD)))
            rng = np.random.default_rng([self.seed, iteration, round_])
            drawn = offspring(self.parents, rng, count, self.space.counts, self.recipe.mutation)
            new, _, judged = self._judge(drawn, self.limits)
            valid = ~np.isnan(judged)
            self._yield = 0.5 * self._yield + 0.5 * float(valid.sum()) / count
            genes.append(new[valid])
            scores.append(judged[valid])
            count_valid += int(valid.sum())
        self._select(np.concatenate(genes), np.concatenate(scores))
        return count_valid

    def excess(self, figures: FloatArray) -> FloatArray:
        """Return the relative excess of candidates (C, F) over the limits, summed over the limits: (C,)."""
        return np.asarray(np.maximum(figures / self.limits - 1, 0).sum(axis=1))

    @property
    def _parent_count(self) -> int:
        return max(2, round(self.recipe.parents * self.recipe.population))

    def _select(self, genes: Genes, scores: FloatArray) -> None:
        """Keep the best as parents; of equals, the earlier ones."""
        order = np.argsort(-scores, kind="stable")[: self._parent_count]
        self.parents, self.parent_scores = genes[order], scores[order]

    # judging ----------------------------------------------------------------------------------------------

    def _judge(self, drawn: Genes, limits: FloatArray | None) -> tuple[Genes, FloatArray, FloatArray]:
        """Evaluate the new draws; return their genes, figures and scores (NaN: not valid)."""
        new = self._new(self.space.canonical(drawn))
        records = [self.journal.records.get(row.tobytes()) for row in new]
        figures = np.array(
            [r[0] if r else [np.nan] * len(self.limits) for r in records], dtype=np.float64
        ).reshape(len(new), len(self.limits))
        scores = np.array([r[1] if r else np.nan for r in records], dtype=np.float64)
        fresh = np.array([r is None for r in records], dtype=np.bool_)
        if fresh.any():
            figures[fresh] = self.workers.evaluate(new[fresh], limits)
            valid = fresh & (figures <= self.limits).all(axis=1)
            scores[valid] = self._scores(new[valid])
            self.journal.add(new[fresh], figures[fresh], scores[fresh])
        self.archive.genes.append(new)
        self.archive.figures.append(figures)
        self.archive.scores.append(scores)
        return new, figures, scores

    def _new(self, drawn: Genes) -> Genes:
        """Return the draws that are new, each once."""
        rows = []
        for place, row in enumerate(drawn):
            key = row.tobytes()
            if key not in self._seen:
                self._seen.add(key)
                rows.append(place)
        self.archive.drawn += len(drawn)
        self.archive.known += len(drawn) - len(rows)
        return drawn[rows]

    def _scores(self, genes: Genes) -> FloatArray:
        """Return the scores of candidates; raises InputError unless each is one finite number."""
        encodings = [self.space.decode(row) for row in genes.tolist()]
        if not encodings:
            return np.zeros(0)
        answer = self.score(encodings)
        if hasattr(answer, "detach"):  # a tensor, perhaps with a gradient, perhaps on a GPU
            answer = answer.detach().cpu()
        try:
            scores = np.asarray(answer, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError):
            scores = np.zeros(0)
        if len(scores) != len(encodings):
            raise InputError(
                f"score gave {_short(answer)} for {len(encodings)} candidates; expected one number each: "
                "it is called with a list of encodings and returns as many numbers (batched=False: with one)"
            )
        wrong = np.flatnonzero(~np.isfinite(scores))
        if len(wrong):
            raise InputError(
                f"score gave {scores[wrong[0]]} for {_short(encodings[wrong[0]])}; expected a finite number"
            )
        return scores


def offspring(
    parents: Genes, rng: np.random.Generator, count: int, choices: npt.NDArray[np.int64], mutation: float
) -> Genes:
    """Return children (count, G) of parents (P, G): alternately a mutant of one and a cross of two."""
    first, second = rng.integers(len(parents), size=(2, count))
    changed = rng.random((count, parents.shape[1])) < mutation
    mutants = np.where(changed, rng.integers(choices, size=changed.shape), parents[first])
    crossed = np.where(rng.random(changed.shape) < 0.5, parents[first], parents[second])
    turn = (np.arange(count) % 2 == 0)[:, None]
    return np.where(turn, mutants, crossed).astype(np.int16)


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:117] + "..."


# the journal ------------------------------------------------------------------------------------------------
#
# The settings and the figures of candidates determine a search. To continue, it starts again and looks up the
# candidates in the journal. The first row is a header with the settings; each other row is one round.


SCHEMA = "torchedge-search-1"

Record = tuple[tuple[float, ...], float]
"""Figures (NaN: not computed) and score (NaN: above a constraint, so never scored) of a candidate."""


class _Candidates(msgspec.Struct):
    """A row of candidates: genes (C, G), figures (C, F) and scores (C,); None: not computed."""

    genes: tuple[tuple[Annotated[int, msgspec.Meta(ge=-(2**15), lt=2**15)], ...], ...]
    figures: tuple[tuple[float | None, ...], ...]
    scores: tuple[float | None, ...]


class SearchJournal:
    """Records of candidates, on disk where a path is given. Use it as a context.

    records: by genes, the candidates in the file when it was opened.
    Raises InputError for a file of another search and ProfileError for one that cannot be read.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = {"schema": SCHEMA, **header}
        self.records: dict[bytes, Record] = {}
        self._stack = ExitStack()
        self._file: Journal | None = None

    def __enter__(self) -> SearchJournal:
        if self.path is None:
            return self
        with writing(self.path, "choose another place for the journal", InputError):
            make_folder(self.path.parent)
        with self._stack:
            self._file = self._stack.enter_context(Journal(self.path, error=InputError))
            count = 0
            for count, (_, row) in enumerate(self._file.rows(), start=1):
                if count == 1:
                    self._check_header(row)
                else:
                    self._record(row, count)
            if not count:
                self._file.append(self.header)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, genes: Genes, figures: FloatArray, scores: FloatArray) -> None:
        """Write candidates (C, G) with figures (C, F) and scores (C,); they are on disk when this returns."""
        if self._file is not None and len(genes):
            row = {
                "genes": genes.tolist(),
                "figures": [_without_nan(values) for values in figures.tolist()],
                "scores": _without_nan(scores.tolist()),
            }
            self._file.append(row)

    def _check_header(self, row: Mapping[str, Any]) -> None:
        expected = json.loads(json.dumps(self.header))
        for key in (*expected, *row):
            if row.get(key) != expected.get(key):
                raise InputError(
                    f"{self.path} is the journal of another search ({key} is {shortened(row.get(key))}, "
                    f"here {shortened(expected.get(key))}); continue that one, or choose another file"
                )

    def _record(self, row: Mapping[str, Any], number: int) -> None:
        columns = len(self.header["figures"])
        try:
            candidates = msgspec.convert(row, _Candidates)
            genes = np.array(candidates.genes, dtype=np.int16)
            figures = np.array(candidates.figures, dtype=np.float64)
        except (msgspec.ValidationError, ValueError) as error:
            raise InputError(f"{self.path} line {number}: holds no candidates; delete the file") from error
        scores = np.array(candidates.scores, dtype=np.float64)
        count = len(scores)
        if genes.shape != (count, self.header["genes"]) or figures.shape != (count, columns):
            raise InputError(f"{self.path} line {number}: holds another number of genes; delete the file")
        for key, values, score in zip(genes, figures.tolist(), scores.tolist(), strict=True):
            self.records[key.tobytes()] = (tuple(values), score)


def _without_nan(values: list[float]) -> list[float | None]:
    """Return numbers with None in place of NaN, which JSON lacks."""
    return [None if math.isnan(value) else value for value in values]
