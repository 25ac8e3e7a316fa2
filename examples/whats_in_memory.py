"""What fills the memory of a training step, when it peaks, and what other settings would change.

    python examples/whats_in_memory.py step.png --model resnet18 --batch-size 32

The plot needs matplotlib (`pip install 'torchedge[plots]'`), models by name need torchvision.
"""

import argparse
from pathlib import Path

import torchedge

SETTINGS = {
    "SGD": {"optimizer": "sgd"},
    "SGD with momentum": {"optimizer": "sgd-momentum"},
    "AdamW": {"optimizer": "adamw"},
    "AdamW, bfloat16 autocast": {"optimizer": "adamw", "amp": "bfloat16"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, help="file to draw to: .png, .pdf or .svg")
    parser.add_argument("--model", default="resnet18", help="what `torchedge predict` takes")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    arguments = parser.parse_args()

    profile = torchedge.simulate(arguments.model, arguments.batch_size)
    print(f"{profile.name}, batch {arguments.batch_size}: {profile.live_mib:,.1f} MiB at the peak")
    print(f"the peak is in {profile.peak}")
    for name, mib in profile.breakdown.items():
        print(f"  {name:<18} {mib:>9,.1f} MiB")
    print("largest tensors then")
    for label, mib in profile.largest[:5]:
        print(f"  {mib:>9,.1f} MiB  {label}")

    print("other settings                allocated   reserved")
    for words, settings in SETTINGS.items():
        other = torchedge.simulate(arguments.model, arguments.batch_size, **settings)
        print(f"  {words:<24} {other.allocated_mib:>8,.1f} MiB {other.reserved_mib:>6,.0f} MiB")

    profile.plot().savefig(arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
