"""Losses, and the model with its loss as one module from tensors to tensors, which AOTAutograd traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchedge.errors import CaptureError, InputError, described, first_line
from torchedge.graphs.training_steps import Loss, as_tuple
from torchedge.tracing.copies import forget_cached
from torchedge.tracing.interception import flat_result, output_names, returned_tensors
from torchedge.tracing.rehearsals import ForwardState


def loss_function(loss: Loss, targets: tuple[Any, ...], *, synthesize: bool = False) -> Callable[..., Any]:
    """Return a loss as a function of the outputs and the targets.

    synthesize: without targets, those of cross entropy and of PyTorch's own losses follow from the outputs:
    for predictions, which need no more than their shapes.

    Raises:
        InputError: the loss takes another number of arguments.
    """
    if loss == "default":
        return default_loss if synthesize or targets else _own_or_targets
    if loss == "model":
        return own_loss
    assert callable(loss)
    signature = _positional(loss)
    if signature is None:  # a function written in C
        return loss
    needed, most, names = signature
    if needed <= 1 + len(targets) <= most:
        return loss
    if synthesize and not targets and needed == 2:
        synthesized = _with_targets(loss)
        if synthesized is not None:
            return synthesized
    takes = f"loss is {_name_of(loss)}, which takes {', '.join(names)}"
    if targets:
        raise InputError(
            f"{takes}, and targets are {len(targets)}; expected a function loss(outputs, *targets), with one "
            "argument for each target"
        )
    raise InputError(
        f"{takes}, and there are no targets; expected a function loss(outputs, *targets): pass targets=, an "
        "example of what it gets beside the outputs"
    )


def named_errors(loss: Loss, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function whose errors name the loss: they are not those of the forward pass."""

    def named(outputs: Any, *targets: Any) -> Any:
        try:
            return function(outputs, *targets)
        except Exception as error:
            if type(error).__module__ != "builtins":  # torch's own and ours, by which a capture goes on
                raise
            name = "cross entropy" if loss == "default" else _name_of(loss)
            raise CaptureError(
                f"the loss {name} raised {type(error).__name__}: {first_line(error)}"
            ) from error

    return named


def _positional(loss: Callable[..., Any]) -> tuple[int, float, list[str]] | None:
    """Return how many positional arguments a loss needs and takes at most, and their names."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError):
        return None
    parameters = signature.parameters.values()
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in own if p.default is p.empty]
    most = float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(own)
    return len(needed), most, needed


_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
_OF_VALUES = (
    "BCELoss", "BCEWithLogitsLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss", "PoissonNLLLoss",
    "SmoothL1Loss", "SoftMarginLoss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip
"""Losses of torch.nn whose targets are class numbers, or of the outputs' shape."""


def _with_targets(loss: Callable[..., Any]) -> Callable[[Any], Any] | None:
    """Return one of PyTorch's losses as a function of the outputs alone; None for any other."""
    name = _name_of(loss)
    home = type(loss) if isinstance(loss, torch.nn.Module) else loss
    if not str(getattr(home, "__module__", "")).startswith("torch.") or name not in (
        *_OF_CLASSES,
        *_OF_VALUES,
    ):
        return None

    def synthesized(outputs: Any) -> Any:
        scores = outputs if isinstance(outputs, torch.Tensor) else next(iter(_scores(outputs)), outputs)
        if name in _OF_VALUES:
            return loss(scores, torch.zeros(tuple(scores.shape), dtype=scores.dtype, device=scores.device))
        shape = (scores.shape[0], *scores.shape[2:])
        return loss(scores, torch.zeros(shape, dtype=torch.int64, device=scores.device))

    return synthesized


def _name_of(loss: object) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def default_loss(outputs: Any, *targets: Any) -> torch.Tensor | None:
    """Return a scalar to differentiate: the model's own loss, else cross entropy on every float output.

    Class scores (N, C) or (N, C, H, W) have classes in dimension 1, token scores (N, S, V) in the last;
    without targets anything else is averaged. Auxiliary outputs (GoogLeNet, Inception, DeepLab) are added up.
    """
    own = _own(outputs)
    if own is not None:
        return own
    if len(targets) > 1:
        raise InputError(
            f"targets are {len(targets)}, and cross entropy takes one; expected loss=, a function "
            "loss(outputs, *targets)"
        )
    parts = [_cross_entropy(t, *targets) for t in _scores(outputs) if t.dtype.is_floating_point]
    return reduce(torch.add, parts) if parts else None


