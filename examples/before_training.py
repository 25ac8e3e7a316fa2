"""A training script that asks before it trains: which batch size fits, and how long a step will take.

    python examples/before_training.py                   # this machine
    python examples/before_training.py --device jetson-tx2 --limit 2000
    python examples/before_training.py --limit 100       # refuses: nothing fits

Needs scikit-learn for its images of handwritten digits (`pip install 'torchedge[fit]'`).
"""

import argparse
import sys

import torch
from torch import nn

import torchedge


def small_cnn(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) from 0 to 1, and labels (1797,)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def chosen_batch_size(
    model: nn.Module, optimizer: torch.optim.Optimizer, wish: int, device: str | None, limit: float | None
) -> int:
    """The wished batch size, or the largest one that fits; ends the program where none does."""
    predictor = torchedge.Predictor(device)
    asked = predictor.predict(model, wish, input_size=(1, 8, 8), optimizer=optimizer)
    room = limit if limit is not None else asked.device_memory_mib
    batch_size = min(wish, asked.max_batch_size(limit))
    if batch_size == 0:
        least = predictor.predict(model, 1, input_size=(1, 8, 8), optimizer=optimizer)
        sys.exit(
            f"not started: one sample already asks for {least.needed_mib():,.0f} MiB on {least.device}, "
            f"{room:,.0f} MiB are allowed; choose a smaller model or a larger device"
        )
    taken = predictor.predict(model, batch_size, input_size=(1, 8, 8), optimizer=optimizer)
    print(f"batch size {batch_size} (asked for: {wish}) fits into {room:,.0f} MiB on {taken.device}")
    print(f"training memory {taken.memory}, one step {taken.latency}; provenance: {taken.provenance}")
    if taken.out_of_range:
        print(f"extrapolated: {len(taken.out_of_range)} features lie outside what was measured")
    return batch_size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", help="see `torchedge devices`; default: this machine")
    parser.add_argument("--limit", type=float, metavar="MIB", help="default: the device's memory")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch_size = chosen_batch_size(model, optimizer, arguments.batch_size, arguments.device, arguments.limit)

    images, labels = digits()
    for step in range(arguments.steps):
        rows = torch.randint(len(images), (batch_size,))
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, arguments.steps - 1):
            print(f"loss in step {step + 1}: {loss.item():.2f}")


if __name__ == "__main__":
    main()
