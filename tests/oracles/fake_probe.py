"""A probe that measures nothing: the same rows for the same points, a few ms each; and it can misbehave.

FAKE_MACHINE names the machine; FAKE_DIES_AT is a point ("job mode batch") at which the probe is killed;
FAKE_SECONDS is how long a point takes; FAKE_SAYS goes to standard output before the first row.
"""

import hashlib
import json
import os
import signal
import sys
import time


def main():
    print(os.environ.get("FAKE_SAYS", "Welcome to the board"), flush=True)
    machine = os.environ.get("FAKE_MACHINE", "board")
    row = {
        "row": "environment",
        "machine": machine,
        "device_name": machine,
        "torch": "2.0",
        "memory_meter": "rss",
    }
    tell({**row, "arguments": sys.argv[2:], "date": "2026-11-21"})
    with open(sys.argv[1]) as file:
        jobs = [json.loads(line) for line in file]
    for job in jobs:
        for mode, batch in job["points"]:
            measure(job["id"], mode, batch)


def measure(job, mode, batch):
    label = {"job": job, "mode": mode, "batch_size": batch}
    tell({"row": "start", **label})
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    if os.environ.get("FAKE_DIES_AT") == f"{job} {mode} {batch}":
        os.kill(os.getpid(), signal.SIGKILL)
    figure = int(hashlib.sha256(f"{job} {mode} {batch}".encode()).hexdigest()[:6], 16) / 1000
    row = {"row": "point", **label, "fits": 1, "reason": "", "memory_mib": figure, "latency_ms": figure / 3}
    slow = figure * float(os.environ.get("FAKE_SPREAD", "1"))
    row.update(latency_p10_ms=figure, latency_p90_ms=slow)
    if batch > 200:
        row.update(fits=0, reason="out of memory", memory_mib=None, latency_ms=None)
    if batch == 13:
        row.update(fits=None, reason='ValueError: unlucky, "quoted", and\na second line', memory_mib=None)
    tell({**row, "layers": [["conv", 1.0, 2.0]]})


def tell(row):
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
