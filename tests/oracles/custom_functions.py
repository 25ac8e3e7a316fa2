"""Custom autograd functions as people write them, on tensors of (batch, width) with gradients.

None runs an operator that CUDA's autocast runs in float32 and the CPU's does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = torch.autograd.Function


class Saves(Function):
    """Saves its input and an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(x)
        ctx.save_for_backward(x, sigmoid)
        return x * sigmoid

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, sigmoid = ctx.saved_tensors
        return gradient * (sigmoid * (1 + x * (1 - sigmoid)))


class Attributes(Function):
    """Keeps tensors as attributes of ctx, which live as long as the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.mask, ctx.factor, ctx.power = x > 0, factor, x.sin()
        return ctx.power * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.mask * ctx.factor * ctx.power, None


class Scratch(Function):
    """Allocates more in both passes than it keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x + torch.cat([x, x, x, x], 1).sin().amax(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        wide = torch.cat([x, x, x, x, gradient, gradient], 1).cos()
        return gradient + wide[:, : x.shape[1]] + (wide * 2).amax(1, keepdim=True)


class Straight(Function):
    """Passes gradients on where its forward stops them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.abs())


class Stops(Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class Reverses(Function):
    """Returns its input as it is, and reverses gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Writes(Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class Several(Function):
    """Returns three tensors, one without gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        sine, cosine, mask = x.sin(), x.cos(), x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(sine, cosine)
        return sine, cosine, mask

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        sine, cosine = ctx.saved_tensors
        return gradients[0] * cosine - gradients[1] * sine


class Modern(Function):
    """Has its context set up apart, and asks which gradients are needed."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return factor * x * x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x * x * gradient if ctx.needs_input_grad[0] else None, None


class Recomputes(Function):
    """Runs another function inside, and autograd in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Saves.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = torch.sigmoid(x) * x * 2
        return torch.autograd.grad(y, x, gradient)[0]


def _chosen(x: torch.Tensor) -> torch.Tensor:
    sine, cosine, mask = Several.apply(x)
    return torch.where(mask, sine, cosine)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "saves": Saves.apply,
    "attributes": lambda x: Attributes.apply(x, 2.0),
    "scratch": Scratch.apply,
    "straight": Straight.apply,
    "stops": lambda x: x + Stops.apply(x),
    "reverses": Reverses.apply,
    "writes": lambda x: Writes.apply(x * 2),
    "several": _chosen,
    "one of several": lambda x: Several.apply(x)[0],
    "modern": lambda x: Modern.apply(x, 2),
    "recomputes": Recomputes.apply,
}
