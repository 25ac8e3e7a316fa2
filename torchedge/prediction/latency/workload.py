"""The computation and traffic of a step for a sample: the batch-independent half of the time model.

Three kinds of work (perf4sight, section 2, seen operator by operator): products (dense convolutions, linear
layers, matrix products), depthwise convolutions, and element-wise passes over memory; beside them the number
of kernels launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchedge.graphs import FLOATING, FUNCTION_REGION, ForwardGraph, Op
from torchedge.graphs.sizes import Affine
from torchedge.ops import Work, spec_of
from torchedge.ops.gradients import gradient_needs, is_differentiated
from torchedge.ops.recurrent import STEP_LAUNCHES
from torchedge.prediction.memory.decomposition import images_last
from torchedge.prediction.memory.settings import StepSettings

if TYPE_CHECKING:
    from torchedge.tracing.optimizer_replays import OptimizerReplay

PASSES = ("norm", "activation", "binary", "copy", "pool_in", "pool_window", "bias", "update", "fan")
"""Element-wise work, in elements: normalised, activated, added or multiplied, copied, read by pooling,
compared in pooling windows, biases added, parameters updated, gradients summed where a value is used
twice."""

UNTRACKED_LAUNCHES = 0.6
"""The host's time for an operator of a training step that autograd does not record, over that of one that it
does: in frozen parts, for masks and positions."""

IMPLICIT_LAUNCHES = 0.6
"""The host's time for a cast that autocast makes on a GPU, over that of an operator that the model calls: no
Python runs for it. Chosen by families left out, of 1.0, 0.6 and 0.4."""

NORM_CHANNEL = "norm_channel"
"""Elements of one channel that batch norms of training read, behind `PASSES`: a channel is one block's."""

CHECKPOINT_LAUNCHES = 30
"""Launches that take the host as long as `torch.utils.checkpoint` itself for a region, forward and backward:
frames, hooks of saved tensors, autocast, random generators."""

FORWARD_SHARE = 1 / 3
"""The part of element-wise work that a forward pass alone does."""

LAUNCHES = ("product_fwd", "product_bwd", "norm_fwd", "norm_bwd", "pass_fwd", "pass_bwd", "parameter")
"""Kernels launched a step, by purpose; `parameter` counts updated parameter tensors."""

CALL_LAUNCHES = 0.5
"""Launches that take the host as long as a call that launches none: a view, or a module's frame and hooks.

Fits of networks of matrices count these calls. In CNNs each operator is a module of its own and views are
few, so that a fit has them in its launches."""

PRODUCT_COLUMNS = (
    "m", "n", "k", "stride", "ip", "op", "input_grad", "count", "batched", "groups", "matrix", "weight_grad",
    "runs", "last",
)  # fmt: skip
"""Input and output channels of a group, kernel volume, stride, input and output positions a sample, whether
the gradient of the input is computed, how many such products (times groups), whether positions scale with
the batch, groups, whether it is a plain product of matrices rather than a convolution, whether the gradient
of the second factor (the weight) is computed, forward runs a step (2: the backward pass runs it again),
whether it is a convolution in channels_last."""

STEP_PHASES = ("forward", "backward", "update")
FUSED_COLUMNS = ("moved", "fixed", "generated", "launches", "arguments", "replayed")
"""Of the phases of a compiled step: bytes that generated kernels and the optimizer's read and write, for a
sample and whatever the batch size; generated kernels; kernels that the host launches; arguments of the
model's graph that it launches, or that CUDA replays."""

DEPTHWISE_COLUMNS = ("n", "k", "stride", "ip", "op", "input_grad", "count", "weight_grad", "runs", "last")

Array = npt.NDArray[np.float64]

Elements = tuple[float, float]
"""Elements of a sample, and those whatever the batch size: numbers, or Sizes of a family of graphs."""

_HALF = frozenset(("float16", "bfloat16"))


