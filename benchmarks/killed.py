"""Kill processes at random moments of searches, campaigns, exports, fits and caches; check what is left.

    python benchmarks/killed.py --kills 200 --seed 0

Each process is a fork that dies by SIGKILL at a moment drawn over the time that the whole work takes, and
reports what is done. Then the work is started again, or the files are read: nothing that was reported is
lost, nothing is half, and the result is that of a process that nobody killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from harness import options_of
from oracles.fake_campaigns import Silent, plan_of, prepare, run_fake
from torch import nn

import torchedge
from torchedge.opencl.binary_caches import BinaryCache
from torchedge.profiling.profile_folders import PartFit, write_profile
from torchedge.storage.journals import read_rows
from torchedge.textures.coefficients import coefficients_of

Tell = Callable[[object], None]


class Searching:
    """A search with a journal. Told: the number of candidates after each iteration."""

    def __init__(self, root: Path) -> None:
        layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        self.space = torchedge.PruningSpace(network, (3, 32, 32), ratios=(0.25, 0.5, 0.75, 1), name="small")

    def work(self, folder: Path, tell: Tell) -> None:
        """Do the whole work."""
        found = torchedge.search(
            self.space,
            {"training_memory": 1e6},
            lambda encodings: [-sum(encoding.values()) for encoding in encodings],
            device="jetson-tx2",
            population=6,
            iterations=8,
            journal=folder / "search.jsonl",
            progress=lambda progress: tell(self._rows(folder)),
        )
        (folder / "best.json").write_text(json.dumps([found.best.encoding, found.best.score]))

    def check(self, folder: Path, told: list[object], again: Callable[[], None]) -> object:
        """Check what is left, and return the result after the work was done `again`."""
        rows = list(read_rows(folder / "search.jsonl"))
        assert len(rows) >= max(map(int, told), default=0), f"{len(rows)} rows left of {told[-1]}"
        again()
        assert list(read_rows(folder / "search.jsonl"))[: len(rows)] == rows
        return (folder / "best.json").read_text()

    @staticmethod
    def _rows(folder: Path) -> int:
        return sum(1 for _ in read_rows(folder / "search.jsonl"))


class Campaigning:
    """A campaign of the tests' fake probe. Told: the points that are recorded."""

    plan = plan_of(networks=2, batches=tuple(range(1, 13)))

    def __init__(self, root: Path) -> None:
        os.environ["FAKE_SECONDS"] = "0.002"

    def work(self, folder: Path, tell: Tell) -> None:
        """Do the whole work."""
        if not (folder / "jobs.jsonl").exists():
            prepare(folder, self.plan)

        class Telling(Silent):
            def step(self) -> None:
                super().step()
                tell(self.steps)

        run_fake(folder, self.plan, Telling())

    def check(self, folder: Path, told: list[object], again: Callable[[], None]) -> object:
        """Check what is left, and return the result after the work was done `again`."""
        if not (folder / "jobs.jsonl").exists() or not (folder / "jobs.jsonl").read_bytes().endswith(b"\n"):
            shutil.rmtree(folder)  # the test's own job lines, which are written in one piece
            folder.mkdir()
            told.clear()
        points = self._points(folder)
        assert len(points) >= max(map(int, told), default=0), f"{len(points)} points left of {told[-1]}"
        again()
        assert len(self._points(folder)) == len(set(self._points(folder)))
        return (folder / "measurements.csv").read_text()

    @staticmethod
    def _points(folder: Path) -> list[object]:
        rows = read_rows(folder / "rows.jsonl")
        return [(r["job"], r["mode"], r["batch_size"]) for r in rows if r["row"] == "point"]


class Exporting:
    """`export` with force over the bundle of the process before. Told: the new bundle's weight."""

    def __init__(self, root: Path) -> None:
        self.out, self.number = root / "bundle", 0
        self._export(0)

    def _export(self, number: int) -> None:
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, number)
        torchedge.export(model, torch.zeros(1, 8), out=self.out, device="adreno-640", onnx=False, force=True)

    def work(self, folder: Path, tell: Tell) -> None:
        """Do the whole work."""
        self._export(self.number + 1)
        tell(self.number + 1)

    def check(self, folder: Path, told: list[object], again: Callable[[], None]) -> object:
        """Check what is left, and return the result after the work was done `again`."""
        arrays = torchedge.load_bundle(self.out).weights().values()
        present = max(float(array.max()) for array in arrays)
        assert present in (self.number, self.number + 1), f"the bundle holds {present}"
        assert not told or present == self.number + 1
        self.number = int(present)
        return None


