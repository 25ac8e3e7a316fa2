"""What a campaign's controller itself takes, in memory and in time a point, beside a probe that does nothing.

    python benchmarks/campaign_controller.py [--plan standard]

The controller runs the whole plan: it has the networks pruned and written (in a process of its own, whose
peak is printed too), books a row of 150 layers for every point and writes the tables.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from torchedge.profiling.campaigns.plans import read_plan
from torchedge.profiling.campaigns.running import Campaign, Summary, run_campaign
from torchedge.profiling.campaigns.transports import LocalTransport

PROBE = """
import json, sys
def tell(**row): print(json.dumps(row), flush=True)
tell(row="environment", machine="none", device_name="none", torch="none")
for line in open(sys.argv[1]):
    job = json.loads(line)
    for mode, batch in job["points"]:
        label = dict(job=job["id"], mode=mode, batch_size=batch)
        tell(row="start", **label)
        layers = [["layer%d.0.conv" % i, 1.234, 5.678] for i in range(150)]
        tell(row="point", fits=1, reason="", memory_mib=1.0, latency_ms=1.0, layers=layers, **label)
"""


class Clock:
    """Notes when the networks were ready."""

    def __init__(self) -> None:
        self.begun = self.ready = time.perf_counter()

    def begin(self, label: str, total: int, done: int) -> None:
        """Note that the networks are ready: what begins last is the measurement."""
        self.ready = time.perf_counter()

    def doing(self, what: str) -> None:
        """Ignore it."""

    def step(self) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Show it."""
        print(text)


def run(plan: str, folder: Path, clock: Clock) -> Summary:
    """Run a plan with the probe that measures nothing."""
    probe = folder / "probe.py"
    probe.write_text(PROBE)
    campaign = Campaign(folder, read_plan(plan), "none", "local", probe=probe)
    return run_campaign(campaign, LocalTransport(sys.executable, folder / "device"), clock)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Measure a campaign's controller.")
    parser.add_argument("--plan", default="standard")
    arguments = parser.parse_args()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        summary = run(arguments.plan, Path(folder), clock)
    seconds = time.perf_counter() - clock.ready
    own, child = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"{summary.points} points, {summary.measured} booked, {len(summary.skipped)} networks skipped")
    print(
        f"preparing the networks: {clock.ready - clock.begun:.0f} s, a process of {child:.0f} MiB at its peak"
    )
    print(f"controller: {own:.0f} MiB at its peak, {1e3 * seconds / summary.points:.1f} ms a point")


if __name__ == "__main__":
    main()