def own_loss(outputs: Any, *targets: Any) -> Any:
    """Return the loss that the model itself returned: the attribute or the key `loss`."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def _own_or_targets(outputs: Any) -> torch.Tensor:
    own = _own(outputs)
    if own is None:
        raise InputError(
            "there are no targets, and the model returns no loss; expected targets=, for cross entropy or "
            "another loss="
        )
    return own


def _own(outputs: Any) -> torch.Tensor | None:
    own = own_loss(outputs)
    return own if isinstance(own, torch.Tensor) and own.dim() == 0 else None


def _scores(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors that a loss reads: `logits` if there are any, else a head by name, else all."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, torch.Tensor) and isinstance(outputs, tuple):
        return [t for t in outputs if isinstance(t, torch.Tensor)]
    if isinstance(logits, torch.Tensor):
        return [logits]
    for name in ("last_hidden_state", "out"):
        head = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(head, torch.Tensor):
            aux = outputs.get("aux") if isinstance(outputs, Mapping) else None
            return [head] if aux is None else [head, aux]
    return [t for t in flat_result(outputs, torch.Tensor)[0] if isinstance(t, torch.Tensor)]


def _cross_entropy(scores: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    rank = scores.dim()
    if target is not None:
        if rank == 3 and target.dim() == 2:
            scores, target = scores.flatten(0, 1), target.flatten()
        return torch.nn.functional.cross_entropy(scores, target)
    if rank in (2, 4) and scores.shape[1] > 1:
        target = torch.zeros((scores.shape[0], *scores.shape[2:]), dtype=torch.int64, device=scores.device)
        return torch.nn.functional.cross_entropy(scores, target)
    if rank == 3 and scores.shape[2] > 1:
        target = torch.zeros((scores.shape[0] * scores.shape[1],), dtype=torch.int64, device=scores.device)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), target)
    return scores.mean()


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that an example stands for: a dict is the latter."""
    return ((), dict(example)) if isinstance(example, Mapping) else (as_tuple(example), {})


_TENSOR = object()
"""Stands for a tensor among the leaves of a result."""


class Objective(torch.nn.Module):
    """The model and its loss as one module from tensors to tensors; both keep their modes.

    output_names: a name for each tensor that `forward` returned last. running: the model, or the loss while
    it runs, as errors name them. state: the Python state that each run starts from.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...] = (),
        loss: Loss | None = None,
    ) -> None:
        super().__init__()
        self.model, self.loss, self.training = model, loss, model.training
        self.leaves, self.structure = tree_flatten((args, kwargs, targets))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.output_names: list[str] = []
        self.running = type(model).__name__
        self._result: tuple[list[Any], Any] = ([], None)
        self._leaking: list[Any] | None = None
        self.state: ForwardState | None = None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run `forward` alone, without the hooks of every module."""
        return self.forward(*tensors)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss alone, or without one the tensors that the model returns."""
        with nullcontext() if self.state is None else self.state.watched():
            return self.run(tensors)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what `forward` returns, from the Python state as it is."""
        args, kwargs, targets = self.arguments(tensors)
        with _written_buffers(self.model):
            outputs = self.model(*args, **kwargs)
        self._forget()
        if self.loss is not None:
            self.output_names = ["loss"]
            return (self._scalar(outputs, targets),)
        self.output_names = output_names(outputs, torch.Tensor)
        leaves, structure = flat_result(outputs, torch.Tensor)
        self._result = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        return tuple(returned_tensors(leaves, type(self.model).__name__, torch.Tensor))

    def _forget(self) -> None:
        """Clear caches that the model filled: found in the first call, the same ones in each later call."""
        if self._leaking is None:
            self._leaking = forget_cached((FakeTensor, FunctionalTensor))
        for cached in self._leaking:
            cached.cache_clear()

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return args, kwargs and targets with these tensors in place of the first ones."""
        filled = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs, targets = tree_unflatten(filled, self.structure)
        return args, kwargs, targets

    def rebuilder(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Return a function that puts tensors into the model's result as `forward` received it last."""
        leaves, structure = self._result

        def rebuild(outputs: Sequence[torch.Tensor]) -> Any:
            tensors = iter(outputs)
            return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], structure)

        return rebuild

    def _scalar(self, outputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        assert self.loss is not None
        model, self.running = self.running, f"the loss {_name_of(self.loss)}"
        value = loss_function(self.loss, targets)(outputs, *targets)
        self.running = model
        if not isinstance(value, torch.Tensor):
            title = "the model's own loss" if self.loss == "model" else "the loss"
            raise InputError(
                f"{title} is {described(value)}; expected a 0-d tensor that depends on the outputs"
            )
        if value.dim():
            raise InputError(
                f"the loss has shape {tuple(value.shape)}; expected a 0-d tensor, for example its mean"
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise InputError(
                "the loss does not depend on any parameter that is trained; check that the model's outputs "
                "are used and not detached"
            )
        return value

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments and targets, in the order of `forward`."""
        return [self.leaves[place] for place in self.places]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name; a tied tensor has several names."""
        buffers = self.named_buffers(remove_duplicate=False)
        return dict([*self.named_parameters(remove_duplicate=False), *buffers])

    def input_names(self) -> list[str]:
        """Return a name for each input: that of its argument of `forward`."""
        names: list[str] = []
        args, kwargs, targets = tree_unflatten(self.leaves, self.structure)
        try:
            signature = inspect.signature(self.model.forward)
            bound = signature.bind_partial(*args, **kwargs).arguments
            for name, parameter in signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    bound |= bound.pop(name, {})
        except (TypeError, ValueError):
            bound = {"x": args, **kwargs}
        for title, item in (*bound.items(), ("target", targets)):
            names += [title for leaf in tree_flatten(item)[0] if isinstance(leaf, torch.Tensor)]
        return names if len(names) == len(self.places) else ["x"] * len(self.places)


@contextmanager
def _written_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Copy a tensor that replaces a buffer into that buffer: AOTAutograd tracks writes, not assignments."""
    before = dict(model.named_buffers())
    yield
    for name, buffer in model.named_buffers():
        old = before.get(name)
        if old is not None and old is not buffer and old.shape == buffer.shape:
            with torch.no_grad():
                old.copy_(buffer)


def public_name(name: str) -> str:
    """Return the name of a parameter or buffer in the user's model: without `Objective`'s prefix."""
    return name.removeprefix("model.")
