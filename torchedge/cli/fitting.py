"""`torchedge fit`: a device's profile from measurements."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli.console import Progress, answer, json_wanted, print_table, print_wrapped, warn
from torchedge.cli.options import DEVICE, PATH, Command, Group, all_of, or_word, whole
from torchedge.errors import InputError
from torchedge.texts import number

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.graphs import Mode
    from torchedge.profiling.profile_folders import ModeFit, PartFit
    from torchedge.profiling.transfer import Adaptation
    from torchedge.textures.coefficients import KernelCoefficients

_LETTERS = {("train", "gamma"): "Γ", ("train", "phi"): "Φ", ("infer", "gamma"): "γ", ("infer", "phi"): "φ"}
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
    click.option("--out", "-o", type=PATH, required=True, metavar="FOLDER", help="Profile folder to write."),
    click.option(
        "--device",
        "-d",
        type=DEVICE,
        help="Measured device, whose device.toml is copied. [default: named as the dataset's folder]",
    ),
    click.option("--force", is_flag=True, help="Overwrite an existing profile."),
)
_modes = all_of(
    _out,
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
    "torchedge fit all measured/my-orin --device my-orin --out my-orin",
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
    out: Path,
    device: str | None,
    force: bool,
    accuracy: bool,
    base: str | None,
    points: int | str | None,
    seed: int | None,
) -> None:
    """Fit some modes of a dataset, from nothing or from a base; write and print the profile."""
    from torchedge.prediction.profiles import MODE_TABLES
    from torchedge.profiling import profile_folders
    from torchedge.profiling.datasets import is_dataset, read_dataset
    from torchedge.profiling.latency_fitting import one_thread
    from torchedge.profiling.samples import PROTOCOL, device_of, measured_device, prepare
    from torchedge.profiling.transfer import adapt_mode, base_of, describe_transfer
    from torchedge.profiling.workspace_fitting import fit_device_workspaces

    if base is None:
        for name, value in (("points", points), ("seed", seed)):
            if value is not None:
                raise InputError(f"--{name} is given without --base; add --base DEVICE, or omit it")
    if dataset.is_file():
        raise InputError(f"{dataset} is a file; expected a folder: `torchedge fit loads` reads such")
    profile_folders.check_target(out, force=force)
    if base is not None:
        base_of(base, "train")  # a device without models fails before the dataset is read
    count, seed = points if isinstance(points, int) else None, seed or 0
    transfers: dict[Mode, Adaptation] = {}
    fits: dict[Mode, ModeFit] = {}
    problems: list[str] = []
    label = "fitting" if base is None else "adapting"
    with one_thread(), tempfile.TemporaryDirectory() as scratch, Progress(2, label) as progress:
        progress.begin("reading")
        if not dataset.is_dir() or (base is not None and not is_dataset(dataset)):
            read_dataset(dataset)  # raises the error of a missing folder
        described = (
            device_of(dataset, device) if base is None else measured_device(dataset, device, Path(scratch))
        )
        measured = read_dataset(dataset)
        chosen = _measured(modes, measured.modes or ("train",), dataset)
        progress.begin("workspaces")
        workspaces = fit_device_workspaces(dataset)
        settings = PROTOCOL if workspaces is None else replace(PROTOCOL, workspaces=workspaces.model)
        progress.more((3 + profile_folders.SCORES * (accuracy and base is None)) * len(chosen))
        for mode in chosen:
            models = None if base is None else base_of(base, mode)
            if base is not None and models is None:
                warn(f"{base} has no models of mode {mode}; these measurements are not used")
                continue
            progress.begin(f"simulating ({MODE_TABLES[mode]})")
            samples = prepare(measured, described, settings, mode)
            if models is not None:
                transfers[mode] = transfer = adapt_mode(models, samples, count, seed, progress.begin)
                used = int(transfer.used.sum())
                if count is not None and used < count:
                    warn(f"{count} points of mode {mode} are asked for, {used} are there; all are used")
                fits[mode] = describe_transfer(out, transfer, count, seed)
                continue
            fitted, scores = profile_folders.fit_models(samples, progress.begin), None
            if accuracy:
                progress.begin("accuracy")
                scores = profile_folders.score_all(samples, progress.step)
                problems += scores.problems
            fits[mode] = profile_folders.describe_fit(out, samples, fitted, scores)
        if not fits:
            raise InputError(
                f"{base} has models of none of the modes to fit; choose another --base, or fit without it"
            )
        written = profile_folders.write_profile(out, described, fits, workspaces=workspaces)
    for problem in problems:
        warn(problem)
    tables: dict[str, Any] = {MODE_TABLES[mode]: written.profile[MODE_TABLES[mode]] for mode in fits}

    def show() -> None:
        for name, table in tables.items() if base is None else ():
            _print_mode(written.name, name, table)
        if transfers:
            _print_transfers(written.name, transfers, dataset)

    _answer(written, tables, show, f"written to {out}; predict with --device {out}")


def _answer(device: Device, tables: Mapping[str, Any], show: Callable[[], object], last: str) -> None:
    """Print what was written of a profile: its tables as JSON, or `show` and a last line."""
    answer({"device": device.name, "folder": str(device.folder), **tables}, show)
    if not json_wanted():
        print_wrapped(last)


def _measured(modes: Sequence[Mode], measured: Sequence[Mode], dataset: Path) -> list[Mode]:
    """Return the modes to fit of those measured; raises InputError if there are none."""
    from torchedge.prediction.profiles import MODE_TABLES

    chosen = [mode for mode in measured if mode in modes]
    if not chosen:
        wanted, others = (", ".join(MODE_TABLES[m] for m in names) for names in (modes, measured))
        raise InputError(f"{dataset} holds no measurements of {wanted}; expected some: it holds {others}")
    return chosen


def _print_mode(device: str, name: str, table: Any) -> None:  # noqa: ANN401 - a parsed document
    rows = f"{table['memory_rows']} memory and {table['latency_rows']} latency measurements"
    networks = len(table["networks"])
    print_wrapped(f"{device}, {name}: fitted on {rows} of {networks} networks from {table['dataset']}")
    head = ["mean absolute percentage error", "error, %", "coverage of 90 % intervals, %"]
    scores = [
        [f"{target}, {protocol}", number(score["mean"]), number(score.get("coverage", float("nan")))]
        for target, by_protocol in table.get("accuracy", {}).items()
        for protocol, score in by_protocol.items()
    ]
    if scores:
        print_table(head, scores)


def _print_transfers(name: str, transfers: Mapping[Mode, Adaptation], dataset: Path) -> None:
    rows = []
    for mode, transfer in transfers.items():
        networks = len(set(transfer.samples.network[transfer.used].tolist()))
        print_wrapped(
            f"{name}: {transfer.base.name} adapted to {int(transfer.used.sum())} points ({mode}) "
            f"of {networks} networks from {dataset.resolve().name}"
        )
        for target, score in transfer.scores.items():
            rows.append([_LETTERS[mode, target], number(score.mean), number(score.mean_coverage)])
    if rows:
        print_table(["on the other points", "error, %", "inside 90 % intervals, %"], rows)


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
@_out
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
@_out
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
@_out
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