@dataclass(frozen=True, eq=False)
class Workload:
    """Work of one step: products (P, 14), depthwise (D, 10), passes (10, 2), launches (8,), float64.

    launches: by `LAUNCHES`, then calls of views and modules. passes: elements a sample, and elements whatever
    the batch size (parameters and their casts), by `PASSES`, then `NORM_CHANNEL`. precisions: the share of
    multiply-adds by dtype ("float32" for all but half precision), at a batch size of 32. tiled: whether
    products compute positions in tiles, as kernels of GPUs do. fused: (3, 6) of a compiled step, by
    `STEP_PHASES` and `FUSED_COLUMNS`.
    """

    products: Array
    depthwise: Array
    passes: Array
    launches: Array
    training: bool
    precisions: Mapping[str, float] = field(default_factory=dict)
    tiled: bool = True
    fused: Array | None = None

    @property
    def of_matrices(self) -> bool:
        """Whether most operations are plain products of matrices rather than convolutions."""
        m, n, k, op, count, matrix = self.products[:, (0, 1, 2, 5, 7, 10)].T
        operations = m * n * k * op * count
        return float((operations * matrix).sum()) > 0.5 * float(operations.sum())


_USUAL, _ITEM = "sgd-momentum", 4
"""The optimizer that updates are counted in, and the bytes of its elements."""

UpdateCost = tuple[float, float]
"""What an optimizer costs relative to SGD with momentum: memory accesses and the host's time."""

_GRADIENT, _LOOKUP, _SINGLE, _LISTED, _READ = 2.0, 0.5, 1.1, 0.23, 4.0
"""The host's time for a parameter tensor, in launches of a tiny kernel: autograd stores its gradient; the
optimizer looks up its state; a call on one tensor; its share of a call on a list of tensors; a value that it
waits for. The first four are fitted to the updates of 148 steps on one host (`2026-11-27-a` of
`profiles/nvidia-h200/campaign/settings`), the last to the 72 steps with Adafactor there, which reads two."""


def update_cost(settings: StepSettings) -> UpdateCost:
    """Return the cost of the optimizer of a step by its code's calls; a named one decays weights."""
    usual, usual_time = _update_cost(_USUAL, settings.foreach)
    if settings.optimizer == "none":
        return 0.0, _GRADIENT / usual_time
    accesses, time = _update_cost(settings.optimizer, settings.foreach)
    return accesses / usual, time / usual_time


def update_bytes(work: Workload) -> float:
    """Return the bytes that the optimizer's calls on lists of parameters move in a step."""
    elements = work.passes[PASSES.index("update")].sum()
    return float(_ITEM * _update_cost(_USUAL, foreach=True)[0] * elements)


def _update_cost(optimizer: str | OptimizerReplay, foreach: bool) -> UpdateCost:
    """Return the accesses of an element, and the host's time for a parameter tensor in launches."""
    if isinstance(optimizer, str):
        optimizer = StepSettings(optimizer, weight_decay=1e-2).replay
    calls = optimizer.calls(foreach)
    called = _SINGLE * calls.single + _LISTED * calls.listed + _READ * calls.reads
    return calls.accesses, _GRADIENT + _LOOKUP + called


def updated_at(work: Workload, cost: UpdateCost) -> Workload:
    """Return the work of a step with another optimizer than SGD with momentum."""
    if cost == (1.0, 1.0):
        return work
    passes, launches = work.passes.copy(), work.launches.copy()
    passes[PASSES.index("update")] *= cost[0]
    launches[LAUNCHES.index("parameter")] *= cost[1]
    return replace(work, passes=passes, launches=launches)


