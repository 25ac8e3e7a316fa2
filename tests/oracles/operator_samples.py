"""PyTorch's own operator samples (op_db), captured, lowered, run through OpenCL, held against float64.

What is supported follows from the table of rules alone. An entry of op_db that bears the name of a rule
counts with every float32 sample that it has. Any other entry (`nn.functional.cross_entropy` becomes other
operators) counts with those samples whose graph, forward and backward, has a rule for each operator.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from oracles.device_checks import kept_alive, sample_decompositions
from oracles.nodes import compute
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchedge.errors import TorchedgeError
from torchedge.graphs.steps import Step
from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import target_for
from torchedge.lowering.translation import translate, unsupported_operators
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.tracing.aten_graphs import step_of
from torchedge.tracing.joint_graphs import plain_kernels

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far an element may be off float64's: this share of it, and this much besides."""
AS_FLOAT32 = 4.0
"""Or so many times as far as the worst element of PyTorch's own float32 result is off."""

_UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Entries whose results hold anything."""

Tensors = list[torch.Tensor]
Runner = Callable[[Step, dict[str, torch.Tensor], Tensors], list[np.ndarray]]
Verdict = Literal["passed", "failed", "refused", "foreign", "random", "none"]


@dataclass(frozen=True)
class Outcome:
    """What became of one sample.

    refused: the operator has a rule, yet capture or lowering says no. foreign: the entry has no rule, and the
    graph holds operators without one (`forward`: in the backward only). random: it draws numbers. none:
    PyTorch has no result to compare with, or the sample holds no tensors.
    """

    verdict: Verdict
    reason: str = ""


@dataclass
class Tally:
    """What became of an entry's samples."""

    title: str
    named: bool
    outcomes: list[Outcome] = field(default_factory=list)

    def count(self, *verdicts: Verdict) -> int:
        """Number of samples with one of these verdicts."""
        return sum(outcome.verdict in verdicts for outcome in self.outcomes)

    @property
    def counted(self) -> int:
        """Samples of supported operators that have something to compare."""
        return self.count("passed", "failed", "refused")


