"""`torchedge simulate`: the memory of one step, tensor by tensor, and when it peaks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchedge.cli.arguments import MODEL_HELP, add_json, add_model, add_step, whole
from torchedge.cli.output import number, print_json
from torchedge.cli.writing import check_plot, save_figure

if TYPE_CHECKING:
    from torchedge.prediction.memory.simulation import MemoryProfile

NAME = "simulate"
SUMMARY = "when a step's memory peaks, and which tensors make it"
DESCRIPTION = f"""\
Simulate the memory of one step tensor by tensor and replay PyTorch's caching
allocator; nothing is fitted. With --device its framework's behaviour is
simulated, else today's PyTorch on CUDA.

{MODEL_HELP}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--batch-size", "-b", type=whole, default=1, metavar="N", help="default 1")
    parser.add_argument("--device", "-d", help="whose framework to simulate; see `torchedge devices`")
    add_model(parser)
    add_step(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw memory over the step (.png, .pdf or .svg)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print."""
    from torchedge.api import simulate
    from torchedge.cli.loading import capture_named

    if arguments.plot is not None:
        check_plot(arguments.plot)
    batch = arguments.batch_size
    (graph,) = capture_named(
        arguments.model, mode=arguments.mode, input_size=arguments.input_size, batch_sizes=[batch]
    )
    profile = simulate(
        graph,
        batch,
        device=arguments.device,
        optimizer=arguments.optimizer,
        amp=arguments.amp,
        accumulation=arguments.accumulation,
    )
    if arguments.json:
        print_json(_document(profile))
    else:
        _print(profile)
    if arguments.plot is not None:
        _draw(profile, arguments.plot)
        if not arguments.json:
            print(f"drawn to {arguments.plot}")
    return 0


def _document(profile: MemoryProfile) -> dict[str, object]:
    return {
        "model": profile.name,
        "batch_size": profile.batch_size,
        "optimizer": profile.settings.optimizer,
        "amp": profile.settings.amp,
        "accumulation": profile.settings.accumulation,
        "allocated_mib": profile.allocated_mib,
        "reserved_mib": profile.reserved_mib,
        "live_mib": profile.live_mib,
        "peak": {"phase": profile.peak.phase, "kind": profile.peak.kind, "scope": profile.peak.scope},
        "breakdown": dict(profile.breakdown),
        "largest": [{"tensor": label, "mib": mib} for label, mib in profile.largest],
        "unsupported": list(profile.unsupported),
    }


def _print(profile: MemoryProfile) -> None:
    amp = f", amp {profile.settings.amp}" if profile.settings.amp else ""
    step = f"batch {profile.batch_size}, {profile.settings.optimizer}{amp}"
    print(f"{profile.name}, {step}: simulated, nothing fitted")
    print()
    print(f"allocated peak {number(profile.allocated_mib):>10} MiB")
    print(f"reserved peak  {number(profile.reserved_mib):>10} MiB")
    print(f"live tensors   {number(profile.live_mib):>10} MiB at most, in {profile.peak}")
    for name, mib in profile.breakdown.items():
        if mib >= 0.05:
            print(f"  {name.replace('_', ' '):<18} {number(mib):>10} MiB")
    print()
    print("largest tensors then")
    for label, mib in profile.largest:
        print(f"  {number(mib):>8} MiB  {label}")
    for kind in profile.unsupported:
        print(f"not known, taken to keep what it reads: {kind}")


def _draw(profile: MemoryProfile, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from torchedge.prediction.memory.plotting import draw_timeline

    figure = draw_timeline(profile).figure
    try:
        save_figure(figure, path, dpi=150)
    finally:
        pyplot.close(figure)