class _Counter:
    """Accumulates the work of a graph.

    runs: how often the forward pass of the operator being counted runs in a step; trained: whether it has a
    backward pass; implicit: whether autocast calls it rather than the model. lies_last: whether an image lies
    in channels_last, in which libraries then compute a convolution of it.
    """

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.runs, self.trained, self.implicit = 1, True, False
        self.plain = graph.loss is None
        self.lies_last = images_last(graph)
        self.dtype = "float32"
        self.multiply_adds: dict[str, float] = {}
        self.products: dict[tuple[float, ...], float] = {}
        self.depthwise: dict[tuple[float, ...], float] = {}
        self.passes: dict[str, Elements] = dict.fromkeys((*PASSES, NORM_CHANNEL), (0.0, 0.0))
        self.launches = dict.fromkeys(LAUNCHES, 0.0)

    @property
    def calls(self) -> float:
        """The forward runs of the operator being counted, as long as the host takes for them."""
        tracked = 1.0 if self.trained or self.plain else UNTRACKED_LAUNCHES
        return self.runs * tracked * (IMPLICIT_LAUNCHES if self.implicit else 1.0)

    def elements(self, index: int | None) -> Elements:
        """Elements of a value, of four bytes: those of half precision count half.

        A square of the batch size counts as for 32 samples.
        """
        if index is None:
            return 0.0, 0.0
        value = self.graph.values[index]
        c0, c1, c2 = value.numel
        sample = c1 + c2 * 32 if c2 else c1
        return (sample / 2, c0 / 2) if value.dtype in _HALF else (sample, c0)

    def product(
        self,
        m: float,
        n: float,
        k: float,
        stride: float,
        ip: float,
        op: float,
        grad: bool,
        weight_grad: bool,
        groups: float = 1,
        batched: bool = True,
        matrix: bool = False,
        last: bool = False,
    ) -> None:
        """Book a product; grad, weight_grad: of its first and second factor."""
        self.multiply(m * n * k * op * (32 if batched else 1))
        flags = tuple(map(float, (batched, matrix, weight_grad, self.runs, last)))
        key = (m, n, k, stride, ip, op, float(grad), groups, *flags)
        self.products[key] = self.products.get(key, 0.0) + 1
        self.launch_product(frozen=not weight_grad)

    def multiply(self, count: float) -> None:
        """Book multiply-adds in the precision of the operator being counted."""
        self.multiply_adds[self.dtype] = self.multiply_adds.get(self.dtype, 0.0) + count

    def launch_product(self, *, frozen: bool, times: float = 1) -> None:
        """Book the launches of a product; the backward pass omits one of two where the weight is frozen."""
        self.launches["product_fwd"] += self.calls * times
        self.launches["product_bwd"] += self.trained * (0.5 if frozen else 1.0) * times

    def sweep(self, name: str, amount: Elements, forward: str, backward: str, times: float) -> None:
        """Book element-wise work and its launches: `runs` forward, `times` backward."""
        self.add_pass(name, amount)
        self.launches[forward] += self.calls
        self.launches[backward] += times

    def add_pass(self, name: str, amount: Elements, times: float = 1) -> None:
        """Book element-wise work of all its runs, in units of a forward and a backward pass."""
        trains = self.graph.loss is not None
        share = self.trained + FORWARD_SHARE * (self.runs - self.trained) if trains else 1
        self.add_elements(name, (amount[0] * times * share, amount[1] * times * share))

    def add_elements(self, name: str, amount: Elements) -> None:
        """Book element-wise work as it is."""
        sample, fixed = self.passes[name]
        self.passes[name] = sample + amount[0], fixed + amount[1]


_Count = Callable[[_Counter, Op, bool, list[bool]], None]
"""Books one operator: its counter, whether it has a backward call, and which values need a gradient."""


def count_work(graph: ForwardGraph, *, tiled: bool = True) -> Workload:
    """Count the work of a graph: of a training step where it has a loss, else of its forward pass."""
    amounts = count_amounts(graph)
    return Workload(
        np.array(amounts.products, dtype=float).reshape(-1, len(PRODUCT_COLUMNS)),
        np.array(amounts.depthwise, dtype=float).reshape(-1, len(DEPTHWISE_COLUMNS)),
        np.array(amounts.passes, dtype=float),
        np.array(amounts.launches, dtype=float),
        graph.loss is not None,
        _shares(amounts.multiply_adds),
        tiled,
    )


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total for name, amount in amounts.items()} if total else {}


@dataclass(frozen=True, slots=True)
class WorkAmounts:
    """A workload before it becomes arrays: numbers, or the Sizes of a family of graphs."""

    products: list[list[float]]
    depthwise: list[list[float]]
    passes: list[list[float]]
    launches: list[float]
    multiply_adds: dict[str, float]


