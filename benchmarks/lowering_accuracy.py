"""How far lowered training steps are from PyTorch in float64, and whether they repeat bit by bit.

For each network: every gradient of the first step, every weight after it, the loss curve of 50 steps, and a second
run of those steps from the start. Prints the largest norm-wise relative error of each kind, and beside it the error
of PyTorch's own float32. Run: python benchmarks/lowering_accuracy.py [--device N] [--steps 50] [MODEL ...]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.runtime.executors import Executor
from torchedge.tracing.training_steps import capture_step
from torchedge.tracing.vision import import_torchvision

RATE = 0.01


class Fsrcnn(nn.Module):
    """FSRCNN(56, 12, 4) for doubling the size: Dong et al., Accelerating the super-resolution CNN (ECCV 2016)."""

    def __init__(self) -> None:
        super().__init__()
        middle: list[nn.Module] = []
        for _ in range(4):
            middle += [nn.Conv2d(12, 12, 3, padding=1), nn.PReLU(12)]
        self.body = nn.Sequential(
            nn.Conv2d(1, 56, 5, padding=2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12), *middle,
            nn.Conv2d(12, 56, 1), nn.PReLU(56), nn.ConvTranspose2d(56, 1, 9, stride=2, padding=4, output_padding=1),
        )  # fmt: skip

    def forward(self, low: torch.Tensor) -> torch.Tensor:
        """Return images of twice the size."""
        return self.body(low)


@dataclass(frozen=True)
class Case:
    """A network, its loss and one batch."""

    make: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _images(count: int, size: int, classes: int = 1000) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randn(count, 3, size, size), torch.randint(0, classes, (count,)))


def _cases() -> dict[str, Case]:
    models = import_torchvision().models
    cross = nn.CrossEntropyLoss()
    vit = models.vision_transformer.VisionTransformer
    return {
        "mobilenet_v2": Case(lambda: _calm(models.mobilenet_v2()), cross, _images(4, 64)),
        "resnet18": Case(models.resnet18, cross, _images(4, 32)),
        "fsrcnn": Case(Fsrcnn, nn.MSELoss(), lambda: (torch.rand(4, 1, 24, 24), torch.rand(4, 1, 48, 48))),
        "vit": Case(  # the blocks of ViT-B/16, two of them, on smaller images
            lambda: vit(
                image_size=64, patch_size=16, num_layers=2, num_heads=12, hidden_dim=768, mlp_dim=3072
            ),
            cross,
            _images(4, 64),
        ),
    }


def _calm(model: nn.Module) -> nn.Module:
    """Return the model without dropout: eager PyTorch draws other random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def relative(found: object, wanted: object) -> float:
    """Return the norm of a difference over the norm of what is wanted."""
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def eager(model: nn.Module, case: Case, x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[str, object]:
    """Return losses, first gradients and first weights of PyTorch's own training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, gradients, weights = [], {}, {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model(x), y)
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return {"losses": np.array(losses), "gradients": gradients, "weights": weights}


def lowered(
    model: nn.Module, case: Case, x: torch.Tensor, y: torch.Tensor, steps: int, device: object
) -> dict[str, object]:
    """Return the same of the lowered step, and the bytes of all weights at the end."""
    keep = frozenset(all_rules())
    captured = capture_step(model, (x,), loss=case.loss, targets=(y,), keep=keep)
    values = captured.step.graph.values
    with Executor(lower(captured.step), device) as executor:
        executor.load({n: t.detach().numpy() for n, t in captured.tensors.items()})
        results = executor.run(x.numpy(), y.numpy())
    names = [values[i].name.removeprefix("gradient.") for i in captured.step.graph.outputs]
    gradients = {n: g for n, g in zip(names, results, strict=True) if n != "loss"}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    captured = capture_step(model, (x,), loss=case.loss, targets=(y,), optimizer=optimizer, keep=keep)
    losses, weights = [], {}
    with Executor(lower(captured.step), device) as executor:
        executor.load({n: t.detach().numpy() for n, t in captured.tensors.items()})
        for step in range(steps):
            losses.append(float(executor.run(x.numpy(), y.numpy())[0]))
            if step == 0:
                weights = {n: executor.read(n) for n in gradients}
            if sys.stderr.isatty():
                print(f"\r  step {step + 1} of {steps} ", end="", file=sys.stderr)
        final = b"".join(executor.read(n).tobytes() for n in gradients)
    return {"losses": np.array(losses), "gradients": gradients, "weights": weights, "final": final}


def _worst(found: dict[str, object], wanted: dict[str, object], kind: str) -> float:
    return max(relative(found[kind][n], w) for n, w in wanted[kind].items())  # type: ignore[index]


def main() -> None:
    """Print the table."""
    cases = _cases()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=list(cases), metavar="MODEL", help=f"of {', '.join(cases)}"
    )
    parser.add_argument("--device", default=None, help="OpenCL device: its number or a part of its name")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(
        f"{'network':14}{'gradients':>12}{'weights':>12}{'losses':>12}{'repeats':>9}   float32 PyTorch: gradients, losses"
    )
    for name in options.models:
        if name not in cases:
            raise SystemExit(f"model {name!r} is not known; expected one of {', '.join(cases)}")
        case = cases[name]
        torch.manual_seed(options.seed)
        model = case.make().train()
        x, y = case.batch()
        wanted = eager(
            copy.deepcopy(model).double(),
            case,
            x.double(),
            y.double() if y.is_floating_point() else y,
            options.steps,
        )
        single = eager(copy.deepcopy(model), case, x, y, options.steps)
        found = lowered(model, case, x, y, options.steps, options.device)
        again = lowered(model, case, x, y, options.steps, options.device)
        scale = np.abs(wanted["losses"]).max()  # type: ignore[call-overload]
        losses = [np.abs(run["losses"] - wanted["losses"]).max() / scale for run in (found, single)]  # type: ignore[operator]
        print(
            f"{name:14}{_worst(found, wanted, 'gradients'):12.1e}{_worst(found, wanted, 'weights'):12.1e}{losses[0]:12.1e}"
            f"{'yes' if found['final'] == again['final'] else 'NO':>9}   {_worst(single, wanted, 'gradients'):.1e}, {losses[1]:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
