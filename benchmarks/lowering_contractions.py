"""Time products and convolutions: torchedge's kernels beside PyTorch's, on a CPU or a GPU.

    python benchmarks/lowering_contractions.py  # PoCL beside PyTorch on the CPU
    python benchmarks/lowering_contractions.py --target gpu --size 4096 --batch 32  # beside CUDA

Matrix products in all four combinations of transposed operands, and the layers of ResNets: forward, gradient
of the input, gradient of the weight. torchedge: the kernels' own times on the first OpenCL device, parts and
their sum together, activations as they lie within a network. PyTorch: whole calls, NCHW or channels last,
whichever is faster. Both: the best of several runs. Every result is held against float64; the exit status is
1 where one is wrong.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from harness import options_of, print_rows, taken_ms
from oracles.targets import target_here

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.runtime import Executor
from torchedge.tracing.steps import CapturedStep, capture_step

LAYERS = (
    # channels, side, kernel, stride, output channels
    (3, 224, 7, 2, 64),
    (64, 56, 3, 1, 64),
    (128, 28, 3, 1, 128),
    (256, 14, 3, 1, 256),
    (512, 7, 3, 1, 512),
    (64, 56, 3, 2, 128),
    (64, 56, 1, 1, 256),
    (1024, 14, 1, 1, 256),
)
KINDS = {"forward": "convolution", "input": "deconvolution", "weight": "convolution_weight"}
"""What is timed, and what the kernels of it are called."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    """One line of the table: seconds of both sides and the relative error of ours."""

    title: str
    flops: float
    ours: float
    theirs: float
    error: float

    @property
    def cells(self) -> tuple[str, ...]:
        """What the table has."""
        share = f"{100 * self.theirs / self.ours:.0f} %" if self.theirs else "-"
        wrong = "" if self.error <= 1e-4 else " WRONG"
        gigaflops = [f"{self.flops / seconds / 1e9:,.0f}" for seconds in (self.ours, self.theirs)]
        return self.title, *gigaflops, share, f"{self.error:.0e}{wrong}"


def torch_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the best seconds of a call of PyTorch's, after three to warm up."""

    def ended() -> None:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return min(taken_ms(ended, repeats + 3)[3:]) / 1e3


def error_of(found: np.ndarray, wanted: torch.Tensor) -> float:
    """Return the relative error in the norm."""
    exact = wanted.numpy()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def kernel_seconds(executor: Executor, wanted: Callable[[str, str], bool], repeats: int) -> float:
    """Return the best seconds of the launches wanted by (kind, scope), sums of their parts included."""
    program = executor.program
    kinds = [program.kernels[launch.kernel].kind for launch in program.launches]
    chosen = {k for k, launch in enumerate(program.launches) if wanted(kinds[k], launch.scope)}
    chosen |= {k + 1 for k in chosen if k + 1 < len(kinds) and kinds[k + 1] == "sum of slices"}
    totals = []
    for _ in range(repeats + 2):
        executor.launch()
        times = executor.timings()
        totals.append(sum(times[k].ns for k in chosen) * 1e-9)
    return min(totals[2:])


def started(
    captured: CapturedStep, target: str, inputs: list[torch.Tensor]
) -> tuple[Executor, list[np.ndarray]]:
    """Return an executor that has run once, and what that returned."""
    executor = Executor(lower(captured.step, target_here(target)), profile=True)
    executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
    return executor, executor.run(*[t.numpy() for t in inputs])


def product_row(size: int, first: str, second: str, target: str, repeats: int) -> Row:
    """Measure one product of square matrices; "T" operands are transposed views."""
    a, b = torch.randn(size, size), torch.randn(size, size)

    class Product(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a.mT if first == "T" else a) @ (b.mT if second == "T" else b)

    model = Product()
    captured = capture_step(model, (a, b), keep=frozenset(all_rules()))
    executor, (found,) = started(captured, target, [a, b])
    ours = kernel_seconds(executor, lambda *_: True, repeats)
    x, y = a.to(DEVICE), b.to(DEVICE)
    theirs = torch_seconds(lambda: model(x, y), repeats)
    error = error_of(found, model(a.double(), b.double()))
    return Row(f"{size}³ {first}{second}", 2.0 * size**3, ours, theirs, error)


