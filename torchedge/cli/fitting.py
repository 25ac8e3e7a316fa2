"""`torchedge fit`: a device's profile from measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli.console import (
    Progress,
    answer,
    json_wanted,
    print_next,
    print_table,
    print_wrapped,
    shown_device,
    warn,
)
from torchedge.cli.options import DEVICE, PATH, Command, Group, all_of, or_word, refuse_given, whole
from torchedge.texts import number

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.graphs import Mode
    from torchedge.profiling.device_fits import DeviceFit
    from torchedge.profiling.profile_folders import PartFit
    from torchedge.textures.coefficients import KernelCoefficients

_DATASET = """\
DATASET is the folder of a campaign (`torchedge campaign run`), or one with measurements.csv (network,
pruning_level, batch_size, memory_fits, gamma_mb, allocated_mb, reserved_mb, latency_fits, phi_ms) and
topologies.jsonl.

With --base, the profile of another device is adapted to few measurements instead: to all points, or to the
most informative --points of each mode."""


@click.group("fit", cls=Group)
def fit() -> None:
    """Fit a device's profile to measurements.

    Models of memory and latency are written, with provenance, digests and accuracy, into a profile folder
    that `--device FOLDER` accepts. Other parts of the device's profile are kept: to add to a profile, name it
    as --device and as --out, with --force. The same data gives the same bytes except for the date
    (SOURCE_DATE_EPOCH sets it). Needs torchedge[fit].
    """


_out = all_of(
    click.argument("dataset", type=PATH),
    click.option(
        "--device",
        "-d",
        type=DEVICE,
        help="Measured device, whose device.toml is copied. [default: the campaign's, else as its folder]",
    ),
    click.option("--force", is_flag=True, help="Overwrite a profile, and write what is unusable too."),
)
_part = all_of(
    _out,
    click.option("--out", "-o", type=PATH, required=True, metavar="FOLDER", help="Profile folder to write."),
)
_modes = all_of(
    _out,
    click.option(
        "--out", "-o", type=PATH, metavar="FOLDER", help="Profile folder to write. [default: in your own]"
    ),
    click.option("--accuracy/--no-accuracy", default=True, help="Also score the models (minutes)."),
    click.option("--base", type=DEVICE, help="Adapt this device's profile to few measurements."),
    click.option(
        "--points",
        type=or_word(whole(3, 10**6), "all"),
        metavar="N|all",
        help="With --base: points of each mode. [default: all]",
    ),
    click.option("--seed", type=whole(0, 10**9), help="With --base: seed of their choice. [default: 0]"),
)


def _add_command(name: str, modes: Sequence[Mode], summary: str, *examples: str) -> None:
    @fit.command(name, cls=Command, help=summary, notes=_DATASET, examples=examples)
    @_modes
    def run(**options: Any) -> None:  # noqa: ANN401 - see _modes
        _fit_modes(modes, **options)


_add_command(
    "all",
    ("train", "infer"),
    "Fit every mode that was measured.",
    "torchedge fit all measured/my-orin",
    "torchedge fit all my-orin -d my-orin --base nvidia-h200 --points 30 --out profiles/my-orin",
)
_add_command(
    "training",
    ("train",),
    "Fit the models of training steps.",
    "torchedge fit training jetson-tx2 --device ./my-tx2 --out my-tx2 --force",
)
_add_command(
    "inference",
    ("infer",),
    "Fit the models of inference.",
    "torchedge fit inference my-orin --device ./profile --out profile --force --no-accuracy",
)


def _fit_modes(
    modes: Sequence[Mode],
    dataset: Path,
    points: int | str | None,
    seed: int | None,
    **options: Any,  # noqa: ANN401 - see _modes
) -> None:
    """Fit some modes of a dataset, from nothing or from a base; write and print the profile."""
    from torchedge.profiling.device_fits import fit, fit_document

    base = options["base"]
    if base is None:
        refuse_given(("points", "seed"), "without --base; add --base DEVICE, or omit it")
    count = points if isinstance(points, int) else None
    with Progress(2, "fitting" if base is None else "adapting") as progress:
        result = fit(dataset, points=count, seed=seed or 0, modes=modes, progress=progress, **options)
    for note in result.notes:
        warn(note)
    answer(fit_document(result), lambda: print_fit(result, dataset))


def print_fit(result: DeviceFit, dataset: Path | None) -> None:
    """Print a fit's figures with their verdicts, what to measure next, and the next command."""
    from torchedge.profiling.device_fits import MEANINGS

    how = "" if result.base is None else f"{result.base} adapted to "
    print_wrapped(f"{result.device.name}: {how}measurements of {result.dataset}")
    head = ["figure", "verdict", "rows", "networks", "error, %", "inside, %"]
    rows = [
        [
            f"{f.symbol} ({f.name})",
            f.verdict,
            f"{f.rows:,}",
            str(f.networks),
            number(f.error),
            number(f.coverage),
        ]
        for f in result.figures
    ]
    print_table(head, rows, left=2)
    print_wrapped(
        "error: mean on networks or points held out of the fit; inside: share of them in their 90 % intervals"
    )
    if result.programs is not None:
        errors = result.programs
        print_wrapped(
            f"programs: a step's latency errs by {number(errors.mean('latency'))} %, its memory by "
            f"{number(errors.mean('memory'))} % on networks left out; `torchedge predict BUNDLE` uses them"
        )
    if result.kinds:
        kinds = ", ".join(f"{number(error)} % ({kind})" for kind, error in result.kinds.items())
        print_wrapped(f"under autocast latency errs by {kinds} on networks left out")
    for line in result.missing:
        print_wrapped(line, first="missing: ", rest="  ")
    dropped = [f.name for f in result.figures if not f.written]
    if dropped:
        print_wrapped(
            f"{', '.join(dropped)}: unusable and not written, so that predictions of it stay assumed; "
            "--force writes it", first="missing: ", rest="  ",
        )  # fmt: skip
    for line in result.advice:
        print_wrapped(line, first="to do better: ", rest="  ")
    parts = [f"{f.symbol} ({f.verdict})" for f in result.figures if f.written]
    written = ", ".join([*parts, *(["programs"] if result.programs is not None else [])])
    print_wrapped(f"written to {result.folder}: {written}")
    for verdict in dict.fromkeys(f.verdict for f in result.figures):
        print_wrapped(f"{verdict}: {MEANINGS[verdict]}")
    print_next(f"torchedge predict resnet50 --batch-size 8 --device {shown_device(result.device)}")
    if dataset is not None:
        print_next(f"torchedge accuracy {dataset} --device {shown_device(result.device)}")


