"""A random search over widths and depths that only looks at networks a Jetson TX2 can train.

    python examples/search_widths.py --tries 40 --memory 3072 --latency 1200

No network is run, and none takes memory: weights are on the meta device. What the search maximises is the
number of parameters, in place of the score that your search would learn or measure.
"""

import argparse
import random
from dataclasses import dataclass

import torch
from torch import nn

import torchedge

INPUT_SIZE = (3, 224, 224)


@dataclass(frozen=True)
class Choice:
    """Channels and number of residual blocks of each stage."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        straight = before == width and stride == 1
        self.short = nn.Identity() if straight else nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def network(choice: Choice) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, choice.widths[0], 3, stride=2, padding=1, bias=False)]
    before = choice.widths[0]
    for width, depth in zip(choice.widths, choice.depths, strict=True):
        for block in range(depth):
            layers.append(Block(before, width, stride=2 if block == 0 else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100))


def drawn(randomness: random.Random) -> Choice:
    widths = sorted(randomness.randrange(16, 513, 16) for _ in range(4))  # multiples of 16 suit the hardware
    return Choice(tuple(widths), tuple(randomness.randint(1, 4) for _ in range(4)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="jetson-tx2")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--memory", type=float, default=3072, metavar="MIB", help="default 3072")
    parser.add_argument("--latency", type=float, default=1200, metavar="MS", help="default 1200")
    parser.add_argument("--tries", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    predictor = torchedge.Predictor(arguments.device)  # the profile is loaded once
    randomness = random.Random(arguments.seed)
    best: tuple[int, Choice, torchedge.Prediction] | None = None
    too_large = too_slow = 0
    for _ in range(arguments.tries):
        choice = drawn(randomness)
        with torch.device("meta"):
            model = network(choice)
        found = predictor.predict(model, arguments.batch_size, input_size=INPUT_SIZE)
        if not found.fits(arguments.memory):
            too_large += 1
        elif found.latency.high > arguments.latency:  # the upper end of the interval, to be on the safe side
            too_slow += 1
        else:
            score = sum(parameter.numel() for parameter in model.parameters())
            if best is None or score > best[0]:
                best = score, choice, found

    print(f"{arguments.tries} networks: {too_large} too large, {too_slow} too slow")
    if best is None:
        print("none is within the limits; allow more memory or time")
        return
    score, choice, found = best
    print(f"best: widths {choice.widths}, depths {choice.depths}, {score:,} parameters")
    print(f"  training memory {found.memory}")
    print(f"  one step of batch {arguments.batch_size} {found.latency}")


if __name__ == "__main__":
    main()
