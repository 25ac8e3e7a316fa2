"""Models of many equal layers, of which a few are traced: the same step as of a trace of all."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchedge.tracing import steps
from torchedge.tracing.quantizing import quantize
from torchedge.tracing.steps import CapturedStep, capture_step


class _Block(nn.Module):
    """A layer with a norm, a residual, dropout, and a buffer that each call changes."""

    def __init__(self, number: int, special: Callable[[int, Any], Any]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.25)
        self.number, self.special = number, special
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, cache: Sequence[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        cache[self.number].copy_(x[0].detach())
        y = self.drop(self.linear(self.norm(x))) * cache[self.number]
        special: torch.Tensor = self.special(self.number, x + y)
        return special


class _Net(nn.Module):
    def __init__(self, special: Callable[[int, Any], Any], layers: int = 9) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList([_Block(number, special) for number in range(layers)])
        self.caches = nn.ModuleDict({str(n): nn.Module() for n in range(layers)})
        for holder in self.caches.values():
            holder.register_buffer("rows", torch.zeros(8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, [holder.get_buffer("rows") for holder in self.caches.values()])
        return self.last(x)


class _Listing(_Net):
    """Returns what each layer computes."""

    def forward(self, x: torch.Tensor) -> Any:
        x, states = self.first(x), []
        for layer in self.layers:
            x = layer(x, [holder.get_buffer("rows") for holder in self.caches.values()])
            states.append(x)
        return self.last(x), states


class _Counting(_Net):
    """Computes with the number of its layers."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) / len(self.layers)


class _Doubled(torch.autograd.Function):
    """The identity, whose derivative is twice that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


def _plain(number: int, x: torch.Tensor) -> torch.Tensor:
    return x


def _seventh(number: int, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if number == 7 else x


def _other_derivative(number: int, x: torch.Tensor) -> torch.Tensor:
    return _Doubled.apply(x) if number == 7 else x.clone()


def _described(captured: CapturedStep) -> list[str]:
    step = captured.step
    parts = (step.values, step.ops, step.inputs, step.outputs, step.updates, dict(step.initial))
    texts = [*map(repr, parts), repr(captured.output_names)]
    contents = {name: t.data_ptr() if t.dim() else t.item() for name, t in captured.tensors.items()}
    return [*texts, repr(contents)]


def _both(capture: Callable[[], CapturedStep], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Check that a capture gives the step of a trace of all layers; return whether it traced a few alone."""
    found = []
    traced = steps._traced_in_part

    def noted(*args: Any) -> Any:
        found.append(traced(*args))
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(steps, "_traced_in_part", noted)
        part = capture()
        patched.setattr(steps, "find_layers", lambda module: None)
        whole = capture()
    assert _described(part) == _described(whole)
    return any(joint is not None for joint in found)


def _training(model: nn.Module) -> Callable[[], CapturedStep]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    target = torch.zeros(5, dtype=torch.int64)
    return lambda: capture_step(
        model,
        torch.zeros(5, 4),
        targets=target,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        training=True,
        seed=3,
    )


def _inference(model: nn.Module) -> Callable[[], CapturedStep]:
    return lambda: capture_step(model, torch.zeros(5, 4), training=False)


@pytest.mark.parametrize("mode", [_training, _inference])
def test_a_few_layers_give_the_step_of_all(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _both(mode(_Net(_plain)), monkeypatch)


def test_quantised_and_partly_frozen_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize(_Net(_plain), "int4", group=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    assert _both(_training(model), monkeypatch)
    tied = _Net(_plain)
    for layer in tied.layers[1:]:
        layer.linear.weight = tied.layers[0].linear.weight
    assert _both(_inference(tied), monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model",
    [_Net(_seventh), _Listing(_plain), _Counting(_plain), _Net(_other_derivative)],
    ids=["one differs", "all are returned", "counted", "one derivative differs"],
)
def test_layers_that_differ_are_all_traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = _inference(model) if isinstance(model, _Listing) else _training(model)
    assert not _both(capture, monkeypatch)


def test_other_sizes_are_no_repeated_layers() -> None:
    assert steps.find_layers(nn.Sequential(*[nn.Linear(n, n + 1) for n in range(1, 9)])) is None
    assert steps.find_layers(nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)])) is not None
