"""From nothing to predictions for a device of your own: measure it, fit it, see how well that went, predict.

    python examples/fit_my_device.py FOLDER                                        # this machine's processor
    python examples/fit_my_device.py FOLDER --over ssh://my-orin --processor cuda  # a board

The commands are printed as they run. With --base the profile of another device is adapted to the points.
Needs `pip install 'torchedge[vision,fit,plots]'`.
"""

import argparse
import shlex
import sys
from pathlib import Path

import torchedge
from torchedge.cli import main

PLAN = """\
# Small networks on small images: enough to see every step at work in a minute.
# Your own plan: more networks, the batch sizes and the image size you train with.
networks = ["resnet18", "squeezenet1_1", "mobilenet_v2"]
levels = [0, 50]
strategies = ["random"]
input_size = [3, 64, 64]
train_batch_sizes = [2, 8]
infer_batch_sizes = [2, 8]
"""


def run(*words: str | Path) -> None:
    """Run a command as a shell would, after printing it; end the program where it fails."""
    print("\n$ torchedge", shlex.join(map(str, words)), flush=True)
    status = main([str(word) for word in words])
    if status:
        sys.exit(status)


def fit_my_device() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="new folder for the measurements, the profile and the picture"
    )
    parser.add_argument("--name", default="my-device", help="what to call the device")
    parser.add_argument("--over", default="local", help="local (default), ssh://HOST or adb")
    parser.add_argument("--processor", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--base", help="measured device whose profile is adapted to few points")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    plan, measured, profile = folder / "plan.toml", folder / arguments.name, folder / "profile"
    plan.write_text(PLAN, encoding="utf-8")

    # 1. Measure. Stop it whenever you like: the same command goes on with what is left.
    where = ("--over", arguments.over, "--processor", arguments.processor)
    run("campaign", "run", arguments.name, "--plan", plan, *where, "--out", measured)

    # 2. Fit. Every figure has a verdict, by its error on networks that the fit has not seen.
    fit = torchedge.fit(measured, arguments.name, profile, base=arguments.base, force=True)
    print()
    for figure in fit.figures:
        print(f"{figure.name}: {figure.verdict}, errs by {figure.error:.0f} % on what it has not seen")
    for line in (*fit.missing, *fit.advice):
        print(line)

    # 3. Predicted against measured, as a table and a picture.
    compared = ("--device", profile, "--protocol", "profile")
    run("accuracy", measured, *compared, "--out", folder / "accuracy.png")

    # 4. What a network that was never measured takes from this device.
    run("predict", "resnet34", "--input-size", "3x64x64", "-b", "1,4,8", "--device", profile)


if __name__ == "__main__":
    fit_my_device()
