"""Figures of candidates on a device, worked out here, in other processes or on other machines.

Candidates are cut into parts by their number alone, so that how many workers there are changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, find_device
from torchedge.errors import InputError, MissingExtraError
from torchedge.graphs import GraphFamily, Mode
from torchedge.prediction.families import FamilyPredictor, Members
from torchedge.prediction.memory.settings import StepSettings
from torchedge.searching.spaces import Genes, SearchSpace
from torchedge.storage import data_folder

FloatArray = npt.NDArray[np.float64]
Sketch = list[tuple[GraphFamily, npt.NDArray[np.int64], list[int]]]

_PART = 80
"""Candidates a part: enough to share what they have in common, few enough to keep several workers busy."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that can be constrained: the mode it belongs to, what it is, its letter and its unit."""

    mode: Mode
    kind: str
    letter: str
    unit: str


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "inference_latency": Figure("infer", "latency", "φ", "ms"),
        "training_latency": Figure("train", "latency", "Φ", "ms"),
        "inference_memory": Figure("infer", "memory", "γ", "MiB"),
        "training_memory": Figure("train", "memory", "Γ", "MiB"),
    }
)
"""The figures by name, the cheapest to work out first."""


class Evaluator:
    """Works out figures of a space's candidates.

    names: of `FIGURES`, in their order. batch_sizes: by mode. confidence: None for the predicted figures,
    else what runs stay below with it.
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

        With limits (F,) a candidate's further figures are left out (NaN) once one of them is above its limit.
        """
        found = np.full((len(genes), len(self.names)), np.nan)
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
            found[order, column] = predict(groups, self.batch_sizes[figure.mode], self.confidence)
            if limits is not None:
                alive &= found[:, column] <= limits[column]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as what it was made of; the device's profile is read again where it arrives."""
        packaged = self.device.folder.parent == data_folder("profiles")
        device = self.device.name if packaged else str(self.device.folder)
        return _unpacked, (
            self.space, device, self.names, self.batch_sizes, self.settings, self.confidence
        )  # fmt: skip


def _unpacked(space: SearchSpace, device: str, *rest: Any) -> Evaluator:  # noqa: ANN401
    return Evaluator(space, find_device(device), *rest)


def _living(sketch: Sketch, alive: npt.NDArray[np.bool_]) -> tuple[list[Members], list[int]]:
    """Return the groups of candidates that are still alive, and which rows they are in order."""
    groups: list[Members] = []
    order: list[int] = []
    for family, values, rows in sketch:
        chosen = alive[rows]
        if chosen.any():
            groups.append((family, values[:, chosen]))
            order += np.array(rows)[chosen].tolist()
    return groups, order


class Workers:
    """Evaluates candidates in parts: here, or through joblib by as many workers as asked for.

    workers: 1 for this process alone; another number as joblib's n_jobs; None leaves it to
    `joblib.parallel_config`, this process where there is none.
    """

    def __init__(self, evaluator: Evaluator, token: str, workers: int | None) -> None:
        if isinstance(workers, bool) or workers == 0 or not isinstance(workers, int | None):
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
        order = np.lexsort(genes.T[::-1])  # what begins alike has more in common
        found = np.empty((len(genes), len(self.evaluator.names)))
        found[order] = self._evaluate(np.array_split(genes[order], -(-len(genes) // _PART)), limits)
        return found

    def _evaluate(self, parts: Sequence[Genes], limits: FloatArray | None) -> FloatArray:
        if self._parallel is None:
            return np.concatenate([self.evaluator.evaluate(part, limits) for part in parts])
        found = self._run(parts, limits, None)
        missing = [place for place, part in enumerate(found) if part is None]
        if missing:
            for mode in self.evaluator.predictors:  # what a space captures once travels with it
                self.evaluator.space.sketch(parts[0][:1], mode)
        again = self._run([parts[place] for place in missing], limits, self.evaluator)
        for place, part in zip(missing, again, strict=True):
            found[place] = part
        return np.concatenate([part for part in found if part is not None])

    def _run(
        self, parts: Sequence[Genes], limits: FloatArray | None, evaluator: Evaluator | None
    ) -> list[FloatArray | None]:
        from joblib import delayed

        if not parts:
            return []
        found: list[FloatArray | None] = self._parallel(
            delayed(_evaluate_part)(self.token, evaluator, part, limits) for part in parts
        )
        return found


def _parallel(workers: int | None) -> Any:  # noqa: ANN401 - joblib's
    try:
        from joblib import Parallel
    except ImportError as error:
        if workers is None:
            return None
        raise MissingExtraError.of("joblib", extra="search", purpose="searching with workers") from error
    parallel = Parallel(n_jobs=workers, batch_size=1, pre_dispatch="all")
    return None if parallel.n_jobs in (None, 1) else parallel


_known: dict[str, Evaluator] = {}
"""Evaluators that this process was sent before, by their token."""


def _evaluate_part(
    token: str, evaluator: Evaluator | None, genes: Genes, limits: FloatArray | None
) -> FloatArray | None:
    """Evaluate a part in a worker; None where the worker has to be sent the evaluator first."""
    if token not in _known:
        if evaluator is None:
            return None
        _known.clear()
        _known[token] = evaluator
    return _known[token].evaluate(genes, limits)
