"""Measure a profile over a fake phone alone, and compare its predictions of other networks with runs there.

    make runner && python benchmarks/phone_profile.py --runner build/runner/torchedge-run --out phone

The phone is a folder behind the tests' program that stands for adb; this machine's OpenCL device runs there.
`torchedge campaign run phone --over adb --runner FILE` measures the networks of one plan, `torchedge fit all`
fits the profile, and the same command measures networks of another plan, whose bundles are predicted from
the profile before. The columns, predicted and measured: time of a step (Φ), the sum of its launches' times
(each the shortest of five), ms; memory of the process (Γ), MiB; errors in %. What else the machine does makes
steps longer, and the shortest launches hardly. With --rounds N the other networks are measured N times and
medians count. --small: few networks on images of 32 px, for a processor.
--real runs the real adb instead. A command that was interrupted continues.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from pathlib import Path

from harness import CHECKOUT, options_of, print_rows

from torchedge.cli import main as torchedge
from torchedge.devices import Device, find_device
from torchedge.profiling.campaigns.expansion import read_jobs
from torchedge.profiling.campaigns.exported import export_point
from torchedge.profiling.campaigns.recording import CampaignJournal
from torchedge.profiling.remote_runs import scratch_bundle

KNOWN = (
    *("resnet18", "mobilenet_v2", "squeezenet1_1", "mnasnet1_0", "shufflenet_v2_x1_0", "efficientnet_b0"),
    "vgg11",
)
OTHER = (
    *("resnet34", "regnet_y_400mf", "mobilenet_v3_small", "densenet121", "alexnet", "googlenet"),
    "mnasnet0_5",
)
MOBILE = '{{name = "mobilenet_v2", label = "{0}", kwargs = {{num_classes = 10, {1}}}}}'
VIT = (
    '{{name = "timm:vit_tiny_patch16_224", label = "{0}", '
    "kwargs = {{num_classes = 10, img_size = 32, patch_size = 8, {1}}}}}"
)
RESNET = '{{name = "timm:{1}", label = "{0}", kwargs = {{num_classes = 10, {2}}}}}'
SMALL_KNOWN = (
    MOBILE.format("mobile-a", "width_mult = 0.5, inverted_residual_setting = [[2, 16, 1, 2]]"),
    MOBILE.format("mobile-b", "inverted_residual_setting = [[1, 16, 1, 1], [3, 24, 1, 2]]"),
    VIT.format("vit-a", "depth = 1, embed_dim = 48, num_heads = 3"),
    RESNET.format("resnet-a", "resnet18", "layers = [1, 1, 1, 1], channels = [16, 24, 32, 48]"),
)
SMALL_OTHER = (
    MOBILE.format(
        "mobile-c", "width_mult = 0.75, inverted_residual_setting = [[4, 16, 1, 2], [2, 32, 1, 2]]"
    ),
    MOBILE.format("mobile-d", "width_mult = 0.35, inverted_residual_setting = [[6, 16, 1, 1]]"),
    VIT.format("vit-b", "depth = 2, embed_dim = 64, num_heads = 2"),
    RESNET.format("resnet-b", "resnet18", "layers = [1, 2, 1, 1], channels = [12, 16, 40, 64]"),
    RESNET.format("resnet-c", "resnet50", "layers = [1, 1, 1, 1], channels = [8, 12, 16, 24]"),
    '{name = "squeezenet1_1", kwargs = {num_classes = 10}}',
)


def plan(networks: tuple[str, ...], batch_sizes: list[int], side: int) -> str:
    """Return the plan of training steps of networks."""
    kwargs = {"googlenet": "kwargs = {aux_logits = false, init_weights = false}"}
    items = [
        name
        if name.startswith("{")
        else f'{{name = "{name}"{", " + kwargs[name] if name in kwargs else ""}}}'
        for name in networks
    ]
    return (
        f"levels = [0]\ntrain_batch_sizes = {batch_sizes}\ninput_size = [3, {side}, {side}]\n"
        f'optimizer = "sgd-momentum"\nnetworks = [{", ".join(items)}]\n'
    )


def run(*words: object) -> None:
    """Run a command of torchedge; end where it fails."""
    print("$ torchedge", shlex.join(map(str, words)), flush=True)
    if status := torchedge([*map(str, words)]):
        sys.exit(status)


def pretend(folder: Path, priority: int) -> None:
    """Put the program that stands for adb onto PATH; the phone is a folder, with a niceness."""
    places = folder / "bin"
    places.mkdir(parents=True, exist_ok=True)
    fake = CHECKOUT / "tests" / "oracles" / "fake_adb.py"
    (places / "adb").write_text(
        f'#!/bin/sh\nexec nice -n {priority} {shlex.quote(sys.executable)} {shlex.quote(str(fake))} "$@"\n'
    )
    (places / "adb").chmod(0o700)
    os.environ["PATH"] = f"{places.resolve()}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"FAKE_LOG": str(folder.resolve() / "log"), "FAKE_HOME": str(folder.resolve() / "phone")}


def measured(folder: Path) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Return latency, the sum of launches (ms) and memory (MiB) of the points of a campaign that fit."""
    with CampaignJournal(folder) as journal:
        rows = {point: journal.row_at(place) for point, place in journal.done.items()}
    return {
        (job, batch): (
            row["latency_ms"],
            sum(launch[-1] for launch in row["launches"]["launches"]),
            row["memory_mib"],
        )
        for (job, _, batch), row in rows.items()
        if row["fits"]
    }


