"""Figures of candidates on a device, computed in this process, in other processes or on other machines.

Candidates are split into chunks by their number alone, so that the number of workers changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device, find_device
from torchedge.errors import InputError, MissingExtraError
from torchedge.graphs import GraphFamily, Mode
from torchedge.prediction.families import FamilyPredictor, Members
from torchedge.prediction.memory.settings import StepSettings
from torchedge.searching.spaces import Genes, SearchSpace
from torchedge.storage import data_folder

Sketch = list[tuple[GraphFamily, npt.NDArray[np.int64], list[int]]]

_CHUNK = 80
"""Candidates per chunk: enough to share work, few enough to keep several workers busy."""


@dataclass(frozen=True, slots=True)
class ConstrainedFigure:
    """One figure that can be constrained: mode, "latency" or "memory", letter and unit."""

    mode: Mode
    kind: str
    letter: str
    unit: str


FIGURES: Mapping[str, ConstrainedFigure] = MappingProxyType(
    {
        "inference_latency": ConstrainedFigure("infer", "latency", "φ", "ms"),
        "training_latency": ConstrainedFigure("train", "latency", "Φ", "ms"),
        "inference_memory": ConstrainedFigure("infer", "memory", "γ", "MiB"),
        "training_memory": ConstrainedFigure("train", "memory", "Γ", "MiB"),
    }
)
"""The figures by name; the cheapest to compute comes first."""


class Evaluator:
    """Computes figures of a space's candidates.

    names: keys of `FIGURES`, in their order. batch_sizes: by mode. confidence: None for predicted figures,
    else that of upper bounds.
    """

    def __init__(
        self,
        space: SearchSpace,
        device: Device,
        names: Sequence[str],
        batch_sizes: Mapping[Mode, int],
        settings: StepSettings,
        confidence: float | None,
    ) -> None:
        self.space, self.device, self.names = space, device, tuple(names)
        self.batch_sizes, self.settings = dict(batch_sizes), settings
        self.confidence = confidence
        modes = {FIGURES[name].mode for name in names}
        self.predictors = {mode: FamilyPredictor(device, mode, settings) for mode in sorted(modes)}

    def evaluate(self, genes: Genes, limits: FloatArray | None = None) -> FloatArray:
        """Return the figures (C, F) of candidates (C, G).

        With limits (F,), once a candidate's figure is above its limit, its further figures are skipped (NaN).
        """
        figures = np.full((len(genes), len(self.names)), np.nan)
        alive = np.ones(len(genes), dtype=np.bool_)
        sketches: dict[Mode, Sketch] = {}
        for column, name in enumerate(self.names):
            figure = FIGURES[name]
            if not alive.any():
                break
            if figure.mode not in sketches:
                rows = np.flatnonzero(alive)
                sketch = self.space.sketch(genes[rows], figure.mode)
                sketches[figure.mode] = [(f, v, rows[places].tolist()) for f, v, places in sketch]
            groups, order = _living(sketches[figure.mode], alive)
            predict: Callable[..., FloatArray] = getattr(self.predictors[figure.mode], figure.kind)
            figures[order, column] = predict(groups, self.batch_sizes[figure.mode], self.confidence)
            if limits is not None:
                alive &= figures[:, column] <= limits[column]
        return figures

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor; a packaged profile is read where it is unpickled."""
        folder = self.device.folder
        packaged = folder.parent == data_folder("profiles") and find_device(folder.name) == self.device
        device = folder.name if packaged else self.device
        return _unpickled, (
            self.space, device, self.names, self.batch_sizes, self.settings, self.confidence
        )  # fmt: skip


def _unpickled(space: SearchSpace, device: str | Device, *arguments: Any) -> Evaluator:  # noqa: ANN401
    return Evaluator(space, device if isinstance(device, Device) else find_device(device), *arguments)


def _living(sketch: Sketch, alive: npt.NDArray[np.bool_]) -> tuple[list[Members], list[int]]:
    """Return the groups of candidates that are still alive, and their rows in order."""
    groups: list[Members] = []
    order: list[int] = []
    for family, values, rows in sketch:
        chosen = alive[rows]
        if chosen.any():
            groups.append((family, values[:, chosen]))
            order += np.array(rows)[chosen].tolist()
    return groups, order


class Workers:
    """Evaluates candidates in chunks: in this process, or in joblib's workers.

    workers: 1 for this process alone; processes of joblib, -1 for one on each core; None leaves it to
    `joblib.parallel_config`, this process where there is none.
    """

    def __init__(self, evaluator: Evaluator, token: str, workers: int | None) -> None:
        whole = isinstance(workers, int) and not isinstance(workers, bool)
        if workers is not None and not (whole and (workers == -1 or workers >= 1)):
            raise InputError(
                f"workers is {workers!r}; expected a number of processes, -1 for all cores, or None"
            )
        self.evaluator, self.token = evaluator, token
        self._parallel: Any = None
        if workers != 1:
            self._parallel = _parallel(workers)

    def evaluate(self, genes: Genes, limits: FloatArray | None = None) -> FloatArray:
        """Return the figures (C, F) of candidates (C, G), see `Evaluator.evaluate`."""
        if not len(genes):
            return np.zeros((0, len(self.evaluator.names)))
        order = np.lexsort(genes.T[::-1])  # neighbours with equal first genes share work
        figures = np.empty((len(genes), len(self.evaluator.names)))
        figures[order] = self._evaluate(np.array_split(genes[order], -(-len(genes) // _CHUNK)), limits)
        return figures

    def _evaluate(self, chunks: Sequence[Genes], limits: FloatArray | None) -> FloatArray:
        if self._parallel is None:
            return np.concatenate([self.evaluator.evaluate(chunk, limits) for chunk in chunks])
        results = self._run(chunks, limits, None)
        missing = [place for place, figures in enumerate(results) if figures is None]
        if missing:
            for mode in self.evaluator.predictors:  # capture here, once, before the space is pickled
                self.evaluator.space.sketch(chunks[0][:1], mode)
        again = self._run([chunks[place] for place in missing], limits, self.evaluator)
        for place, figures in zip(missing, again, strict=True):
            results[place] = figures
        return np.concatenate([figures for figures in results if figures is not None])

    def _run(
        self, chunks: Sequence[Genes], limits: FloatArray | None, evaluator: Evaluator | None
    ) -> list[FloatArray | None]:
        from joblib import delayed

        if not chunks:
            return []
        results: list[FloatArray | None] = self._parallel(
            delayed(_evaluate_chunk)(self.token, evaluator, chunk, limits) for chunk in chunks
        )
        return results


def _parallel(workers: int | None) -> Any:  # noqa: ANN401 - joblib's
    try:
        from joblib import Parallel
    except ImportError as error:
        if workers is None:
            return None
        raise MissingExtraError.of("joblib", extra="search", purpose="searching with workers") from error
    parallel = Parallel(n_jobs=workers, batch_size=1, pre_dispatch="all")
    return None if parallel.n_jobs in (None, 1) else parallel


_received: dict[str, Evaluator] = {}
"""Evaluators that this process received, by their token."""


def _evaluate_chunk(
    token: str, evaluator: Evaluator | None, genes: Genes, limits: FloatArray | None
) -> FloatArray | None:
    """Evaluate a chunk in a worker; return None if the worker needs the evaluator first."""
    if token not in _received:
        if evaluator is None:
            return None
        _received.clear()
        _received[token] = evaluator
    return _received[token].evaluate(genes, limits)
