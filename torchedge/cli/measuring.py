"""`torchedge profile` and `torchedge campaign`: measure this machine's processor, or any device by a plan."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli.console import Progress, answer, print_next, print_table, print_wrapped, warn
from torchedge.cli.listing import device_document, print_device
from torchedge.cli.options import PATH, Choice, Command, Group, TextType, command, refuse_given, whole
from torchedge.errors import DeviceError, InputError, MissingExtraError

if TYPE_CHECKING:
    from torchedge.profiling.campaigns.recording import Summary
    from torchedge.profiling.kernel_cases import BenchDevice

_SHOWN = 5
"""Reasons of failed points that are printed."""


@command(
    "profile",
    examples=[
        "torchedge profile --quick",
        "torchedge profile local-cpu --json",
        "torchedge profile --host",
        "torchedge profile --streaming --out loads.jsonl",
        "torchedge profile --streaming --device 1 --out loads.jsonl",
        "torchedge profile --kernels",
        "torchedge profile --kernels --device gpu --out kernels.jsonl",
        "torchedge profile my-phone --over adb --runner build/android-arm64/torchedge-run",
    ],
)
@click.argument("device", default="local-cpu")
@click.option(
    "--streaming", is_flag=True, help="Measure an OpenCL device for streaming instead (about five minutes)."
)
@click.option(
    "--kernels",
    is_flag=True,
    help="Run the micro-benchmarks of an OpenCL device instead (under five minutes).",
)
@click.option(
    "--device",
    "-d",
    "opencl_device",
    help="With --streaming or --kernels: OpenCL device, by its number, type or a part of its name.",
)
@click.option(
    "--out",
    "-o",
    type=PATH,
    metavar="FILE",
    help="With --streaming or --kernels: file that receives the rows. [--kernels: in your own folder]",
)
@click.option(
    "--host",
    is_flag=True,
    help="Time what eager PyTorch makes this machine's host do instead, with its GPU or without (5 s).",
)
@click.option("--quick", is_flag=True, help="Measure less: the processor in a minute of its time.")
@click.option(
    "--over",
    metavar="WAY",
    help="Measure a device without Python: local, ssh://[user@]host[:port], adb or adb:SERIAL.",
)
@click.option("--runner", type=PATH, metavar="FILE", help="With --over: torchedge-run, built for the device.")
def profile(
    device: str,
    streaming: bool,
    kernels: bool,
    opencl_device: str | None,
    out: Path | None,
    host: bool,
    quick: bool,
    over: str | None,
    runner: Path | None,
) -> None:
    """Measure this machine's processor, or an OpenCL device for streaming or for its kernels.

    The processor takes some minutes, with --quick one: figures first, then training and inference of small
    networks, to which its profile is fitted. It goes into your own folder, where `predict` and `devices`
    find it before the packaged one. DEVICE is local-cpu; `torchedge campaign` measures others.

    With --streaming: how much kernels slow while they load weights, and the rates of disk, copies and
    launches, as rows for `torchedge fit loads`. With --kernels: caches, bandwidths, registers and arithmetic,
    by which schedules and layouts of kernels are chosen; the coefficients go into the device's profile in
    your own folder. The same command continues an interrupted measurement.

    With --over and --runner, a device that has an OpenCL driver and no Python, called DEVICE from now on: its
    limits, then kernels, then loads and disk go into its profile in your own folder; --kernels or --streaming
    measures that part alone. `torchedge campaign run DEVICE --runner` measures training steps there.

    With --host: the microseconds of a tiny operator, by which predictions for a GPU follow the host that it
    is in, and of modules, views, casts, checkpoints and updates beside it.
    """
    if host:
        refuse_given(
            ("streaming", "kernels", "opencl_device", "out", "quick", "over", "runner"),
            "with --host; run the command twice, or omit it",
        )
        _profile_host()
        return
    if over is not None or runner is not None:
        _profile_over(device, over, runner, opencl_device, out, quick, kernels=kernels, streaming=streaming)
        return
    if streaming and kernels:
        raise InputError("--streaming and --kernels are given; expected one of them: run the command twice")
    if kernels:
        _profile_kernels(out, opencl_device, quick)
        return
    if streaming:
        _profile_streaming(out, opencl_device, quick)
        return
    refuse_given(("opencl_device", "out"), "without --streaming or --kernels; add one of them, or omit it")
    from torchedge.cli.fitting import print_fit
    from torchedge.devices import LOCAL_DEVICE, find_device
    from torchedge.profiling.campaigns.plans import read_plan
    from torchedge.profiling.device_fits import fit_document
    from torchedge.profiling.local_cpu import PROBES, fit_machine, measure_local_cpu, measure_networks

    if device not in (LOCAL_DEVICE, *find_device(LOCAL_DEVICE).aliases):
        raise DeviceError(
            f"device is {device[:60]!r}; expected {LOCAL_DEVICE}: measure others with "
            "`torchedge campaign run NAME --plan PLAN --over WAY`"
        )
    with Progress(len(PROBES), "measuring") as progress:
        measured = measure_local_cpu(progress.begin)
    result = None
    try:
        with _Bars() as bars, _kept():
            dataset = measure_networks(read_plan("minute" if quick else "processor"), bars, hurry=quick)
        with Progress(2, "fitting") as progress:
            result = fit_machine(dataset, progress)
    except (InputError, MissingExtraError) as error:
        warn(f"predictions of {LOCAL_DEVICE} stay assumed beside its measured figures: {error}")
    if result is None:
        answer(device_document(measured), lambda: print_device(measured))
        return
    document = {**device_document(result.device), "fit": fit_document(result)}
    answer(document, lambda: print_fit(result, None))


def _profile_over(
    name: str, over: str | None, runner: Path | None, opencl: str | None, out: Path | None, quick: bool,
    *, kernels: bool, streaming: bool,
) -> None:  # fmt: skip
    """Make the profile of a device without Python, or parts of it; print what to do next."""
    from torchedge.devices import LOCAL_DEVICE
    from torchedge.devices.device import NAME
    from torchedge.profiling.campaigns.transports import open_transport
    from torchedge.profiling.kernel_fitting import figures_of, fit_kernels
    from torchedge.profiling.kernel_measuring import RemoteBench
    from torchedge.profiling.load_fitting import fit_device_loads
    from torchedge.profiling.load_measuring import loads_measured
    from torchedge.profiling.profile_folders import write_profile
    from torchedge.profiling.remote_devices import ask_device, describe_there
    from torchedge.profiling.remote_loads import RemoteLoads
    from torchedge.profiling.remote_runs import RemoteRunner
    from torchedge.storage import cache_folder, user_folder

    for option, value in (("--over", over), ("--runner", runner)):
        if value is None:
            raise InputError(
                f"{option} is missing; expected both --over WAY and --runner FILE (docs/android.md)"
            )
    if name == LOCAL_DEVICE or not NAME.fullmatch(name):
        raise InputError(
            f"the device is called {name[:60]!r}; expected a name of its own in front of --over, as my-phone"
        )
    if out is not None and kernels == streaming:
        raise InputError("--out is given without one of --kernels and --streaming, whose rows it receives")
    assert over is not None and runner is not None
    folder = user_folder() / "profiles" / name
    parts = {"kernels": kernels, "loads": streaming}
    rows: dict[str, Path] = {}
    for kind in [kind for kind, wanted in parts.items() if wanted or kernels == streaming]:
        rows[kind] = out or user_folder() / kind / f"{name}{'-quick' * quick}.jsonl"
        _make(rows[kind].parent, "choose another --out")
    _make(folder)
    transport = open_transport(over, None, cache_folder() / "device")
    command = f"torchedge profile {name} --over {over}"
    with RemoteRunner(transport, runner, opencl or "") as remote, _kept():
        there = ask_device(remote)
        device = describe_there(folder, name, there, command)
        if "kernels" in rows:
            _measure_kernels(RemoteBench(remote, there), rows["kernels"], quick, command=command)
            part = figures_of(fit_kernels(rows["kernels"], device, folder), device)
            device = write_profile(folder, device, {}, kernels=part)
        if "loads" in rows:
            loads = RemoteLoads(remote, there, device)
            environment, tasks = loads.environment(command, quick), list(loads.tasks(quick))
            with Progress(len(tasks), "measuring loads") as progress:
                loads_measured(rows["loads"], environment, tasks, progress.begin)
            part = fit_device_loads(rows["loads"], device, folder)
            device = write_profile(folder, device, {}, loading=part)
    following = f"torchedge campaign run {name} --plan quick --over {over} --runner {runner} --out {name}" + (
        f" --opencl {opencl!r}" if opencl else ""
    )

    def show() -> None:
        print_device(device)
        for kind, file in rows.items():
            print_wrapped(f"{kind}: rows in {file}")
        print_next(following)

    paths = {kind: str(file) for kind, file in rows.items()}
    answer({**device_document(device), "rows": paths, "next": following}, show)


def _profile_host() -> None:
    import torch

    from torchedge.profiling.hosts import ASSUMED_LAUNCHES, measure_host

    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = measure_host(device)
    operator = times["operator"]

    def show() -> None:
        print_table(
            ["of the host, on " + device, "us", "operators", "predicted"],
            [
                [unit, f"{us:.1f}", f"{us / operator:.1f}", f"{ASSUMED_LAUNCHES.get(unit, '')}"]
                for unit, us in times.items()
            ],
        )
        print_next(f"torchedge predict MODEL --device GPU --operator-us {operator:.1f}")

    answer({"device": device, "us": times}, show)


def _make(folder: Path, remedy: str = "set TORCHEDGE_HOME to a folder that can be written") -> None:
    from torchedge.storage.documents import writing

    with writing(folder, remedy):
        folder.mkdir(parents=True, exist_ok=True)


def _measure_kernels(bench: BenchDevice, rows: Path, quick: bool, **command: str) -> None:
    from torchedge.profiling.kernel_cases import cases
    from torchedge.profiling.kernel_measuring import measure_kernels

    with Progress(2 * sum(1 for _ in cases(bench.traits, quick=quick)), "measuring kernels") as progress:
        measure_kernels(rows, bench, quick=quick, step=progress.begin, **command)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Say after an interrupt that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        warn("measurements are kept: the same command continues from here")
        raise


def _profile_streaming(out: Path | None, device: str | None, quick: bool) -> None:
    from torchedge.profiling.load_fitting import read_loads
    from torchedge.profiling.load_measuring import count_rows, measure_loads

    if out is None:
        raise InputError("--streaming needs --out FILE; expected a file for the rows, as loads.jsonl")
    with Progress(count_rows(quick=quick), "measuring") as progress:
        new = measure_loads(out, device, quick=quick, step=progress.begin)
    table = read_loads(out)
    way = min(table.ways, key=lambda name: table.ways[name], default="copy")
    document = {
        "file": str(out), "device": table.environment["device"], "new_rows": new,
        "kernels": len(table.cases), "points": table.points, "way": way,
        "copy_gb_s": table.copy_gb_s, "disk_gb_s": table.disk_gb_s, "launch_us": table.launch_us,
    }  # fmt: skip

    def show() -> None:
        print_wrapped(
            f"{document['device']}: {document['kernels']} kernels, {table.points} points; copies "
            f"{table.copy_gb_s or 0:.2f} GB/s, disk {table.disk_gb_s or 0:.2f} GB/s, launch "
            f"{table.launch_us or 0:.0f} us; fastest way to load beside kernels: {way}"
        )
        print_wrapped(f"rows in {out}; next: torchedge fit loads {out} --device DEVICE --out FOLDER")

    answer(document, show)


def _profile_kernels(out: Path | None, device: str | None, quick: bool) -> None:
    from torchedge.cli.fitting import print_kernels
    from torchedge.devices import LOCAL_DEVICE, find_device, match_device
    from torchedge.profiling.kernel_fitting import fit_kernels
    from torchedge.profiling.kernel_measuring import OpenCLBench
    from torchedge.profiling.profile_folders import write_profile
    from torchedge.storage import user_folder

    bench = OpenCLBench(device)
    known = find_device(LOCAL_DEVICE) if bench.traits.kind == "cpu" else match_device(bench.traits.name)
    if known is None and out is None:
        raise InputError(
            f"{bench.traits.name} has no profile; give --out FILE for the rows, then fit them with "
            "`torchedge fit kernels FILE --device FOLDER --out FOLDER`, FOLDER holding its device.toml"
        )
    folder = user_folder() / "profiles" / (known.name if known else "")
    rows = out or folder.parent.parent / "kernels" / f"{folder.name}{'-quick' * quick}.jsonl"
    _make(rows.parent, "choose another --out")
    _measure_kernels(bench, rows, quick)
    if known is None:
        print_wrapped(f"rows in {rows}; next: torchedge fit kernels {rows} --device FOLDER --out FOLDER")
        return
    _make(folder.parent)
    written = write_profile(folder, known, {}, kernels=fit_kernels(rows, known, folder))
    print_kernels(written, f"rows in {rows}; profile in {folder}")


# campaigns --------------------------------------------------------------------------------------------------


@click.group("campaign", cls=Group)
def campaign() -> None:
    """Measure a device, point by point, until its plan is done.

    A campaign measures training and inference of a plan's networks, on this machine or on a device over ssh
    or adb. The tables in its folder are what `torchedge fit` reads.
    """


@campaign.command(
    "show",
    cls=Command,
    examples=["torchedge campaign show quick", "torchedge campaign show plan.toml --json"],
)
@click.argument("plan")
def _show(plan: str) -> None:
    """Print a plan and its size; measure nothing.

    PLAN is minute, quick (40 points), small, standard (the grid of the perf4sight paper) or a TOML file.
    """
    from torchedge.profiling.campaigns.plans import read_plan

    read = read_plan(plan)
    items = read.items()
    points = sum(len(item.points) for item in items)
    text = f"{read.text.rstrip()}\n# {len(items)} networks, {points} points"
    answer({"plan": read.text, "networks": len(items), "points": points}, lambda: print(text))


def _convolutions(text: str) -> int:
    """Return a number of convolutions to measure, or 0."""
    from torchedge.profiling.campaigns.convolutions import LEAST, MOST

    number: int = whole(0).make(text)
    if number and not LEAST <= number <= MOST:
        raise InputError(f"{number} is not 0 or from {LEAST} to {MOST}")
    return number


@campaign.command(
    "run",
    cls=Command,
    examples=[
        "torchedge campaign run my-orin --plan standard --over ssh://my-orin",
        "torchedge campaign run my-phone --plan quick --over adb --python /data/python/bin/python3",
        "torchedge campaign run my-orin --plan standard --over ssh://my-orin --retry-failed",
    ],
)
@click.argument("device", metavar="NAME")
@click.option(
    "--plan",
    required=True,
    help="Plan: quick (40 points), small (280), standard (the paper's grid) or a TOML file.",
)
@click.option(
    "--over",
    metavar="WAY",
    default="local",
    help="Way to the device: local, ssh://[user@]host[:port], adb or adb:SERIAL.",
)
@click.option("--out", "-o", type=PATH, metavar="FOLDER", help="Dataset folder. [default: in your own]")
@click.option("--python", metavar="PATH", help="Python with PyTorch on the device.")
@click.option(
    "--processor", type=Choice(["cuda", "cpu"]), help="What to measure. [default: cuda where it works]"
)
@click.option(
    "--convolutions",
    type=TextType("N", _convolutions),
    default=0,
    help="On CUDA, also measure the workspaces of N convolutions like the plan's, as 20000.",
)
@click.option(
    "--runner",
    type=PATH,
    metavar="FILE",
    help="For a device without Python: torchedge-run, built for it. Points run there as bundles.",
)
@click.option(
    "--opencl",
    metavar="TEXT",
    help="With --runner: part of an OpenCL device's name. [default: the first GPU]",
)
@click.option("--retry-failed", is_flag=True, help="Measure failed points again.")
@click.option("--retry-unsteady", is_flag=True, help="Measure points whose steps differ much again.")
@click.option("--tables-only", is_flag=True, help="Write the tables; measure nothing.")
def _run(device: str, plan: str, over: str, out: Path | None, **given: Any) -> None:  # noqa: ANN401 - the other options
    """Measure a plan's networks on a device, called NAME from now on.

    Interrupt it, kill it or unplug the device at any moment: the same command continues with what is left.
    """
    from torchedge.devices.device import NAME
    from torchedge.profiling.campaigns.plans import read_plan
    from torchedge.profiling.campaigns.running import Campaign, run_campaign
    from torchedge.profiling.campaigns.transports import open_transport
    from torchedge.storage import user_folder

    if given["runner"] is None:
        refuse_given(("opencl",), "without --runner, which measures OpenCL devices; add it, or omit it")
    if not NAME.fullmatch(device):
        raise InputError(f"the name is {device[:60]!r}; expected lower case letters, digits, '-' and '.'")
    chosen = read_plan(plan)
    folder = out or user_folder() / "campaigns" / device
    retry = tuple([kind for kind in ("failed", "unsteady") if given[f"retry_{kind}"]])
    transport = open_transport(over, given["python"], folder / "device")
    job = Campaign(
        folder, chosen, device, over, given["processor"] or "", retry, given["convolutions"],
        runner=given["runner"], opencl=given["opencl"] or "",
    )  # fmt: skip
    with _Bars() as bars, _kept():
        summary = run_campaign(job, None if given["tables_only"] else transport, bars)
    keys = ("points", "measured", "out_of_memory", "unsteady", "left", "failed", "skipped")
    document = {"device": device, "folder": str(folder)} | {key: getattr(summary, key) for key in keys}
    answer(document, lambda: _print(summary, device, folder))


def _print(summary: Summary, device: str, folder: Path) -> None:
    environment = summary.environment or {}
    if environment:
        title = environment.get("device_name") or "unknown"
        what = "torch {torch}" if "torch" in environment else "driver {driver}"
        print_wrapped(
            f"{device}: {title}, {what.format(**environment)}; memory by {environment.get('memory_meter')}"
        )
    print_wrapped(
        f"{summary.points} points: {summary.measured} measured, {summary.out_of_memory} out of memory, "
        f"{len(summary.failed)} failed, {summary.left} left"
    )
    for kind, reasons in (("failed", summary.failed), ("skipped", summary.skipped)):
        for reason, count in Counter(reasons.values()).most_common(_SHOWN):
            name = next(key for key, value in reasons.items() if value == reason)
            more = f" and {count - 1} more" if count > 1 else ""
            print_wrapped(f"{kind}: {name}{more}: {reason}", rest="  ")
    if summary.failed:
        print("measure failed points again with --retry-failed")
    if summary.unsteady:
        print_wrapped(
            f"unsteady: the steps of {summary.unsteady} points differ by over half, as on a machine that "
            "does other work or lowers its clock; measure them again with --retry-unsteady"
        )
    print_wrapped(f"tables in {folder}")
    if not summary.fittable:
        print_wrapped(
            "too few points for a fit: run the same command with a larger plan, which keeps these, or adapt "
            "the profile of a measured device with `torchedge fit all --base`"
        )
    elif summary.measured and not summary.left:
        print_next(f"torchedge fit all {folder} --device {device}")


class _Bars(contextlib.ExitStack):
    """Shows a campaign's progress: one bar after another."""

    _progress: Progress

    def begin(self, label: str, total: int, done: int) -> None:
        """Show another bar."""
        self.close()
        self._progress = self.enter_context(Progress(total, label, done=done, remaining=True))

    def doing(self, stage: str) -> None:
        """Show the current network or point."""
        self._progress.note(stage)

    def step(self) -> None:
        """Count a network or point."""
        self._progress.step()

    def note(self, text: str) -> None:
        """Write a line of its own."""
        warn(text)