def count_amounts(graph: ForwardGraph) -> WorkAmounts:
    """Count the work of a graph as plain numbers, see `count_work`."""
    counter = _Counter(graph)
    needs = gradient_needs(graph, through_stops=True)
    ends = _ends_of_second_runs(graph, needs)
    views, modules = 0.0, dict[str, int]()
    for position, op in enumerate(graph.ops):
        counter.trained = is_differentiated(op, needs, through_stops=True)
        repeated = op.region and not op.stored and graph.loss is not None
        around = sum(position < ends.get(outer, len(graph.ops)) for outer in op.outer)
        counter.runs = 2 + around if counter.trained and repeated else 1
        modules[op.scope] = max(modules.get(op.scope, 1), counter.runs)
        counter.implicit = "implicit" in op.attrs
        work = spec_of(op.kind).work
        first = graph.values[op.outputs[0]] if op.outputs else None
        # Counters that advance, such as batch norm's `num_batches_tracked`, are no work.
        if work is Work.NONE or first is None or (not first.shape and first.dtype not in FLOATING):
            views += counter.calls
            continue
        dtype = graph.values[op.outputs[0]].dtype
        counter.dtype = dtype if dtype in _HALF else "float32"
        _COUNTS[work](counter, op, counter.trained, needs)
    _count_updates(counter, needs)
    if graph.loss is not None:
        regions = {op.region for op in graph.ops if op.region and op.region < FUNCTION_REGION}
        counter.launches["pass_fwd"] += CHECKPOINT_LAUNCHES * len(regions)
    return WorkAmounts(
        [[*key[:7], times * key[7], key[8], key[7], *key[9:]] for key, times in counter.products.items()],
        [[*key[:6], times, *key[6:]] for key, times in counter.depthwise.items()],
        [list(amount) for amount in counter.passes.values()],
        [*counter.launches.values(), float(views + _module_calls(modules))],
        counter.multiply_adds,
    )


def _module_calls(runs: Mapping[str, int]) -> int:
    """Return how often modules are called, by the runs of those that call operators: with all around them."""
    calls: dict[str, int] = {}
    for path, often in runs.items():
        while calls.get(path, 0) < often:
            calls[path] = often
            path = path.rpartition(".")[0]
    return sum(calls.values())


def _ends_of_second_runs(graph: ForwardGraph, needs: list[bool]) -> dict[int, int]:
    """Return where the second run of each region around others ends, as a position in the graph.

    PyTorch stops it at the last tensor that autograd keeps there: a region inside keeps what it reads alone,
    before it runs. One with re-entry runs to its end.
    """
    ends: dict[int, int] = {}
    begins: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        path = (*op.outer, op.region)
        for outer, inner in pairwise(path):
            if outer > 0:
                ends[outer] = begins.setdefault(inner, position)
        keeps = op.footprint is None or bool(op.footprint.saved)
        if op.region in ends and keeps and is_differentiated(op, needs):
            ends[op.region] = position + 1
    return ends


def _positions(shape: tuple[object, ...]) -> tuple[float, bool]:
    """Product of dimensions a sample, and whether the batch is among them."""
    total, batched = 1.0, False
    for size in shape:
        if isinstance(size, Affine):
            total, batched = total * size.slope, True
        else:
            total *= size  # type: ignore[operator]
    return total, batched


def _count_convolution(
    counter: _Counter, op: Op, grad: bool, needs: list[bool], transposed: bool = False
) -> None:
    values = counter.graph.values
    x, y = op.inputs[0], op.outputs[0]
    w = op.inputs[1] if len(op.inputs) > 1 else None
    if x is None or w is None:
        return
    kernel = [s for s in values[w].shape[2:] if not isinstance(s, Affine)]
    rank = len(kernel)
    groups = op.attrs.get("groups", 1)
    transposed = transposed or bool(op.attrs.get("transposed", False))
    small, large = (y, x) if transposed else (x, y)
    channels_in, channels_out = (_channels(values[i].shape, rank) for i in (small, large))
    ip, batched = _positions((*values[small].shape[: -rank - 1], *values[small].shape[-rank:]))
    if isinstance(groups, Affine):  # samples folded into channels, each with weights of its own
        groups, batched = groups.slope, True
    op_, _ = _positions((*values[large].shape[: -rank - 1], *values[large].shape[-rank:]))
    stride = op.attrs.get("stride", 1)
    step = float(max(stride) if isinstance(stride, tuple) else stride)
    input_grad, weight_grad, last = grad and needs[x], grad and needs[w], counter.lies_last(x)
    if groups > 1 and channels_in == groups:
        flags = tuple(map(float, (input_grad, weight_grad, counter.runs, last)))
        key = (channels_out, prod(kernel), step, ip, op_, *flags)
        counter.depthwise[key] = counter.depthwise.get(key, 0.0) + 1
        counter.multiply(channels_out * prod(kernel) * op_ * 32)
        counter.launch_product(frozen=not weight_grad)
    else:
        counter.product(
            channels_in if groups == 1 else channels_in / groups,
            channels_out if groups == 1 else channels_out / groups,
            prod(kernel),
            step,
            ip,
            op_,
            input_grad,
            weight_grad,
            groups,
            batched,
            last=last,
        )
    if len(op.inputs) > 2 and op.inputs[2] is not None:
        counter.trained = grad and needs[op.inputs[2]]
        counter.add_pass("bias", counter.elements(y))


