"""The rows of a dataset that have a graph, with everything simulated and counted once for all fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.errors import ProfileError
from torchedge.graphs import ForwardGraph
from torchedge.prediction.analysis import analyse
from torchedge.prediction.latency.workload import Workload
from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.peaks import Peaks, Traits, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.step_models import Mode
from torchedge.profiling.datasets import Dataset
from torchedge.profiling.layer_times import KINDS

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PROTOCOL = StepSettings(optimizer="sgd-momentum", weight_decay=5e-4)
"""The training step of the perf4sight measurements: SGD with momentum 0.9 and weight decay 5e-4."""


@dataclass(frozen=True)
class Samples:
    """R measured rows with a graph: labels, measured figures (NaN: none), simulated peaks, counted work.

    parts: (R, 6) ms by `layer_times.KINDS`, NaN where they are not known or the host set the pace. steady:
    whether peaks are those of a steady step, not perf4sight's means of records.
    """

    network: npt.NDArray[np.str_]
    level: npt.NDArray[np.int64]
    strategy: npt.NDArray[np.str_]
    batch: FloatArray
    gamma: FloatArray
    allocated: FloatArray
    reserved: FloatArray
    phi: FloatArray
    fits: FloatArray
    which: npt.NDArray[np.intp]
    work: Sequence[Workload]
    peaks: Peaks
    device: Device
    graphs: Sequence[ForwardGraph]
    settings: StepSettings
    parts: FloatArray | None = None
    steady: bool = True

    @property
    def networks(self) -> list[str]:
        """The networks, in alphabetical order."""
        return sorted(set(self.network.tolist()))

    def peaks_of(self, rows: Mask) -> Peaks:
        """Return the simulated peaks of some rows."""
        return self.peaks.some(rows)


def prepare(
    dataset: Dataset,
    device: Device,
    settings: StepSettings = PROTOCOL,
    mode: Mode = "train",
    tell: Callable[[], object] = lambda: None,
) -> Samples:
    """Simulate and count every row of one mode whose network has a graph; `tell` is called a network."""
    rows = dataset.has_graph & (dataset.mode == mode)
    if not rows.any():
        raise ProfileError(
            f"{dataset.name}: no row measured in mode {mode} has a known topology; "
            "expected rows and topologies of the same names"
        )
    names = sorted(set(dataset.id[rows].tolist()), key=list(dataset.networks).index)
    under = device_settings(device, settings)
    graphs = []
    for name in names:
        graph = dataset.graph_of(name, mode)
        analyse(graph).tape(under)
        graphs.append(graph)
        tell()
    position = {name: i for i, name in enumerate(names)}
    which = np.array([position[name] for name in dataset.id[rows].tolist()], dtype=np.intp)
    networks = [dataset.networks[name] for name in names]
    batch = dataset.batch[rows].astype(np.float64)
    return Samples(
        network=np.array([n.architecture for n in networks])[which],
        level=np.array([n.level for n in networks], dtype=np.int64)[which],
        strategy=np.array([n.strategy for n in networks])[which],
        batch=batch,
        gamma=dataset["memory"][rows],
        allocated=dataset["allocated"][rows],
        reserved=dataset["reserved"][rows],
        phi=dataset["latency"][rows],
        fits=dataset["fits"][rows],
        which=which,
        work=[analyse(g).work for g in graphs],
        peaks=simulate_peaks([analyse(g).tape(under) for g in graphs], _traits(graphs), which, batch),
        device=device,
        graphs=graphs,
        settings=under,
        parts=_parts(dataset, rows, mode),
        steady=dataset.probed,
    )


HOST_BOUND = 1.6
"""A point whose latency is below this times the least of its network waits for the host, not the device."""

_LEAST_MS = 0.05


def _parts(dataset: Dataset, rows: Mask, mode: Mode) -> FloatArray | None:
    """Return the times of layers by kind (R, 6), NaN where they say little of the device."""
    if not dataset.layers:
        return None
    latency = dataset["latency"][rows]
    names, batches = dataset.id[rows].tolist(), dataset.batch[rows].tolist()
    least: dict[str, float] = {}
    for name, ms in zip(names, latency.tolist(), strict=True):
        least[name] = min(least.get(name, np.inf), ms)
    found = np.full((len(names), len(KINDS)), np.nan)
    for row, (name, batch, ms) in enumerate(zip(names, batches, latency.tolist(), strict=True)):
        sums = dataset.layers.get((name, mode, batch))
        if sums is not None and ms >= HOST_BOUND * least[name]:
            found[row] = sums
    found[~(found >= _LEAST_MS)] = np.nan
    return found


def _traits(graphs: Sequence[ForwardGraph]) -> list[Traits]:
    return [analyse(g).traits for g in graphs]


def network_weights(samples: Samples, rows: Mask) -> FloatArray:
    """Return weights for some rows under which every network counts the same."""
    names, inverse, counts = np.unique(samples.network[rows], return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (counts[inverse] * len(names)))


def simulate_records(samples: Samples, rows: Mask) -> FloatArray:
    """Return (R,) MiB: the allocated figure of rows as the measurements' protocol records it.

    A record resets the peaks, empties the cache and runs a step; a figure is the mean of five records: the
    warm-up step (no gradients, no momentum yet) twice, then three steps. Steady rows are what they are.
    """
    if samples.steady:
        return samples.peaks.allocated[rows]
    found = np.empty(int(rows.sum()))
    pairs = [
        (write_tape(g, samples.settings, first=True), write_tape(g, samples.settings)) for g in samples.graphs
    ]
    for place, (which, batch) in enumerate(zip(samples.which[rows], samples.batch[rows], strict=True)):
        first, steady = pairs[which]
        steps = replay(steady, int(batch), first=first, steps=1, empty_cache=True).steps
        found[place] = (2 * steps[0][0] + 3 * steps[1][0]) / 5 / 2**20
    return found
