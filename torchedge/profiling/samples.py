"""The rows of a dataset that have a graph, with everything simulated and counted once for all fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.errors import ProfileError
from torchedge.graphs import Graph
from torchedge.prediction.analysis import analyse
from torchedge.prediction.latency.workload import Workload
from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.model import Peaks, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.stepping import write_tape
from torchedge.prediction.predictor import device_settings
from torchedge.profiling.datasets import Dataset

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PROTOCOL = StepSettings(optimizer="sgd-momentum", weight_decay=5e-4)
"""The training step of the perf4sight measurements: SGD with momentum 0.9 and weight decay 5e-4."""


@dataclass(frozen=True)
class Samples:
    """R measured rows with a graph: labels, measured figures (NaN: none), simulated peaks, counted work."""

    network: npt.NDArray[np.str_]
    level: npt.NDArray[np.int64]
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
    graphs: Sequence[Graph]
    settings: StepSettings

    @property
    def networks(self) -> list[str]:
        """The networks, in alphabetical order."""
        return sorted(set(self.network.tolist()))

    def peaks_of(self, rows: Mask) -> Peaks:
        """Return the simulated peaks of some rows."""
        p = self.peaks
        return Peaks(p.batch[rows], p.allocated[rows], p.reserved[rows], p.parameters[rows], p.linear[rows])


def prepare(dataset: Dataset, device: Device, settings: StepSettings = PROTOCOL) -> Samples:
    """Simulate and count every row of a dataset whose network has a graph."""
    rows = dataset.has_graph
    if not rows.any():
        raise ProfileError(
            f"{dataset.name}: no measured row has a topology; expected matching network and pruning_level"
        )
    keys = list(dataset.graphs)
    graphs = [dataset.graphs[k] for k in keys]
    position = {key: i for i, key in enumerate(keys)}
    network, level, batch = dataset.network[rows], dataset.level[rows], dataset.batch[rows].astype(np.float64)
    which = np.array([position[n, int(v)] for n, v in zip(network, level, strict=True)], dtype=np.intp)
    under = device_settings(device, settings)
    tapes = [analyse(g).tape(under) for g in graphs]
    return Samples(
        network=network,
        level=level,
        batch=batch,
        gamma=dataset["gamma_mb"][rows],
        allocated=dataset["allocated_mb"][rows],
        reserved=dataset["reserved_mb"][rows],
        phi=dataset["phi_ms"][rows],
        fits=dataset["memory_fits"][rows],
        which=which,
        work=[analyse(g).work for g in graphs],
        peaks=simulate_peaks(tapes, [analyse(g).traits for g in graphs], which, batch),
        device=device,
        graphs=graphs,
        settings=under,
    )


def network_weights(samples: Samples, rows: Mask) -> FloatArray:
    """Return weights for some rows under which every network counts the same."""
    names, inverse, counts = np.unique(samples.network[rows], return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (counts[inverse] * len(names)))


def simulate_records(samples: Samples, rows: Mask) -> FloatArray:
    """Return (R,) MiB: the allocated figure of rows as the measurements' protocol records it.

    A record resets the peaks, empties the cache and runs a step; a figure is the mean of five records: the
    warm-up step (no gradients, no momentum yet) twice, then three steps.
    """
    found = np.empty(int(rows.sum()))
    pairs = [
        (write_tape(g, samples.settings, first=True), write_tape(g, samples.settings)) for g in samples.graphs
    ]
    for place, (which, batch) in enumerate(zip(samples.which[rows], samples.batch[rows], strict=True)):
        first, steady = pairs[which]
        steps = replay(steady, int(batch), first=first, steps=1, empty_cache=True).steps
        found[place] = (2 * steps[0][0] + 3 * steps[1][0]) / 5 / 2**20
    return found