def _answer(device: Device, tables: Mapping[str, Any], show: Callable[[], object], last: str) -> None:
    """Print what was written of a profile: its tables as JSON, or `show` and a last line."""
    answer({"device": device.name, "folder": str(device.folder), **tables}, show)
    if not json_wanted():
        print_wrapped(last)


# parts of profiles ------------------------------------------------------------------------------------------


def _fit_part(
    name: str, dataset: Path, out: Path, device: str | None, force: bool, fit: Callable[[Device], PartFit]
) -> tuple[Device, PartFit]:
    """Fit one part of a device's profile, named as in `write_profile`; return the written device too."""
    from torchedge.profiling.profile_folders import check_target, write_profile
    from torchedge.profiling.samples import device_of

    check_target(out, force=force)
    described = device_of(dataset.absolute().parent, device)
    part = fit(described)
    return write_profile(out, described, {}, **{name: part}), part


@fit.command(
    "loads",
    cls=Command,
    examples=["torchedge fit loads loads.jsonl --device ./my-phone --out my-phone --force"],
)
@_part
def _fit_loads(dataset: Path, out: Path, device: str | None, force: bool) -> None:
    """Fit the latency under load that streaming plans with.

    DATASET is a file written by `torchedge profile --streaming`.
    """
    from torchedge.profiling.load_fitting import fit_device_loads
    from torchedge.streaming.capacities import WAY
    from torchedge.streaming.rates import TABLE, THRESHOLDS

    with Progress(len(THRESHOLDS), "fitting loads") as progress:
        written, loads = _fit_part(
            "loading", dataset, out, device, force,
            lambda described: fit_device_loads(dataset, described, out, progress.step),
        )  # fmt: skip
    table: Any = written.profile[TABLE]

    def show() -> None:
        print_wrapped(
            f"{written.name}: latency under load fitted on {table['points'] - table['disturbed']} points of "
            f"{table['rows']} kernels from {table['dataset']}; {table['disturbed']} disturbed points omitted"
        )
        scores = table["accuracy"].items()
        head = ["unseen sizes", "sizes", "mean error, %", "median, %"]
        print_table(head, [[n, str(s["sizes"]), number(s["mean"]), number(s["median"])] for n, s in scores])
        head = ["slowed at the capacity, %", "median", "90th percentile", "by the threshold"]
        keys = ("at_capacity", "at_capacity_p90", "at_threshold", "at_threshold_p90")
        rows = [[n, *(number(s[key]) for key in keys)] for n, s in scores if keys[0] in s]
        print_table([*head, "90th percentile"], rows)
        for name, figure in loads.figures.items():
            print_wrapped(f"{name}: {figure['value']} {figure['unit']}")
        if WAY in table:
            print_wrapped(f"fastest way to load beside kernels: {table[WAY]}")

    _answer(written, {TABLE: table}, show, f"written to {out}; plan with --device {out}")


