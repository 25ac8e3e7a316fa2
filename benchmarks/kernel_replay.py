"""Let the present model choose among candidates that `torchedge bench kernels` measured: docs/lowering.md.

    python benchmarks/kernel_replay.py ROWS --profile nvidia-h200 --storage image

ROWS is the folder of `torchedge bench kernels --out FOLDER`, or a packed file of its rows as in
profiles/nvidia-h200/campaign/; nothing is measured again. Less than a second a case. The search for the
fastest begins with the errors that the profile holds of other cases; --learn FILE makes them.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import options_of

from torchedge.cli.benchmarking import print_summary
from torchedge.devices import find_device
from torchedge.errors import InputError
from torchedge.lowering.inference import target_of_device
from torchedge.lowering.targets import Target
from torchedge.lowering.trials import Trials, known_of, search
from torchedge.lowering.tuning import score
from torchedge.profiling.kernel_benchmark import describe_choice, operand_layouts, summarize
from torchedge.profiling.operator_cases import case_of, operator_kernel
from torchedge.storage.documents import read_unpacked
from torchedge.storage.journals import parse_rows
from torchedge.textures.coefficients import (
    ERRORS,
    KernelCoefficients,
    KernelErrors,
    TimedKernel,
    coefficients_of,
    errors_of,
)

MOST_BYTES = 1 << 28
LEARNT = 8
"""Candidates of a case, the fastest ones, whose errors a profile holds."""


def read_bench(rows: Path) -> list[dict[str, Any]]:
    """Return the rows of measured cases, of a folder or of a packed file; raises InputError if it is none."""
    path = rows / "kernels.jsonl" if rows.is_dir() else rows
    if not path.is_file():
        raise InputError(f"{path} does not exist; expected the results of `torchedge bench kernels`")
    data = read_unpacked(path, max_bytes=MOST_BYTES)
    return [row for _, row in parse_rows(path, io.BytesIO(data)) if row.get("kind") == "case"]


def replay_case(row: Mapping[str, Any], target: Target, coefficients: KernelCoefficients) -> dict[str, Any]:
    """Return a measured case as the present model chooses among its measured candidates.

    Raises:
        InputError: the candidates are no longer those of the measurement.
    """
    operator, *sizes = row["case"].split()
    kernel = operator_kernel(case_of(operator, tuple(map(int, sizes))), target)
    options = operand_layouts(kernel, target)
    begin = time.process_time()
    scores = score(kernel.nest, kernel.layouts, target, coefficients, options)
    tuning = time.process_time() - begin
    places = np.array(row["places"])
    known = places < scores.ms.size
    if not known.all() or any(
        describe_choice(choice.schedule, choice.layouts, options) != text
        for choice, text in zip(map(scores.choice, places[:3]), row["schedules"], strict=False)
    ):
        raise InputError(f"{row['case']}: has other candidates now; measure it again")

    def first(cost: Any) -> int:  # noqa: ANN401 - an array
        values = np.where(np.isfinite(scores.ms), cost, np.inf).reshape(-1)[places]
        return int(places[np.argsort(values, kind="stable")[0]])

    best = first(scores.ms)
    chosen = {
        "tuner": best if scores.gains(scores.ms.reshape(-1)[best], scores.ms[0, 0]) else 0,
        "default": 0,
        **{way: first(cost) for way, cost in scores.others.items()},
    }
    predicted = [float(ms) for ms in scores.ms.reshape(-1)[places]]
    order = np.argsort(places != 0, kind="stable")  # the default comes first
    return {
        **row,
        "chosen": chosen,
        "predicted": predicted,
        "tuning_s": tuning,
        "trials": scores.trials(places[order], target, coefficients),
    }


def errors_in(rows: Sequence[dict[str, Any]]) -> KernelErrors:
    """Return the errors of the predictions of each replayed case's fastest candidates."""
    kernels = []
    for row in rows:
        order = np.argsort(np.array(row["places"]) != 0, kind="stable")
        ms = np.array(row["ms"])[order]
        fastest = [int(n) for n in np.argsort(np.where(ms > 0, ms, np.inf))[:LEARNT] if ms[n] > 0]
        known: Trials = replace(row["trials"], times={n: float(ms[n]) for n in fastest})
        schedules, shares, errors = known.known()
        percent = np.round(100 * shares).astype(int)
        kernels.append(
            TimedKernel(
                row["case"],
                tuple(map(tuple, schedules.tolist())),
                tuple(map(tuple, percent.tolist())),
                tuple(np.round(errors, 4).tolist()),
            )
        )
    return KernelErrors(tuple(kernels))


def search_again(rows: Sequence[dict[str, Any]], errors: KernelErrors) -> None:
    """Add to replayed rows the places that the search for the fastest would have timed, of those measured.

    errors: those with which the search begins; those of the rows' own cases are left out.
    """
    orders = [np.argsort(np.array(row["places"]) != 0, kind="stable") for row in rows]
    trials = [row["trials"] for row in rows]

    def known(wanted: Sequence[Sequence[int]]) -> list[list[float]]:
        return [
            [ms if ms > 0 else np.inf for ms in (row["ms"][order[n]] for n in numbers)]
            for row, order, numbers in zip(rows, orders, wanted, strict=True)
        ]

    search(trials, known, known_of(errors.without({row["case"] for row in rows})))
    for row, order, one in zip(rows, orders, trials, strict=True):
        row["tried"] = [row["places"][order[number]] for number in one.times]


def main() -> None:
    """Print how the present model does on measured cases, by the coefficients of a profile."""
    parser = options_of(__doc__)
    parser.add_argument(
        "rows", type=Path, nargs="+", help="folders of `torchedge bench kernels --out`, or .jsonl.gz"
    )
    parser.add_argument("--profile", required=True, help="the device that was measured")
    parser.add_argument("--storage", choices=["buffer", "image"], help="preferred storage")
    parser.add_argument(
        "--learn", type=Path, help="write the errors of the predictions into this file (.json.gz)"
    )
    given = parser.parse_args()
    known = find_device(given.profile)
    target = target_of_device(known)
    target = replace(target, storage=given.storage) if given.storage else target
    rows = [row for path in given.rows for row in read_bench(path)]
    replayed = [replay_case(row, target, coefficients_of(known)) for row in rows]
    search_again(replayed, errors_of(known))
    if given.learn:
        ERRORS.write(given.learn, errors_in(replayed))
    print_summary(known.name, summarize(replayed), len(rows))


if __name__ == "__main__":
    main()
