"""How far lowered training steps are from PyTorch in float64, and whether they repeat bit by bit.

    python benchmarks/lowering_accuracy.py [--device N] [--steps 50] [--seed 1] [MODEL ...]

For each network: every gradient of the first step, every weight after it, the losses of 50 steps (SGD with
momentum on one batch), and a second run of those steps from the start. Told are the largest norm-wise
relative errors (of the losses: the largest difference over the largest loss), and those of PyTorch's own
float32. A gradient that is zero but for rounding (a bias before a batch norm) is held against the largest.
A rectifier whose input lies within rounding of zero lets its gradient through in one precision and not in the
other: a step that meets one shows errors near 1e-3, in ours or in PyTorch's float32. MobileNetV2 always does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from harness import options_of, print_rows
from oracles.step_networks import FSRCNN, without_dropout
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import target_for
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step
from torchedge.tracing.vision import import_torchvision

RATE, MOMENTUM = 0.01, 0.9
VANISHING = 1e-9
"""Of the largest gradient: what is smaller is zero but for rounding."""

Arrays = Mapping[str, np.ndarray]
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A network, its loss and one batch."""

    make: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[], Batch]


@dataclass(frozen=True)
class Run:
    """What a side found; `final` are the bytes of all weights at the end."""

    losses: np.ndarray
    gradients: Arrays
    weights: Arrays
    final: bytes = b""


def cases() -> dict[str, Case]:
    """Return the networks by name."""
    models = import_torchvision().models
    cross = nn.CrossEntropyLoss()

    def vit() -> nn.Module:  # the blocks of ViT-B/16, two of them, on smaller images
        return models.vision_transformer.VisionTransformer(
            image_size=64, patch_size=16, num_layers=2, num_heads=12, hidden_dim=768, mlp_dim=3072
        )

    def images(count: int = 8, size: int = 64) -> Batch:
        return torch.randn(count, 3, size, size), torch.randint(0, 1000, (count,))

    return {
        "mobilenet_v2": Case(lambda: without_dropout(models.mobilenet_v2()), cross, images),
        "resnet18": Case(models.resnet18, cross, lambda: images(2)),
        "fsrcnn": Case(FSRCNN, nn.MSELoss(), lambda: (torch.rand(4, 1, 24, 24), torch.rand(4, 1, 48, 48))),
        "vit": Case(vit, cross, images),
    }


def eager(model: nn.Module, case: Case, x: torch.Tensor, y: torch.Tensor, steps: int) -> Run:
    """Train with PyTorch, in the precision that the model has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses, gradients, weights = [], {}, {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
            weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return Run(np.array(losses), gradients, weights)


def lowered(
    model: nn.Module, case: Case, x: torch.Tensor, y: torch.Tensor, steps: int, name: str | None
) -> Run:
    """Train with the lowered step."""
    keep, device = frozenset(all_rules()), choose_device(name)
    captured = capture_step(model, x, loss=case.loss, targets=y, keep=keep)
    with Executor(lower(captured.step, target_for(device)), device) as executor:
        executor.load(captured.tensors)
        results = executor.run(x, y)
    values = [captured.step.values[i].name for i in captured.step.outputs]
    gradients = {n.removeprefix("gradient."): g for n, g in zip(values, results, strict=True) if n != "loss"}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    captured = capture_step(model, x, loss=case.loss, targets=y, optimizer=optimizer, keep=keep)
    losses, weights = [], {}
    with Executor(lower(captured.step, target_for(device)), device) as executor:
        executor.load(captured.tensors)
        for step in range(steps):
            losses.append(float(executor.run(x, y)[0]))
            if step == 0:
                weights = {n: executor.read(n) for n in gradients}
            if sys.stderr.isatty():
                print(f"\r  step {step + 1} of {steps} ", end="", file=sys.stderr)
        final = b"".join(executor.read(n).tobytes() for n in gradients)
    return Run(np.array(losses), gradients, weights, final)


def worst(found: Arrays, wanted: Arrays) -> float:
    """Return the largest norm of a difference over the norm of what is wanted."""
    norms = {n: float(np.linalg.norm(w)) for n, w in wanted.items()}
    largest = max(norms.values())
    return max(
        float(np.linalg.norm(found[n].astype(np.float64) - wanted[n]))
        / (norm if norm > VANISHING * largest else largest)
        for n, norm in norms.items()
    )


def drift(found: Run, wanted: Run) -> float:
    """Return the largest difference of losses over the largest loss."""
    return float(np.abs(found.losses - wanted.losses).max() / np.abs(wanted.losses).max())


def main() -> None:
    """Print the table."""
    known = cases()
    parser = options_of(__doc__, steps=50, seed=1)
    parser.add_argument("models", nargs="*", default=list(known), metavar="MODEL", help=", ".join(known))
    parser.add_argument("--device", help="OpenCL device: its number or a part of its name")
    given = parser.parse_args()
    if unknown := [name for name in given.models if name not in known]:
        raise SystemExit(f"model {unknown[0]!r} is not known; expected one of {', '.join(known)}")
    titles = (
        "network",
        "gradients",
        "weights",
        "losses",
        "same bits",
        "PyTorch float32: gradients",
        "losses",
    )
    print_rows(titles, [])
    for name in given.models:
        case = known[name]
        torch.manual_seed(given.seed)
        model = case.make().train()
        x, y = case.batch()
        double = y.double() if y.is_floating_point() else y
        wanted = eager(copy.deepcopy(model).double(), case, x.double(), double, given.steps)
        single = eager(copy.deepcopy(model), case, x, y, given.steps)
        found, again = (lowered(model, case, x, y, given.steps, given.device) for _ in range(2))
        ours = worst(found.gradients, wanted.gradients), worst(found.weights, wanted.weights)
        theirs = worst(single.gradients, wanted.gradients), drift(single, wanted)
        same = "yes" if found.final == again.final else "NO"
        ours, theirs = (
            [f"{error:.1e}" for error in each] for each in ((*ours, drift(found, wanted)), theirs)
        )
        print_rows([], [(name, *ours, same, *theirs)])


if __name__ == "__main__":
    main()