@fit.command(
    "kinds",
    cls=Command,
    examples=["torchedge fit kinds campaign/settings --device my-gpu --out my-gpu --force"],
)
@_part
def _fit_kinds(dataset: Path, out: Path, device: str | None, force: bool) -> None:
    """Fit the latency of transformers and of half precision, kind by kind.

    DATASET is the folder of a campaign over settings: steps in autocast, with weights in bfloat16, with
    checkpoints and frozen parameters. The device's profile needs a fit of plain training steps before.
    """
    from torchedge.prediction.profiles import KINDS_TABLE
    from torchedge.profiling.kind_fitting import fit_kinds, read_kind_rows

    def fit(described: Device) -> PartFit:
        measured = read_kind_rows(dataset, described)
        with Progress(measured.fits, "fitting kinds of steps") as progress:
            return fit_kinds(measured, out, progress.step)

    written, _ = _fit_part("kinds", dataset, out, device, force, fit)
    table: Any = written.profile[KINDS_TABLE]

    def show() -> None:
        rows = []
        for kind, score in table["accuracy"].items():
            rows.append([kind, "", str(score["rows"]), number(score["mean"])])
            rows += [["", setting, "", number(error)] for setting, error in score["settings"].items()]
        print_table(["kind of steps", "setting", "rows", "families left out, %"], rows)

    _answer(written, {KINDS_TABLE: table}, show, f"written to {out}; predict with --device {out}")


@fit.command(
    "kernels",
    cls=Command,
    examples=["torchedge fit kernels kernels.jsonl --device nvidia-h200 --out my-h200 --force"],
)
@_part
def _fit_kernels(dataset: Path, out: Path, device: str | None, force: bool) -> None:
    """Fit the cost model of kernels, by which schedules and layouts are chosen.

    DATASET is a file written by `torchedge profile --kernels`.
    """
    from torchedge.profiling.kernel_fitting import fit_kernels

    written, _ = _fit_part(
        "kernels", dataset, out, device, force, lambda described: fit_kernels(dataset, described, out)
    )
    print_kernels(written, f"written to {out}; tune with --device {out}")


def print_kernels(device: Device, last: str) -> None:
    """Print the coefficients of kernels that a profile holds, and a last line."""
    from torchedge.storage.codecs import thaw
    from torchedge.textures.coefficients import CODEC, TABLE, coefficients_of

    coefficients, table = coefficients_of(device), thaw(device.profile[TABLE])
    assert isinstance(table, dict)
    document = {"coefficients": CODEC.document(coefficients), TABLE: table}
    _answer(device, document, lambda: _print_coefficients(device, coefficients, table), last)


def _print_coefficients(device: Device, coefficients: KernelCoefficients, table: Mapping[str, Any]) -> None:
    print_wrapped(
        f"{device.name}: {coefficients.compute_units} compute units of warps of {coefficients.warp}, "
        f"{max(coefficients.gflops):.4g} GFLOP/s, launch {coefficients.launch_us:.3g} us"
    )
    columns = {
        "hit, ns": "hit_ns", "worst, ns": "worst_ns", "lines C": "lines", "line, B": "line_bytes",
        "decay D": "decay", "cache": "cache_gb_s", "second level": "l2_gb_s", "main, GB/s": "main_gb_s",
    }  # fmt: skip
    rows = [
        [name, *(f"{getattr(path, field):.4g}" for field in columns.values())]
        for name, path in (("image", coefficients.image), ("buffer", coefficients.buffer))
    ]
    print_table(["", *columns], rows)
    for part, origin in coefficients.origins.items():
        if origin.residual is not None:
            print_wrapped(f"{part}: fitted with a median error of {origin.residual:.3g} %")
    again = table.get("repeatability")
    if again:
        print_wrapped(
            f"two passes differ by {again['cases']:.3g} % (median of the measurements; 90th percentile "
            f"{again['cases_p90']:.3g} %), the coefficients fitted to each by {again['coefficients']:.3g} %"
        )
