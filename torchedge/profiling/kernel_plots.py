"""Pictures of the kernel benchmark, like TMModel's Fig. 9 and 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchedge.profiling.kernel_benchmark import CLOSE, WAYS, rank_correlation, summarize, times_of
from torchedge.storage.pictures import BLUE, GREEN, GREY, ORANGE, canvas, save_picture

LEVELS = ("thread", "warp", "pure", "tuner")
"""Levels of the model from the first to the whole one (Fig. 10)."""


def draw_bench(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw regrets and speed-ups by operator, accuracy by level of the model, and predictions."""
    operators = list(dict.fromkeys(row["operator"] for row in rows))
    with canvas(14.0, 8.0) as figure:
        (regrets, speed), (levels, scatter) = figure.subplots(2, 2)
        places = np.arange(len(operators))
        for shift, (way, colour) in enumerate(
            (("tuner", BLUE), ("default", ORANGE), ("work-group search", GREEN))
        ):
            values = [
                100 * np.mean([t[way] / t["best"] - 1 for t in map(times_of, _of(rows, name))])
                for name in operators
            ]
            regrets.bar(places + 0.27 * (shift - 1), values, 0.25, color=colour, label=way)
        regrets.set(title="Mean regret against the best measured candidate", ylabel="%")
        regrets.set_xticks(places, operators, rotation=30, ha="right")
        regrets.legend()
        for row in rows:
            times = times_of(row)
            place = operators.index(row["operator"])
            speed.scatter(place, times["default"] / times["tuner"], s=12, color=BLUE)
            speed.scatter(place + 0.2, times["default"] / times["best"], s=12, color=GREY)
        speed.axhline(1, color="#333333", linewidth=1)
        speed.set(title="Speed-up over the default (grey: best measured)", ylabel="times", yscale="log")
        speed.set_xticks(places, operators, rotation=30, ha="right")
        summary = {way.way: way for way in summarize(rows).ways}
        levels.bar(LEVELS, [100 * summary[level].accuracy for level in LEVELS], color=BLUE)
        levels.set(
            title=f"Choices within {round(100 * CLOSE - 100)} % of the best, by level of the model",
            ylabel="%",
        )
        for row in rows:
            ms, predicted = np.array(row["ms"]), np.array(row["predicted"])
            scatter.scatter(ms[ms > 0], predicted[ms > 0], s=3, alpha=0.4, linewidths=0, color=BLUE)
        mean = float(np.mean([rank_correlation(row) for row in rows]))
        scatter.set(
            title=f"Predicted over measured (rank correlation {mean:.2f})", xlabel="measured, ms",
            ylabel="predicted, ms", xscale="log", yscale="log",
        )  # fmt: skip
        figure.suptitle(f"{len(rows)} cases, {len(WAYS)} ways to choose", fontsize=11)
    save_picture(figure, out)


def _of(rows: Sequence[Mapping[str, Any]], operator: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["operator"] == operator]