def compare(folders: list[Path], device: Device) -> None:
    """Print predictions beside the medians of rounds."""
    rounds = [measured(folder) for folder in folders]
    errors: list[tuple[float, ...]] = []

    def lines():  # noqa: ANN202 - rows of a table
        for job in read_jobs(folders[0]):
            for batch in sorted({size for name, size in rounds[0] if name == job["id"]}):
                with scratch_bundle() as folder:
                    predicted = export_point(job, "train", batch, device, folder).predict(device)
                values = [known[job["id"], batch] for known in rounds if (job["id"], batch) in known]
                medians = [statistics.median(column) for column in zip(*values, strict=True)]
                guesses = predicted.latency.value, sum(predicted.launches_ms), predicted.memory.value
                errors.append(tuple([100 * (a / b - 1) for a, b in zip(guesses, medians, strict=True)]))
                parts = zip(guesses, medians, errors[-1], strict=True)
                yield [job["network"], batch, *(f"{value:.4g}" for part in parts for value in part)]

    figures = ("Φ", "launches", "Γ")
    columns = [word for figure in figures for word in (f"{figure} predicted", "measured", "error")]
    print_rows(["network", "batch", *columns], lines())
    for name, column in zip(figures, zip(*errors, strict=True), strict=True):
        sizes = [abs(error) for error in column]
        print(f"{name}: mean error {statistics.mean(sizes):.1f} %, largest {max(sizes):.1f} %")


def main() -> None:
    """Measure, fit, measure others, compare."""
    options = options_of(__doc__, rounds=1)
    options.add_argument("--runner", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--opencl", default="", help="part of the OpenCL device's name")
    options.add_argument("--small", action="store_true")
    options.add_argument("--nice", type=int, default=0, help="niceness of the fake phone; below 0 needs root")
    options.add_argument("--real", action="store_true")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not chosen.real:
        pretend(chosen.out, chosen.nice)
    known, other = (SMALL_KNOWN, SMALL_OTHER) if chosen.small else (KNOWN, OTHER)
    side, batches = (32, ([4, 8, 32], [6])) if chosen.small else (64, ([2, 8, 16], [4, 12]))
    device = ["--opencl", chosen.opencl] if chosen.opencl else []
    words = ["--over", "adb", "--runner", chosen.runner, *device]
    folders = [chosen.out / "known", *(chosen.out / f"other-{number}" for number in range(chosen.rounds))]
    for folder in folders:
        text = chosen.out / f"{folder.name}.toml"
        first = folder is folders[0]
        text.write_text(plan(known if first else other, batches[0 if first else 1], side))
        run("campaign", "run", "phone", "--plan", text, *words, "--out", folder)
    profile = chosen.out / "profile"
    run("fit", "all", folders[0], "--device", folders[0], "--out", profile, "--no-accuracy", "--force")
    compare(folders[1:], find_device(profile))


if __name__ == "__main__":
    main()
