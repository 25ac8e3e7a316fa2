"""From nothing to predictions for a device of your own: measure it, fit it, see how well that went, predict.

    python examples/fit_my_device.py FOLDER                                        # this machine's processor
    python examples/fit_my_device.py FOLDER --over ssh://my-orin --processor cuda  # a board

The commands are printed as they run. Few points are measured, so the profile of another device (--base) is
adapted to them; with hundreds of points leave --base out and fit from nothing.
Needs `pip install 'torchedge[vision,fit,plots]'`.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

PLAN = """\
# Small networks on small images: enough to see every step at work in a minute.
# Your own plan: more networks, the batch sizes and the image size you train with.
networks = ["resnet18", "squeezenet1_1"]
levels = [0, 50]
strategies = ["random"]
input_size = [3, 64, 64]
train_batch_sizes = [2, 8]
infer_batch_sizes = [2]
"""


def torchedge(*words: str | Path) -> None:
    """Run a command as a shell would, after printing it; end the program where it fails."""
    print("\n$ torchedge", shlex.join(map(str, words)), flush=True)
    ended = subprocess.run([sys.executable, "-m", "torchedge", *map(str, words)], check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="new folder for the measurements, the profile and the picture"
    )
    parser.add_argument("--name", default="my-device", help="what to call the device")
    parser.add_argument("--over", default="local", help="local (default), ssh://HOST or adb")
    parser.add_argument("--processor", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--base", default="jetson-tx2", help="measured device whose profile is adapted")
    parser.add_argument("--points", default="6", help="points of each mode to adapt to, or all")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    plan, measured, profile = folder / "plan.toml", folder / arguments.name, folder / "profile"
    plan.write_text(PLAN, encoding="utf-8")

    # 1. Measure. Stop it whenever you like: the same command goes on with what is left.
    where = ("--over", arguments.over, "--processor", arguments.processor)
    torchedge("campaign", "run", arguments.name, "--plan", plan, *where, "--out", measured)

    # 2. Adapt the base to a few of the points; it is tested on the others.
    few = ("--base", arguments.base, "--points", arguments.points)
    torchedge("fit", "all", measured, *few, "--device", arguments.name, "--out", profile, "--force")

    # 3. Predicted against measured, as a table and a picture.
    compared = ("--device", profile, "--protocol", "profile")
    torchedge("accuracy", measured, *compared, "--out", folder / "accuracy.png")

    # 4. What a network that was never measured takes from this device.
    torchedge("predict", "resnet34", "--input-size", "3x64x64", "-b", "1,4,8", "--device", profile)


if __name__ == "__main__":
    main()
