"""Recurrent layers and cells: nn.LSTM, nn.GRU and nn.RNN as cuDNN, oneDNN and PyTorch's own loops run them.

On CUDA a module is one call of cuDNN. On the CPU an LSTM without projections is one call of oneDNN for each
layer and direction, all others are loops of PyTorch's own operators over the steps: `cpu_footprint` writes
down what they allocate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from torchedge.graphs.footprints import FILLS, IN_ORDER, Footprint, FootprintEvent, StorageSize
from torchedge.graphs.sizes import poly
from torchedge.ops.kernels import kernel
from torchedge.ops.specs import Call, LoadClass, OpSpec, Work, spec
from torchedge.ops.strides import Sizes, Strided


def recurrent_flops(call: Call) -> int:
    """2 · steps · weights: every weight matrix is applied to every element of batch and sequence."""
    x = call.ins[0] or (1,)
    return 2 * prod(x[:-1]) * sum(prod(s) for s in call.ins[1:] if s is not None and len(s) == 2)


def recurrent_shapes(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> tuple[Sizes, ...]:
    """X (L, N, m) or (N, L, m), states (layers · directions, N, h) -> outputs of every step, last states."""
    x, h = ins[0] or (), ins[1] or ()
    width = h[-1] * (2 if attrs.get("bidirectional") else 1)
    states = [s for s in ins[1:3] if s is not None and len(s) == 3]
    return ((*x[:2], width), *states)


@dataclass(frozen=True, slots=True)
class CudnnLayer:
    """A kind of layer in NVIDIA's cuDNN 9, measured on an H200 (`benchmarks/recurrent_memory.py`).

    Values for each step, hidden unit and sample. reserve: kept for the backward pass. small, large: workspace
    for few hidden units (one kernel runs all steps) and for many: values of each direction, and in any case;
    copies of the weights, and of the sequence.
    """

    reserve: int
    small: tuple[int, int, int, int]
    large: tuple[int, int, int, int]


LAYER_BYTES = 8 * 2**20
"""Workspace of each layer and direction in cuDNN, whatever its size."""
FEW_HIDDEN = 128
"""Most hidden units for which cuDNN keeps the weights of a layer on the chip."""
STEP_LAUNCHES = 0.4
"""Launches of products that take as long as one step of one layer and direction in cuDNN: 17 us forward and
23 us backward."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of layer.

    Values for each step, hidden unit and sample. gates: results of products. kept: what a loop of PyTorch
    keeps; passing: what a step of its backward pass allocates. cudnn: the same layer there.
    """

    gates: int
    kept: int
    passing: int
    cudnn: CudnnLayer


_LSTM = _Kind(4, 7, 10, CudnnLayer(5, (9, 12, 1, 1), (10, -6, 1, 2)))
_GRU = _Kind(3, 7, 7, CudnnLayer(6, (6, 11, 2, 3), (8, -4, 1, 2)))
_RNN = _Kind(1, 1, 3, CudnnLayer(1, (6, 7, 4, 3), (9, -3, 1, 2)))


@dataclass(frozen=True, slots=True)
class _Layers:
    """The sizes of a call. width: of the output of one direction, `hidden` but for projections.

    weights: elements of all parameters. params: how many a layer and direction has. states: 2 for an LSTM,
    else 1. copied: the sequence is copied first, since it does not lie step by step. drops: with dropout.
    """

    steps: int
    batch: int
    features: int
    hidden: int
    width: int
    layers: int
    directions: int
    weights: int
    params: int
    states: int
    copied: bool
    drops: bool

    def features_of(self, layer: int) -> int:
        """Return the features that a layer reads."""
        return self.directions * self.width if layer else self.features


def _layers(call: Call, kind: _Kind) -> _Layers:
    """Return the sizes of a call."""
    ins, attrs = call.ins, call.attrs
    assert ins[0] is not None and ins[1] is not None
    states = 2 if kind is _LSTM else 1
    batch, steps = ins[0][:2] if attrs["batch_first"] else ins[0][1::-1]
    directions = 2 if attrs.get("bidirectional") else 1
    params = [size for size in ins[1 + states :] if size is not None]
    count = ins[1][0]
    return _Layers(
        steps,
        batch,
        ins[0][2],
        (ins[states] or ins[1])[2],
        ins[1][2],
        count // directions,
        directions,
        sum(map(prod, params)),
        len(params) // count,
        states,
        bool(attrs.get("copied", attrs["batch_first"])),
        bool(attrs.get("dropout")) and bool(attrs.get("train")),
    )


# CUDA -------------------------------------------------------------------------------------------------------
def _reserve(call: Call, kind: _Kind) -> tuple[int, ...]:
    """CuDNN keeps the gates and states of every step, and what each layer but the last puts out.

    Within 3 % of what cuDNN 9.19 takes on an H200, by `benchmarks/recurrent_memory.py`.
    """
    s = _layers(call, kind)
    if call.backend == "cpu":
        return ()
    values = (kind.cudnn.reserve + 1) * s.layers - 1
    if s.width != s.hidden:
        values += s.layers
    unit = s.steps * s.batch * s.directions * call.out_item_size()
    return (unit * (s.hidden * values + (s.layers * s.width if s.width != s.hidden else 0)),)


def _workspace(call: Call, kind: _Kind) -> tuple[int, ...]:
    """Return the bytes that a call takes while it runs, forward or backward."""
    s = _layers(call, kind)
    item = call.out_item_size()
    copy = s.steps * s.batch * s.features * item if s.copied else 0
    if call.backend == "cpu":
        return (_inference_scratch(s, kind, _fused(s, kind, call)) * item,)
    fits = s.hidden <= FEW_HIDDEN and s.width == s.hidden
    each, once, weights, source = kind.cudnn.small if fits else kind.cudnn.large
    values = (each * s.directions + once) * s.hidden + source * s.features
    elements = values * s.steps * s.batch + weights * s.weights
    return (copy + LAYER_BYTES * s.layers * s.directions + elements * item,)


# CPU --------------------------------------------------------------------------------------------------------
def _padded(floats: int) -> int:
    """OneDNN's row lengths: whole cache lines of 16 floats, and never a multiple of 256."""
    padded = -(-floats // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _packed(s: _Layers, features: int) -> int:
    """Elements that oneDNN takes during one call: both matrices reordered, and the gates of all steps."""
    return (features + s.hidden + s.steps * s.batch) * _padded(4 * s.hidden)


def _onednn_workspace(s: _Layers, features: int) -> int:
    """Elements that oneDNN keeps for backward: gates of all steps, states between them, their gradients."""
    states = 6 * _padded(max(features, s.hidden)) + 4 * s.hidden
    each = _padded(4 * s.hidden) + _padded(s.hidden)
    return s.batch * (s.steps * each + (s.steps + 1) * states)


def _fused(s: _Layers, kind: _Kind, call: Call) -> bool:
    return kind is _LSTM and s.width == s.hidden and call.out_item_size() == 4


def _inference_scratch(s: _Layers, kind: _Kind, fused: bool) -> int:
    """Elements beside the output in an inference on the CPU, at the layer that takes most."""
    sequence, result = s.steps * s.batch, s.steps * s.batch * s.directions * s.width
    copy = sequence * s.features if s.copied else 0
    most = 0
    for layer in range(s.layers):
        features = s.features_of(layer)
        if fused:
            states = 2 * (s.steps + 1) * (_padded(max(features, s.hidden)) + _padded(s.hidden))
            weights = 4 * s.hidden * (features + s.hidden) * (1 if s.params > 2 else 2)
            taken = copy + weights + s.batch * (states + 5 * s.hidden)
            source = result * s.directions
        else:
            products, own = sequence * kind.gates * s.hidden, copy if layer == 0 else 0
            steps = result * s.directions  # of both directions until they are joined
            taken, source = max(products + steps, s.directions * products + own - sequence * s.width), result
        most = max(most, taken + (source if layer else 0))
    return most


@dataclass(frozen=True, slots=True)
class _Kept:
    """Storages of a layer: result, input (and copies), what each direction keeps, the mask of its dropout."""

    result: int
    sources: list[int]
    directions: list[tuple[int, ...]]
    mask: int | None


class _CpuRun:
    """Writes down the storages of a layer's forward and backward call, by number."""

    def __init__(self, call: Call, kind: _Kind, layers: _Layers) -> None:
        self.call, self.kind, self.layers = call, kind, layers
        self.fused = _fused(layers, kind, call)
        present = [slot for slot, size in enumerate(call.ins) if size is not None]
        self.places = {slot: place for place, slot in enumerate(present)}
        outputs = range(len(present), len(present) + len(call.outs))
        self.arriving = [place + len(outputs) for place in outputs]
        tensors = (*range(len(present)), *outputs, *outputs)  # the last ones: gradients of the outputs
        self.sizes = [StorageSize(place, (0, 0, 0), 0) for place in tensors]
        self.forward: list[int] = []
        self.saved: list[int] = []
        self.backward: list[tuple[FootprintEvent, int, int, int]] = []

    def footprint(self) -> Footprint:
        """Run all layers forward and backward; return what was written down."""
        s, kept = self.layers, list[_Kept]()
        for layer in range(s.layers):
            kept.append(self._layer(layer, kept[-1].result if kept else 0))
        total = s.layers * s.directions * s.batch
        states = [self._new(total * size) for size in (s.width, s.hidden)[: s.states]]
        self._save(*range(1, 1 + s.states))
        gradient = self.arriving[0]
        for layer in reversed(range(s.layers)):
            gradient = self._layer_back(layer, kept[layer], gradient)
        self._give(gradient, 0, dense=not s.copied)
        for slot in range(1, 1 + s.states):
            if self.call.need(slot):
                self._give(self._later(prod(self.call.ins[slot] or ())), slot)
        return Footprint(
            tuple(self.sizes),
            (*range(len(self.places)), kept[-1].result, *states),
            tuple(self.arriving),
            tuple(self.forward),
            tuple(self.saved),
            tuple(self.backward),
        )

    def _layer(self, layer: int, source: int) -> _Kept:
        s, kind = self.layers, self.kind
        sequence, features = s.steps * s.batch, s.features_of(layer)
        sources, outputs, directions, products = [source], list[int](), list[tuple[int, ...]](), list[int]()
        for direction in range(s.directions):
            if s.copied and layer == 0 and not (self.fused and direction):
                sources.append(self._new(sequence * features))
            if self.fused:
                outputs.append(self._new(sequence * s.hidden))
                kept = [self._new(2 * s.batch * s.hidden), self._new(_onednn_workspace(s, features))]
                if s.params == 2:  # PyTorch makes zeros of the weights' shapes in the biases' place
                    kept.append(self._new(4 * s.hidden * (features + s.hidden)))
                self._free(self._new(_packed(s, features)))
                directions.append(self._save(outputs[-1], *kept))
            else:
                products.append(self._new(sequence * kind.gates * s.hidden))
                self._free(*products[:-1][-1:])
                projected = s.width if s.width != s.hidden else 0
                directions.append(self._save(self._new(sequence * (kind.kept * s.hidden + projected))))
                outputs.append(self._new(sequence * s.width))
        self._save(*(sources[1:] or sources))
        result, mask = outputs[0], None
        if s.directions > 1:
            result = self._new(sequence * s.directions * s.width)
            self._free(*[number for number in outputs if number not in self.saved])
        self._free(*products[-1:])
        if s.drops and layer < s.layers - 1:
            mask, dropped = (self._new(sequence * s.directions * s.width) for _ in range(2))
            self._save(mask)
            self._free(*[number for number in (result,) if number not in self.saved])
            result = dropped
        return _Kept(result, sources, directions, mask)

    def _layer_back(self, layer: int, kept: _Kept, gradient: int) -> int:
        """Return the storage of the gradient of the layer's input."""
        s, kind, ins = self.layers, self.kind, self.call.ins
        sequence, features = s.steps * s.batch, s.features_of(layer)
        if kept.mask is not None:
            arrived, gradient = gradient, self._later(sequence * s.directions * s.width)
            self._drop(kept.mask, arrived)
        total = None
        for direction in reversed(range(s.directions)):
            own = kept.directions[direction]
            first = 1 + s.states + (layer * s.directions + direction) * s.params
            slots = [slot for slot in range(first, first + s.params) if self.call.need(slot)]
            if self.fused:
                passing = self._later((sequence + 4 * s.batch) * s.hidden)
                fresh = self._later(sequence * features)
                parameters = [self._later(prod(ins[slot] or ())) for slot in slots]
                turned = [4 * s.hidden * _padded(n) for n in (features, s.hidden) if n != _padded(n)]
                self._drop(self._later(_packed(s, features) + sum(turned)), passing, *own)
            else:
                weights = 2 * prod(ins[first + 1] or ())
                passing = self._later(kind.passing * s.batch * s.hidden + weights)
                parameters = [self._later(prod(ins[slot] or ())) for slot in slots if slot != first]
                self._drop(passing, *own)
                steps, stacked = (self._later(sequence * kind.gates * s.hidden) for _ in range(2))
                self._drop(steps)
                fresh = self._later(sequence * features * (layer > 0 or self.call.need(0)))
                parameters[:0] = [self._later(prod(ins[slot] or ())) for slot in slots if slot == first]
                self._drop(stacked)
            if total is None:
                total = fresh
            else:
                self._drop(fresh)
            for slot, number in zip(slots, parameters, strict=True):
                self._give(number, slot)
        self._drop(gradient, *kept.sources)
        assert total is not None
        return total

    def _new(self, elements: int) -> int:
        self.forward.append(self._number(elements) + 1)
        return self.forward[-1] - 1

    def _free(self, *numbers: int) -> None:
        self.forward += [-number - 1 for number in numbers]

    def _save(self, *numbers: int) -> tuple[int, ...]:
        self.saved += [number for number in numbers if number not in self.saved]
        return numbers

    def _later(self, elements: int) -> int:
        self.backward.append((FootprintEvent.NEW, self._number(elements), 0, 0))
        return self.backward[-1][1]

    def _drop(self, *numbers: int) -> None:
        self.backward += [(FootprintEvent.DROP, number, 0, 0) for number in numbers]

    def _give(self, number: int, slot: int, dense: bool = True) -> None:
        """Hand a storage over as the gradient of an input that needs one."""
        if self.call.need(slot):
            self.backward.append(
                (FootprintEvent.GRADIENT, number, self.places[slot], IN_ORDER | FILLS * dense)
            )
        self._drop(number)

    def _number(self, elements: int) -> int:
        self.sizes.append(StorageSize(-1, poly(elements), self.call.out_item_size()))
        return len(self.sizes) - 1


def cpu_footprint(call: Call, kind: _Kind) -> Footprint:
    """Return what a layer allocates on the CPU, forward and backward.

    Sizes of oneDNN leave out the padding to pages. The steps of a loop are taken together: all that autograd
    keeps of them is freed before their gradients are stacked.
    """
    return _CpuRun(call, kind, _layers(call, kind)).footprint()


def layer_memory(call: Call, kind: _Kind) -> Footprint:
    """Return what a layer keeps and takes: cuDNN's, or forward and backward on the CPU."""
    if call.backend == "cpu" and True in call.needs:
        return cpu_footprint(call, kind)
    scratch = _workspace(call, kind)
    return kernel(call, (0, -1), _reserve(call, kind), scratch, scratch)


# cells ------------------------------------------------------------------------------------------------------
def cell_memory(
    call: Call, saves: tuple[int, ...], hidden: tuple[int, ...], scratch: tuple[int, ...]
) -> Footprint | None:
    """CUDA's fused cells keep the gates of input and hidden state, and those behind the activations.

    hidden, scratch: multiples of the output.
    """
    if call.backend == "cpu":
        return None
    size = call.out_bytes(0)
    return kernel(call, saves, [n * size for n in hidden], (), [n * size for n in scratch])


_CELL_PARAMS = "input hx w_ih w_hh b_ih b_hh"
_PARAMS = "input hx params has_biases num_layers dropout train bidirectional batch_first"

_recurrent = partial(
    spec, load=LoadClass.REUSABLE, work=Work.RECURRENT, autocast="lower", flops=recurrent_flops
)


def _strides(x: Strided) -> Sizes | None:
    """With the batch first, the result is a view of one that lies step by step."""
    if not x.attrs.get("batch_first") or x.wanted[:-1] != x.shape[:-1]:
        return None
    batch, _, width = x.wanted
    return (width, batch * width, 1)


def _layered(kind: _Kind, name: str, targets: str = "") -> OpSpec:
    return _recurrent(
        name,
        _PARAMS,
        targets,
        infer_many=recurrent_shapes,
        strides=_strides,
        composite="recurrent",
        memory=partial(layer_memory, kind=kind),
    )


OPS = (
    _layered(_LSTM, "lstm"),
    _layered(_GRU, "gru"),
    _layered(_RNN, "rnn_tanh", "rnn_relu"),
    _recurrent(
        "lstm_cell",
        _CELL_PARAMS,
        memory=partial(cell_memory, saves=(0, 1, 2, -2), hidden=(4, 4, 4), scratch=(4,)),
    ),
    _recurrent(
        "gru_cell", _CELL_PARAMS, memory=partial(cell_memory, saves=(0, 1), hidden=(3, 3, 5), scratch=(3, 3))
    ),
    _recurrent("rnn_tanh_cell", "input", "rnn_relu_cell"),
)
