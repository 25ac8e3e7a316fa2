"""The analytic latency of a device without a fitted profile against public measurements: docs/accuracy.md.

    python benchmarks/accuracy/analytic_latency.py TABLE

TABLE is a CSV with the columns gpu, precision, model, batch_size, ms_median: torchvision
networks, 3 x 224 x 224 (Inception 299), forward and backward, no optimizer step.
"""

from __future__ import annotations

import csv
import statistics
import warnings
from math import exp, log

from tables import options_of


def main() -> None:
    """Print a row a network and the summary."""
    parser = options_of(__doc__)
    parser.add_argument("table")
    parser.add_argument("--gpu", default="rtx2080ti")
    parser.add_argument("--device", default="rtx-2080ti")
    parser.add_argument("--precision", default="fp32")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    import torchedge

    measured: dict[tuple[str, int], list[float]] = {}
    with open(arguments.table) as file:
        for row in csv.DictReader(file):
            if row["gpu"] == arguments.gpu and row["precision"] == arguments.precision:
                key = row["model"], int(row["batch_size"])
                measured.setdefault(key, []).append(float(row["ms_median"]))
    predictor = torchedge.Predictor(arguments.device)
    logs = []
    print(f"{'network':<24}{'batch':>6}{'measured, ms':>14}{'estimate, ms':>14}{'measured / estimate':>21}")
    for (name, batch), times in sorted(measured.items()):
        try:
            estimate = predictor.predict(name, batch, optimizer="none").latency.value
        except torchedge.TorchedgeError as error:
            print(f"{name}: {error}")
            continue
        time = statistics.median(times)
        logs.append(log(time / estimate))
        print(f"{name:<24}{batch:>6}{time:>14.1f}{estimate:>14.1f}{time / estimate:>21.2f}")
    centre = statistics.median(logs)
    spread = statistics.mean(abs(exp(centre - x) - 1) for x in logs)
    print(f"{len(logs)} networks: measured / estimate {exp(centre):.2f} in the median; "
          f"mean error {100 * spread:.0f} % once scaled by that")  # fmt: skip


if __name__ == "__main__":
    main()
