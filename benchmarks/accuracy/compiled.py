"""Hold steps under torch.compile against the same steps in eager PyTorch, measured one after the other.

    python benchmarks/accuracy/compiled.py

For each figure: compiled over eager, and the half-width in log within which nine of ten further steps lie
(conformal).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys

import numpy as np

from torchedge.devices import find_device

FIGURES = ("allocated_mib", "reserved_mib", "memory_mib", "latency_ms")


def main() -> int:
    """Print the ratios by figure."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    table = find_device("nvidia-h100").folder / "campaign" / "compiled" / "measurements.csv.gz"
    with gzip.open(table, "rt", newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file) if row["fits"] == "1"}
    pairs = [(row, rows[id.replace("-compiled", "")]) for id, row in rows.items() if "-compiled" in id]
    print(f"{len(pairs)} steps       least  median    most  nine of ten within")
    for name in FIGURES:
        ratios = np.array([float(compiled[name]) / float(eager[name]) for compiled, eager in pairs])
        least, median, most = np.quantile(ratios, (0.0, 0.5, 1.0))
        half = np.quantile(np.abs(np.log(ratios)), 0.9 * (1 + 1 / len(ratios)), method="higher")
        print(f"{name:14}{least:9.2f}{median:8.2f}{most:8.2f}{half:20.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
