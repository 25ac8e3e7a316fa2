"""Train a small network for handwritten digits through OpenCL, and again in PyTorch: the same curve.

    python examples/train_on_opencl.py                  # draws train_on_opencl.png
    python examples/train_on_opencl.py --way compile    # torch.compile and an ordinary loop instead
    python examples/train_on_opencl.py --device 1       # see `torchedge devices --opencl`

Needs an OpenCL device, for which PoCL makes the processor, scikit-learn for the images and matplotlib for the
picture: `pip install 'torchedge[opencl,fit,plots]'`.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import torchedge

Step = Callable[[torch.Tensor, torch.Tensor], float]


def small_cnn(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """1,437 images (1, 8, 8) from 0 to 1 with their labels to train on, and 360 to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    parts = train_test_split(images, torch.tensor(found.target), test_size=360, random_state=0)
    return (parts[0], parts[2]), (parts[1], parts[3])


def batches(data: tuple[torch.Tensor, torch.Tensor], size: int, steps: int) -> Iterator[list[torch.Tensor]]:
    """The same batches each time, epoch after epoch."""
    order = torch.Generator().manual_seed(1)
    while steps > 0:
        rows = torch.randperm(len(data[0]), generator=order).split(size)[: len(data[0]) // size]
        for chosen in rows[:steps]:
            yield [part[chosen] for part in data]
        steps -= len(rows)


def train(
    label: str, step: Step, data: tuple[torch.Tensor, torch.Tensor], size: int, steps: int
) -> list[float]:
    """Losses of every step; shows a bar where there is a terminal."""
    losses, began = [], time.perf_counter()
    for count, (images, labels) in enumerate(batches(data, size, steps), start=1):
        losses.append(step(images, labels))
        if sys.stderr.isatty():
            bar = "#" * (30 * count // steps)
            spent = f"{time.perf_counter() - began:.0f} s"
            print(f"\r{label:<8} [{bar:<30}] {count}/{steps}  {spent}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{label:<8} {steps} steps in {time.perf_counter() - began:.1f} s, last loss {losses[-1]:.4f}")
    return losses


def ordinary_step(call: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Percent of the images that the model tells."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(images).argmax(1) == labels).float().mean().item()


def draw(ours: list[float], theirs: list[float], path: Path) -> None:
    from matplotlib import pyplot

    figure, (curves, apart) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    curves.plot(theirs, color="#E69F00", linewidth=4, label="PyTorch")
    curves.plot(ours, color="#0072B2", linewidth=1, label="torchedge, OpenCL")
    curves.set(title="Loss of each step", xlabel="step", ylabel="cross-entropy", yscale="log")
    curves.legend(frameon=False)
    gaps = [max(abs(a - b), 1e-9) for a, b in zip(ours, theirs, strict=True)]
    apart.plot(gaps, ".", markersize=3, color="#009E73")
    apart.set(
        title="Difference between both", xlabel="step", ylabel="of the losses", yscale="log", ylim=(1e-9, 1)
    )
    for axes in (curves, apart):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e3e3e3", linewidth=0.6)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, nargs="?", default=Path("train_on_opencl.png"))
    parser.add_argument("--way", choices=("trainer", "compile"), default="trainer")
    parser.add_argument("--device", help="default: the first GPU, else the first device")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # for so small a network, threads wait for each other longer than they work
    training, test = digits()
    torch.manual_seed(0)
    model = small_cnn()
    eager = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, eager))
    size, steps = arguments.batch_size, arguments.steps

    if arguments.way == "trainer":
        example = [part[:size] for part in training]
        with torchedge.Trainer(
            model, *example, loss=F.cross_entropy, optimizer=optimizer, device=arguments.device
        ) as trainer:
            ours = train("OpenCL", trainer.step, training, size, steps)
            print(*trainer.report(), sep="\n")
    else:
        compiled = torch.compile(model, backend="torchedge", options={"device": arguments.device})
        ours = train("OpenCL", ordinary_step(compiled, optimizer), training, size, steps)
    theirs = train("PyTorch", ordinary_step(eager, plain), training, size, steps)

    found, wanted = accuracy(model, *test), accuracy(eager, *test)
    print(
        f"test accuracy: OpenCL {found:.2f} %, PyTorch {wanted:.2f} %, difference {abs(found - wanted):.2f}"
    )
    draw(ours, theirs, arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