def layer_rows(layer: tuple[int, ...], batch: int, target: str, repeats: int) -> list[Row]:
    """Measure a convolution behind another one, and its gradients."""
    channels, side, kernel, stride, filters = layer
    first = torch.nn.Conv2d(channels, channels, 1, bias=False)
    second = torch.nn.Conv2d(channels, filters, kernel, stride, kernel // 2, bias=False)
    model, x = torch.nn.Sequential(first, second), torch.randn(batch, channels, side, side)
    captured = capture_step(
        model, x, loss=lambda y: (y * y).mean(), keep=frozenset(all_rules()), name="convolutions"
    )
    executor, found = started(captured, target, [x])
    error = max(_errors(model, x, found))
    flops = 2.0 * second.weight.numel() * model(x).numel() / filters
    title = f"{channels} to {filters} at {side}, {kernel} x {kernel} / {stride}"
    theirs = _theirs(first(x).detach(), second, repeats)
    rows = []
    for kind, name in KINDS.items():

        def wanted(what: str, scope: str, name: str = name) -> bool:
            return what == name and scope != "0"  # the first convolution's

        ours = kernel_seconds(executor, wanted, repeats)
        if ours:
            rows.append(Row(f"{title}, {kind}", flops, ours, theirs[kind], error))
    return rows


def _errors(model: torch.nn.Module, x: torch.Tensor, found: list[np.ndarray]) -> list[float]:
    double = [p.detach().double().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    loss = (torch.func.functional_call(model, dict(zip(names, double, strict=True)), x.double()) ** 2).mean()
    wanted = [loss.detach(), *torch.autograd.grad(loss, double)]
    return [error_of(mine, want) for mine, want in zip(found, wanted, strict=True)]


def _theirs(x: torch.Tensor, layer: torch.nn.Conv2d, repeats: int) -> dict[str, float]:
    """Return the seconds of PyTorch's kernels, the faster memory format of each."""
    best: dict[str, float] = {}
    for memory in (torch.contiguous_format, torch.channels_last):
        image = x.to(DEVICE).contiguous(memory_format=memory)
        weight = layer.weight.detach().to(DEVICE).contiguous(memory_format=memory)
        more = (layer.stride, layer.padding, layer.dilation, False, [0, 0], 1)
        grad = torch.ops.aten.convolution(image, weight, None, *more)

        def forward(image=image, weight=weight, more=more) -> object:  # noqa: ANN001
            return torch.ops.aten.convolution(image, weight, None, *more)

        def backward(mask, image=image, weight=weight, more=more, grad=grad) -> object:  # noqa: ANN001
            return torch.ops.aten.convolution_backward(grad, image, weight, None, *more, mask)

        calls = {
            "forward": forward,
            "input": lambda: backward([True, False, False]),
            "weight": lambda: backward([False, True, False]),
        }
        for kind, call in calls.items():
            best[kind] = min(best.get(kind, float("inf")), torch_seconds(call, repeats))
    return best


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, size=512, batch=1, repeats=15)
    parser.add_argument("--target", default="cpu", help="device class to lower for: cpu, gpu or mobile")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    titles = ("float32", "torchedge, GFLOP/s", f"PyTorch ({DEVICE}), GFLOP/s", "ours of theirs", "error")
    print_rows(titles, [])
    more, fine = (given.target, given.repeats), True
    products = (product_row(given.size, a, b, *more) for a, b in itertools.product("NT", repeat=2))
    layers = (row for layer in LAYERS for row in layer_rows(layer, given.batch, *more))
    for row in itertools.chain(products, layers):
        print_rows([], [row.cells])
        fine &= row.error <= 1e-4
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