@dataclass(frozen=True)
class Call:
    """A sample as a function from tensors to tensors; `differentiable` says which ones have gradients."""

    function: Callable[..., Tensors]
    tensors: Tensors
    differentiable: tuple[int, ...]

    def converted(self, dtype: torch.dtype) -> Tensors:
        """Return the tensors, floating ones with another dtype."""
        return [t.detach().to(dtype) if t.is_floating_point() else t.detach() for t in self.tensors]

    def run(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        """Return PyTorch's outputs and the gradients at them, numbers that only their shapes decide."""
        with torch.no_grad():
            outputs = self.function(*self.converted(dtype))
        generator = torch.Generator().manual_seed(0)
        return outputs, [
            torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs if o.is_floating_point()
        ]

    def joint(self, tensors: Tensors, tangents: Tensors) -> Tensors:
        """Return outputs, then the gradients of the differentiable tensors."""

        def forward(*chosen: torch.Tensor) -> tuple[Tensors, Tensors]:
            given = list(tensors)
            for place, tensor in zip(self.differentiable, chosen, strict=True):
                given[place] = tensor
            outputs = self.function(*given)
            return [o for o in outputs if o.is_floating_point()], outputs

        chosen = [tensors[place] for place in self.differentiable]
        _, pull_back, outputs = torch.func.vjp(forward, *chosen, has_aux=True)
        return [*outputs, *pull_back(tangents)]


@functools.cache
def entries() -> dict[str, Any]:
    """Return op_db's entries that have float32 samples, by title.

    op_db is more objects than all of PyTorch: only where the slow tests run it is imported.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return {title_of(entry): entry for entry in op_db if torch.float32 in entry.dtypes}


def title_of(entry: Any) -> str:
    """Return an entry's name with its variant."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def is_named(entry: Any) -> bool:
    """Whether a rule bears the entry's name."""
    rules = all_rules()
    return entry.name in rules or entry.aten_name in rules


def check_entry(entry: Any, samples: int | None = None, run: Runner | None = None) -> Tally:
    """Check an entry's samples: all, or so many spread over them. run: on OpenCL (None) or in numpy."""
    tally = Tally(title_of(entry), is_named(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        given = list(entry.sample_inputs("cpu", torch.float32, requires_grad=entry.supports_autograd))
        for sample in _spread(given, samples):
            tally.outcomes.append(_check(entry, sample, tally.named, run or run_on_opencl))
    return tally


def _spread(items: list[Any], count: int | None) -> Iterable[Any]:
    if count is None or count >= len(items):
        return items
    first = len(items) // 2 if count == 1 else 0
    return [items[first + len(items) * k // count] for k in range(count)]


def _check(entry: Any, sample: Any, named: bool, run: Runner) -> Outcome:
    call = call_of(entry, sample)
    if not call.tensors or entry.name in _UNWRITTEN:
        return Outcome("none", "no tensors, or results of any content")
    try:
        exact, tangents = call.run(torch.float64)
        expected = call.joint(call.converted(torch.float64), tangents) if call.differentiable else exact
    except Exception as error:
        return Outcome("none", f"PyTorch in float64: {_line(error)}")
    single = call.run(torch.float32)[1] if call.differentiable else []
    try:
        step, constants = capture(call, single)
    except Exception as error:
        return Outcome("refused" if named else "foreign", f"capture: {_line(error)}")
    if step.updates:
        return Outcome("random")
    missing = unsupported_operators(step)
    if missing:
        return Outcome("refused" if named else "foreign", f"no rule for {', '.join(missing)}")
    given = [
        *call.converted(torch.float32),
        *([t.to(torch.float32) for t in tangents] if call.differentiable else []),
    ]
    try:
        found = run(step, constants, given)
    except TorchedgeError as error:
        return Outcome("refused", _line(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {_line(error)}")
    fault = compare(call, found, expected)
    return Outcome("failed", fault) if fault else Outcome("passed")


def call_of(entry: Any, sample: Any) -> Call:
    """Return a sample as a function of its tensors."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[k] for k in places]

    def function(*given: torch.Tensor) -> Tensors:
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor.clone()  # some operators write to their arguments
        first, args, kwargs = tree_unflatten(filled, structure)
        made = sample.output_process_fn_grad(entry.op(first, *args, **kwargs))
        return [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, torch.Tensor)]

    wanted = [k for k, t in enumerate(tensors) if t.requires_grad and t.is_floating_point()]
    return Call(function, tensors, tuple(wanted))


def capture(call: Call, tangents: Tensors) -> tuple[Step, dict[str, torch.Tensor]]:
    """Return the step that computes a call's outputs, and gradients if it has any, and its constants.

    tangents: the gradients at the outputs, none for a call without gradients.
    """
    tensors = call.converted(torch.float32)
    count = len(tensors)

    def traced(*given: torch.Tensor) -> Tensors:
        if call.differentiable:
            return call.joint(list(given[:count]), list(given[count:]))
        return call.function(*given)

    inputs = [*tensors, *tangents]
    with plain_kernels():
        module: GraphModule = make_fx(
            torch.func.functionalize(traced, remove="mutations_and_views"),
            decomposition_table=sample_decompositions(),
            tracing_mode="fake",
        )(*inputs)
    names = [(f"x{k}" if k < count else f"g{k - count}", "input") for k in range(len(inputs))]
    return step_of(module, names, name="sample")


def run_on_opencl(step: Step, constants: dict[str, torch.Tensor], tensors: Tensors) -> list[np.ndarray]:
    """Return a step's outputs on the default OpenCL device."""
    device = choose_device()
    executor = kept_alive(Executor(lower(step, target_for(device)), device))
    executor.load({name: tensor.numpy() for name, tensor in constants.items()})
    return executor.run(*[tensor.contiguous().numpy() for tensor in tensors])


def compare(call: Call, found: list[np.ndarray], expected: Tensors) -> str:
    """Return what is wrong with results, or nothing."""
    single = None
    for place, (mine, exact) in enumerate(zip(found, expected, strict=True)):
        what = f"output {place}" if place < len(found) - len(call.differentiable) else f"gradient of {place}"
        if mine.shape != tuple(exact.shape):
            return f"{what} is of shape {mine.shape}; expected {tuple(exact.shape)}"
        wanted = exact.numpy(force=True)
        if _close(mine, wanted):
            continue
        if single is None:
            tangents = call.run(torch.float32)[1]
            tensors = call.converted(torch.float32)
            single = call.joint(tensors, tangents) if call.differentiable else call.function(*tensors)
        if not _as_close(mine, wanted, single[place].numpy(force=True)):
            return f"{what} is off by {_worst(mine, wanted):.1e}"
    return ""


def _close(mine: np.ndarray, wanted: np.ndarray) -> bool:
    if wanted.dtype.kind in "biu":
        return bool((mine == wanted).all())
    return bool(np.allclose(mine, wanted, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))


def _as_close(mine: np.ndarray, wanted: np.ndarray, single: np.ndarray) -> bool:
    """Whether results are as near to float64's as PyTorch's float32, and infinite or NaN where that is."""
    if wanted.dtype.kind in "biu":
        return bool((mine == single).all())
    finite = np.isfinite(single) & np.isfinite(wanted)
    if not np.array_equal(mine[~finite], single[~finite], equal_nan=True) or not finite.any():
        return False
    mine, wanted, single = (array[finite].astype(np.float64) for array in (mine, wanted, single))
    error = np.abs(mine - wanted)
    worst = AS_FLOAT32 * np.abs(single - wanted).max()
    return bool((error <= np.maximum(worst, ABSOLUTE + RELATIVE * np.abs(wanted))).all())


def _worst(mine: np.ndarray, wanted: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        error = np.abs(mine.astype(np.float64) - wanted.astype(np.float64))
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0))


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def run_in_numpy(step: Step, constants: dict[str, torch.Tensor], tensors: Tensors) -> list[np.ndarray]:
    """Return a step's outputs, its nodes computed with numpy."""
    names = [step.values[number].name for number in step.inputs]
    data = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    data |= {name: tensor.numpy() for name, tensor in constants.items()}
    known: dict[Any, Any] = {}
    return [np.asarray(compute(node, data, known)) for node in translate(step).outputs]
