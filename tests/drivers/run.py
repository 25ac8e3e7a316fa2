"""Run the drivers' suite on every OpenCL device at hand, and print a table.

    python tests/drivers/run.py                   # make test-drivers
    python tests/drivers/run.py --list            # only what is at hand
    python tests/drivers/run.py --only oclgrind   # devices whose name or platform holds the word
    python tests/drivers/run.py --simulate        # a tiny step of every network in Oclgrind, a process each
    python tests/drivers/run.py --simulate gpt    # ... of one
    python tests/drivers/run.py --ulps            # errors of element-wise functions on every device
    python tests/drivers/run.py -- -k lstm        # what follows goes to pytest

At hand is every device of the loader's drivers, rusticl on llvmpipe where Mesa has it, and Oclgrind, a
simulator that reports accesses out of bounds, uninitialised values and data races; its log has to stay empty.
Each device gets a process of its own, for a driver that crashes ends it. A driver that builds no kernel on
this processor is named with its fault and not tested. The exit status is 1 if any test failed on any device,
or fewer devices than --least can be tested.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
OCLGRIND = [*Path("/usr").glob("lib*/oclgrind/liboclgrind-rt-icd.so"),
            *Path("/usr/lib").glob("*/oclgrind/liboclgrind-rt-icd.so"),
            *Path("/usr/local").glob("lib*/oclgrind/liboclgrind-rt-icd.so")]  # fmt: skip
LIST = "from torchedge.cli import main; main()"


@dataclass(frozen=True)
class Driver:
    """A device, and the environment in which it is found under its number."""

    number: int
    name: str
    platform: str
    version: str
    fault: str
    environment: Mapping[str, str]

    @property
    def simulates(self) -> bool:
        """Whether it is Oclgrind."""
        return "oclgrind" in f"{self.name} {self.platform}".casefold()


@dataclass(frozen=True)
class Result:
    """Counts of one device's tests; log: lines that the simulator reported. failures: a line each."""

    passed: int
    failed: int
    skipped: int
    log: int
    failures: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether something ran, nothing failed and nothing was reported."""
        return self.passed > 0 and self.failed == 0 and self.log == 0


def listed(environment: Mapping[str, str]) -> list[Driver]:
    """Return the devices that `torchedge devices --opencl` lists in an environment."""
    command = [sys.executable, "-c", LIST, "devices", "--opencl", "--json"]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if run.returncode:
        return []
    devices = json.loads(run.stdout)
    return [
        Driver(d["index"], d["name"], d["platform"], d["driver"], d["fault"], environment) for d in devices
    ]


def at_hand(folder: Path) -> Iterator[Driver]:
    """Yield the devices of all drivers, each once. folder: where the entry of Oclgrind is written."""
    environments: list[dict[str, str]] = [{"RUSTICL_ENABLE": "llvmpipe"}]
    if OCLGRIND:
        (folder / "oclgrind.icd").write_text(f"{OCLGRIND[0]}\n")
        checks = {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_UNINITIALIZED": "1"}
        # Optimized, some loads become instructions that its checks of uninitialised values cannot follow.
        options = {"OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable"}
        environments.append({"OCL_ICD_VENDORS": str(folder), **checks, **options})
    seen = set()
    for environment in environments:
        for driver in listed(environment):
            key = (driver.name, driver.platform, driver.version)
            if key not in seen:
                seen.add(key)
                yield driver


def tested(driver: Driver, folder: Path, arguments: list[str], suite: Path = HERE) -> Result:
    """Run a suite on one device; its report is report.xml in the folder."""
    report, log = folder / "report.xml", folder / "oclgrind.log"
    for path in (report, log):
        path.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **driver.environment,
        "TORCHEDGE_OPENCL_DEVICE": str(driver.number),
        "OCLGRIND_LOG": str(log),
        "TORCHEDGE_EVERY_PHONE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-m",
        "slow or not slow",
        str(suite),
        f"--junit-xml={report}",
        *arguments,
    ]
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = tuple(log.read_text(errors="replace").splitlines()) if log.exists() else ()
    reports = sum(bool(line.strip()) for line in lines)
    if not report.exists():
        return Result(0, 1, 0, reports, tuple(output.stdout.splitlines()[-5:]))
    cases = ElementTree.parse(report).getroot().iter("testcase")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in cases:
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in case)
        counts["failed" if bad else "skipped" if skipped else "passed"] += 1
        failures += [f"{case.get('name')}: {' '.join((b.get('message') or '').split())[:160]}" for b in bad]
    return Result(**counts, log=reports, failures=(*failures, *lines[:5]))


def printed_ulps(drivers: list[Driver], folder: Path, arguments: list[str]) -> int:
    """Print the worst errors of each element-wise function and its gradients, and return the exit status."""
    worst: dict[str, dict[int, str]] = {}
    status = 0
    for place, driver in enumerate(drivers):
        result = tested(driver, folder, arguments, HERE.parent / "lowering" / "test_whole_ranges.py")
        status = status or int(not result.good)
        for line in result.failures:
            print(f"{driver.name} ({driver.platform}): {line}", flush=True)
        if result.passed:
            for case in ElementTree.parse(folder / "report.xml").getroot().iter("testcase"):
                for noted in case.iter("property"):
                    function = (case.get("name") or "").split("[")[1].rstrip("]")
                    worst.setdefault(function, {})[place] = noted.get("value") or ""
    print("\n".join(f"{k}: {d.name} ({d.platform} {d.version})" for k, d in enumerate(drivers)))
    print("ulps of the result and of each gradient, in the unit of its bound in docs/kernel-figures.md")
    print(f"{'':32}" + "".join(f"{k:<22}" for k in range(len(drivers))).rstrip())
    for function, found in sorted(worst.items()):
        print(f"{function:32}" + "".join(f"{found.get(k, '-'):<22}" for k in range(len(drivers))).rstrip())
    return status


def simulated(names: list[str]) -> int:
    """Run a training step of each network in Oclgrind, print a table, and return the exit status.

    Each has a process of its own: where memory of an earlier network is used again, Oclgrind 21.10 reports
    values as uninitialised that kernels have written.
    """
    sys.path.insert(0, str(HERE.parent))
    from drivers.networks import BENCHMARKS, OTHERS

    status = 0
    print(f"{'network':14}{'processor s':>12}  {'step':8}reports", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulators = [driver for driver in at_hand(folder) if driver.simulates and not driver.fault]
        if not simulators:
            raise SystemExit("Oclgrind is not at hand; Debian: apt-get install oclgrind")
        tiny = {**simulators[0].environment, "TORCHEDGE_TINY_NETWORKS": "1"}
        driver = replace(simulators[0], environment=tiny)
        for network in names or [*BENCHMARKS, *OTHERS]:
            before = sum(os.times()[2:4])
            result = tested(driver, folder, ["-k", f"training_step and float64[{network}]"])
            seconds, step = sum(os.times()[2:4]) - before, "right" if result.passed else "WRONG"
            print(f"{network:14}{seconds:12.0f}  {step:8}{result.log}", flush=True)
            for line in result.failures:
                print(f"   {line}", flush=True)
            status = status or int(not result.good)
    return status


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the devices and stop")
    parser.add_argument("--only", default="", help="a word of the device's name, platform or driver")
    parser.add_argument("--least", type=int, default=1, help="devices that must be usable")
    parser.add_argument(
        "--simulate", nargs="*", metavar="NETWORK", help="run tiny steps of networks (all) in Oclgrind"
    )
    parser.add_argument("--ulps", action="store_true", help="print errors of element-wise functions")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    given = parser.parse_args()
    if given.simulate is not None:
        sys.exit(simulated(given.simulate))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drivers = [
            d
            for d in at_hand(folder)
            if re.search(given.only, f"{d.name} {d.platform} {d.version}", re.IGNORECASE)
        ]
        if given.ulps:
            usable = [driver for driver in drivers if not (driver.fault or driver.simulates)]
            sys.exit(printed_ulps(usable, folder, given.pytest))
        rows, status = [("device", "platform", "driver", "passed", "failed", "skipped", "reports")], 0
        for driver in drivers:
            row = (driver.name, driver.platform, driver.version)
            print(f"== {driver.name} ({driver.platform} {driver.version})", flush=True)
            if driver.fault:
                print(f"   cannot be used here: {driver.fault}", flush=True)
            if driver.fault or given.list:
                rows.append((*row, "", "", "", ""))
                continue
            result = tested(driver, folder, given.pytest)
            for line in result.failures:
                print(f"   {line}", flush=True)
            counts = (result.passed, result.failed, result.skipped, result.log if driver.simulates else "")
            rows.append((*row, *map(str, counts)))
            status = status or int(not result.good)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    usable = sum(not driver.fault for driver in drivers)
    if usable < given.least:
        raise SystemExit(f"{usable} devices can be tested; expected at least {given.least}")
    sys.exit(status)


if __name__ == "__main__":
    main()