class Fitting:
    """A profile that is written again. Told: the new launch time."""

    def __init__(self, root: Path) -> None:
        self.out, self.number = root / "profile", 1
        self.device = torchedge.find_device("jetson-tx2")
        self._write(1)

    def _write(self, number: int) -> None:
        model = replace(coefficients_of(self.device), launch_us=float(number))
        write_profile(self.out, self.device, {}, kernels=PartFit(model, {"provenance": "assumed"}))

    def work(self, folder: Path, tell: Tell) -> None:
        """Do the whole work."""
        self._write(self.number + 1)
        tell(self.number + 1)

    def check(self, folder: Path, told: list[object], again: Callable[[], None]) -> object:
        """Check what is left, and return the result after the work was done `again`."""
        present = coefficients_of(torchedge.find_device(self.out)).launch_us
        assert present in (self.number, self.number + 1) and (not told or present == self.number + 1)
        self.number = int(present)
        return None


class Caching:
    """Entries of a program cache, several times each. Told: the entries that are written."""

    def __init__(self, root: Path) -> None:
        self.cache = BinaryCache(root / "cache")

    def work(self, folder: Path, tell: Tell) -> None:
        """Do the whole work."""
        for number in range(60):
            key = f"{number % 20:064x}"
            self.cache.write(key, key.encode() * (1 + 400 * number))
            tell(key)

    def check(self, folder: Path, told: list[object], again: Callable[[], None]) -> object:
        """Check what is left, and return the result after the work was done `again`."""
        for key in map(str, told):
            entry = self.cache.read(key)
            assert entry is not None, f"entry {key[-4:]} is lost"
            assert entry == key.encode() * (len(entry) // len(key))
        return None


JOBS = {"search": Searching, "campaign": Campaigning, "export": Exporting, "fit": Fitting, "cache": Caching}


def forked(work: Callable[[Tell], None], seconds: float | None) -> tuple[list[object], bool]:
    """Run work in a fork, killed after so many seconds; return what it told, and whether it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        status = 1
        try:
            os.close(reader)
            torch.set_num_threads(1)
            work(lambda item: os.write(writer, f"{json.dumps(item)}\n".encode()) and None)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as file:
        lines = [json.loads(line) for line in file if line.endswith(b"\n")]
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status)
    if not killed and status:
        raise AssertionError("the process failed")
    return lines, killed


def main() -> int:
    """Kill, check and print a table; return 1 if anything was lost or half."""
    parser = options_of(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, failures = random.Random(options.seed), 0
    root = Path(tempfile.mkdtemp(prefix="torchedge-killed-"))
    names = list(JOBS)
    try:
        for place, name in enumerate(names):
            wanted = (options.kills + place) // len(names)
            home = root / name
            home.mkdir()
            job = JOBS[name](home)
            start = time.perf_counter()
            (home / "whole").mkdir()
            told, _ = forked(lambda tell, job=job, home=home: job.work(home / "whole", tell), None)
            seconds = time.perf_counter() - start
            expected = job.check(home / "whole", told, lambda: None)
            kills = bad = 0
            while kills < wanted:
                folder = Path(tempfile.mkdtemp(dir=home))
                moment = draw.uniform(0, seconds)
                told, killed = forked(lambda tell, job=job, folder=folder: job.work(folder, tell), moment)
                again = lambda job=job, folder=folder: forked(lambda tell: job.work(folder, tell), None)  # noqa: E731
                try:
                    assert job.check(folder, told, again) == expected, "the result is another one"
                except Exception as error:
                    bad += 1
                    print(f"{name} killed after {moment:.3f} s: {type(error).__name__}: {error}")
                kills += killed
                shutil.rmtree(folder)
            failures += bad
            print(f"{name:9} {kills:4} kills within {seconds:5.2f} s: {bad} lost or half", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{options.kills} kills: {failures} lost or half")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
