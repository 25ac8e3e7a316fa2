"""Print what a search over the sub-networks of OFA-ResNet50 takes: `python benchmarks/search_speed.py`.

50,000 sub-networks within three constraints on a Jetson TX2 (perf4sight, section 6.4: 1.4 hours with its
models, 11 days by profiling): training memory at batch size 32, inference memory and latency at batch size
1, limited to those shares of the largest network's that the paper's sub-network A has. Every candidate is a
different network; those above a constraint are counted beside. The score is a stand-in of no cost. Then
random sub-networks are worked out in full, and some of them are held against `torchedge.predict` on the built
module. Memory and processor time are sums over all processes, sampled five times a second (Linux): on a
machine that others use, too, the latter says what an idle one would take. `--workers 1` searches in one
process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import options_of

SHARES = {
    "training_memory": ("train", "memory", 3735 / 5838),
    "inference_memory": ("infer", "memory", 1873 / 1958),
    "inference_latency": ("infer", "latency", 39.2 / 69.6),
}
"""Limits as shares of what the largest sub-network takes: those of the paper's sub-network A (table 2)."""
WIDTHS, BASE_DEPTHS = (0.65, 0.8, 1.0), (2, 2, 4, 2)


def stand_in(encodings: list[dict[str, Any]]) -> list[float]:
    """A smooth formula in the place of an accuracy predictor: see examples/ofa_search.py."""
    scores = []
    for encoding in encodings:
        capacity, first = 0.0, 0
        for stage, (base, depth) in enumerate(zip(BASE_DEPTHS, encoding["d"][1:], strict=True)):
            width = WIDTHS[encoding["w"][stage + 2]]
            capacity += sum((width * e) ** 0.5 for e in encoding["e"][first : first + base + depth])
            first += base + 2
        scores.append(70 + 10 * (1 - np.exp(-capacity / 6)) + 3 * np.log2(encoding["image_size"] / 224))
    return scores


class Processes:
    """What this process and its descendants take: most memory at once in MiB, seconds of processor time."""

    def __init__(self) -> None:
        self.memory = 0.0
        self._seconds: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Processes:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sample()
        self._ended.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Processor time of all processes that were seen."""
        return sum(self._seconds.values())

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._sample()

    def _sample(self) -> None:
        parents: dict[int, int] = {}
        sizes: dict[int, float] = {}
        seconds: dict[int, float] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            process = int(entry.name)
            parents[process] = int(fields[1])
            seconds[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            sizes[process] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        family = {os.getpid()}
        while not (found := {pid for pid, parent in parents.items() if parent in family}) <= family:
            family |= found
        self.memory = max(self.memory, sum(sizes.get(pid, 0.0) for pid in family))
        self._seconds |= {pid: seconds[pid] for pid in family if pid in seconds}


def limits_of(space: Any, device: str) -> dict[str, float]:  # noqa: ANN401
    """The constraints, in MiB and ms."""
    import torchedge

    largest = space.largest()
    found = {
        mode: torchedge.predict(space.graph(largest, mode), batch, device, mode=mode)
        for mode, batch in (("train", 32), ("infer", 1))
    }
    return {name: share * getattr(found[mode], kind).value for name, (mode, kind, share) in SHARES.items()}


def line(what: str, value: str, target: str = "") -> None:
    """Print one row of the table."""
    print(f"{what:<62}{value:>14}   {target}".rstrip())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `work` gives and its seconds."""
    begun = time.perf_counter()
    found = work()
    return found, time.perf_counter() - begun


def main() -> None:
    """Search, then work out random candidates; print a table."""
    parser = options_of(__doc__, workers=2, iterations=500, random=10_000)
    parser.add_argument("--device", default="jetson-tx2")
    arguments = parser.parse_args()

    import torchedge

    with Processes() as processes:
        space = torchedge.OFAResNet50Space()
        constraints = limits_of(space, arguments.device)
        found, seconds = timed(
            lambda: torchedge.search(
                space,
                constraints,
                stand_in,
                device=arguments.device,
                iterations=arguments.iterations,
                workers=arguments.workers,
            )
        )
        counts = found.counts
        limits = ", ".join(f"{name} {limit:,.0f}" for name, limit in constraints.items())
        print(f"{arguments.device}, {arguments.workers} workers; {limits}")
        line("different sub-networks within the constraints", f"{counts.valid:,}", "50,000")
        line("different sub-networks worked out in all", f"{counts.evaluated:,}")
        line("draws, repeated ones among them", f"{counts.drawn:,}")
        line("seconds", f"{seconds:.1f}", "at most 60 on 2 idle cores")
        line("milliseconds a sub-network worked out", f"{1e3 * seconds / counts.evaluated:.2f}")
    line("  processor seconds of all processes", f"{processes.seconds:.1f}")
    line("most memory of all processes, MiB", f"{processes.memory:.0f}", "under 1,024")
    if found.best is not None:
        line("best score", f"{found.best.score:.3f}")
        for name, value in found.best.figures.items():
            line(f"  {name}", f"{value:,.1f}", f"at most {constraints[name]:,.0f}")
    measure_random(space, arguments.device, arguments.random)


def measure_random(space: Any, name: str, count: int) -> None:  # noqa: ANN401
    """Work out random sub-networks in this process, and compare twenty with their modules' predictions."""
    import torch

    import torchedge
    from torchedge.prediction.memory.settings import StepSettings
    from torchedge.searching.evaluation import Evaluator
    from torchedge.searching.spaces import draw

    device = torchedge.find_device(name)
    names = ["inference_latency", "inference_memory", "training_memory"]
    evaluator = Evaluator(space, device, names, {"train": 32, "infer": 1}, StepSettings(), None)
    genes = space.canonical(draw(space, np.random.default_rng(1), count))
    figures, seconds = timed(
        lambda: np.concatenate([evaluator.evaluate(part) for part in np.array_split(genes, -(-count // 50))])
    )
    line(f"milliseconds for all three figures, {count:,} random ones", f"{1e3 * seconds / count:.2f}")
    worst = 0.0
    for row in range(0, count, max(count // 20, 1)):
        encoding = space.decode(genes[row].tolist())
        with torch.device("meta"):
            module = space.build(encoding)
        size = space.sample_size(encoding)
        infer = torchedge.predict(module, 1, device, mode="infer", input_size=size)
        train = torchedge.predict(module, 32, device, input_size=size)
        expected = np.array([infer.latency.value, infer.memory.value, train.memory.value])
        worst = max(worst, float(np.abs(figures[row] / expected - 1).max()))
    line("largest deviation from torchedge.predict on the module", f"{worst:.1e}")


if __name__ == "__main__":
    main()