def _channels(shape: tuple[object, ...], rank: int) -> int:
    size = shape[-rank - 1]
    return size.slope if isinstance(size, Affine) else size  # type: ignore[return-value]


def _count_product(counter: _Counter, op: Op, grad: bool, needs: list[bool], first: int = 0) -> None:
    """A product of rows (positions) with a matrix, inputs `first` and `first + 1`."""
    values = counter.graph.values
    tensors = [i for i in op.inputs if i is not None][first:]
    if len(tensors) < 2 or not values[op.outputs[0]].shape or not values[tensors[0]].shape:
        return
    out = values[op.outputs[0]].shape
    rows, batched = _positions(out[:-1])
    inner, _ = _positions(values[tensors[0]].shape[-1:])
    width, _ = _positions(out[-1:])
    first_grad, second_grad = (grad and needs[i] for i in tensors[:2])
    counter.product(inner, width, 1, 1, rows, rows, first_grad, second_grad, 1, batched, True)
    grouped = spec_of(op.kind).kind == "grouped_mm"
    if grouped and values[op.outputs[0]].dtype != "bfloat16":  # a product for each group
        groups, _ = _positions(values[tensors[1]].shape[:1])
        counter.launch_product(frozen=not second_grad, times=groups - 1)


def _count_attention(counter: _Counter, op: Op, grad: bool, needs: list[bool]) -> None:
    """Two products, with the row-wise softmax between them: kernels in half precision keep it on the chip."""
    shapes = [counter.graph.values[i].shape for i in op.inputs[:3] if i is not None]
    if len(shapes) < 3:
        return
    rows, batched = _positions(shapes[0][:-1])
    keys, _ = _positions(shapes[1][-2:-1])
    inner, _ = _positions(shapes[0][-1:])
    width, _ = _positions(shapes[2][-1:])
    counter.product(inner, keys, 1, 1, rows, rows, grad, grad, 1, batched, True)
    counter.product(keys, width, 1, 1, rows, rows, grad, grad, 1, batched, True)
    fused = counter.graph.values[op.outputs[0]].dtype in _HALF
    counter.sweep("norm", (0.0 if fused else rows * keys, 0.0), "norm_fwd", "norm_bwd", float(grad))


def _swept(name: str, kernels: str = "pass", backward: float = 1.0, *, reads: bool = False) -> _Count:
    """Return the count of an operator that passes over its first output, or that `reads` its first input.

    One kernel forward, `backward` backward.
    """

    def count(counter: _Counter, op: Op, grad: bool, needs: list[bool]) -> None:
        swept = (op.inputs[0] if op.inputs else None) if reads else op.outputs[0]
        counter.sweep(name, counter.elements(swept), f"{kernels}_fwd", f"{kernels}_bwd", backward * grad)

    return count


def _count_copy(counter: _Counter, op: Op, grad: bool, needs: list[bool], *, joins: bool = False) -> None:
    """Count what is written; each of the tensors that are joined gets a gradient of its own."""
    samples, fixed = zip(*map(counter.elements, op.outputs), strict=True)
    sources = sum(i is not None for i in op.inputs) if joins else 1
    counter.sweep("copy", (sum(samples), sum(fixed)), "pass_fwd", "pass_bwd", sources * float(grad))


def _count_pooling(counter: _Counter, op: Op, grad: bool, needs: list[bool]) -> None:
    kernel = op.attrs.get("kernel_size", 1)
    rank = max(len(counter.graph.values[op.outputs[0]].shape) - 2, 1)
    window = float(
        kernel**rank if isinstance(kernel, int) else prod(kernel) ** (rank if len(kernel) == 1 else 1)
    )
    _reduced(counter, op, grad, needs)
    counter.add_pass("pool_window", counter.elements(op.outputs[0]), window)


def _count_losses(counter: _Counter, op: Op, grad: bool, needs: list[bool]) -> None:
    _swept("norm", backward=2.0, reads=True)(counter, op, grad, needs)
    counter.launches["pass_fwd"] += counter.calls


def _count_recurrent(counter: _Counter, op: Op, grad: bool, needs: list[bool]) -> None:
    """Every weight matrix meets every element of the sequence; a layer's steps run one after the other."""
    values = counter.graph.values
    rows, batched = _positions(values[op.outputs[0]].shape[:-1])
    shape = values[op.outputs[0]].shape
    if len(shape) == 3:
        steps, layers = shape[bool(op.attrs.get("batch_first"))], values[op.outputs[1]].shape[0]
        if not isinstance(steps, Affine) and not isinstance(layers, Affine):
            counter.launch_product(frozen=not grad, times=STEP_LAUNCHES * steps * layers)
    for index in op.inputs[1:]:
        if index is not None and values[index].role == "parameter" and len(values[index].shape) == 2:
            width, inner = (s for s in values[index].shape if not isinstance(s, Affine))
            counter.product(inner, width, 1, 1, rows, rows, grad, grad and needs[index], 1, batched, True)


def _count_updates(counter: _Counter, needs: list[bool]) -> None:
    """Gradient sums at values used more than once, and the optimizer's pass over the parameters."""
    graph = counter.graph
    users: dict[int, int] = {}
    for op in graph.ops:
        for index in op.inputs:
            if index is not None and needs[index] and graph.values[index].role == "activation":
                users[index] = users.get(index, 0) + 1
    for index, count in users.items():
        if count > 1:
            sample, fixed = counter.elements(index)
            counter.add_elements("fan", (sample * (count - 1), fixed * (count - 1)))
            counter.launches["pass_bwd"] += count - 1
    for index, value in enumerate(graph.values):
        if value.role == "parameter" and value.trainable:
            counter.add_elements("update", counter.elements(index))
            counter.launches["parameter"] += 1


_normalized, _reduced = _swept("norm", "norm"), _swept("pool_in", reads=True)


def _count_normalization(counter: _Counter, op: Op, grad: bool, needs: list[bool]) -> None:
    """Count a pass; batch norms of training read bfloat16 no faster than float32.

    PyTorch leaves those in float16 to cuDNN, and runs those in bfloat16 by kernels of its own.
    """
    value = counter.graph.values[op.outputs[0]]
    if counter.plain or spec_of(op.kind).kind != "batch_norm":
        return _normalized(counter, op, grad, needs)
    wide = 2 if value.dtype == "bfloat16" else 1
    sample, fixed = counter.elements(op.outputs[0])
    counter.sweep("norm", (sample * wide, fixed * wide), "norm_fwd", "norm_bwd", float(grad))
    positions, _ = _positions((*value.shape[:1], *value.shape[2:]))
    counter.add_pass(NORM_CHANNEL, (positions / 2 if value.dtype == "float16" else positions, 0.0))


_COUNTS: Mapping[Work, _Count] = {
    Work.CONVOLUTION: _count_convolution,
    Work.TRANSPOSED_CONVOLUTION: partial(_count_convolution, transposed=True),
    Work.PRODUCT: _count_product,
    Work.ADDED_PRODUCT: partial(_count_product, first=1),
    Work.ATTENTION: _count_attention,
    Work.RECURRENT: _count_recurrent,
    Work.NORMALIZATION: _count_normalization,
    Work.SOFTMAX: _normalized,
    Work.ACTIVATION: _swept("activation"),
    Work.ARITHMETIC: _swept("binary"),
    Work.DROPOUT: _swept("binary"),
    Work.SUM: _swept("binary", backward=0.0),
    Work.COPY: _count_copy,
    Work.JOIN: partial(_count_copy, joins=True),
    Work.POOLING: _count_pooling,
    Work.REDUCTION: _reduced,
    Work.LOSS: _count_losses,
}
"""How the work of an operator's entry (`OpSpec.work`) is counted."""
