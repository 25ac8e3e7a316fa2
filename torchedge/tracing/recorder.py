"""Records the operators of a traced forward pass and builds a ForwardGraph from them."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from torchedge.errors import CaptureError
from torchedge.graphs import FLOATING, ITEM_SIZES, ForwardGraph, Op, Value
from torchedge.graphs.footprints import Footprint
from torchedge.graphs.graph import Role
from torchedge.graphs.sizes import (
    BATCH_PRIME,
    LARGEST_CONSTANT,
    Affine,
    NotAffineError,
    decode_dim,
    decode_shape,
)
from torchedge.graphs.steps import GraphBuilder
from torchedge.ops import registry, spec_of
from torchedge.ops.gradients import extend_needs, makes_leaf
from torchedge.tracing.checkpointing import KEEPS_INPUTS, AutogradState
from torchedge.tracing.copies import is_library, where
from torchedge.tracing.device_answers import PLAIN_CPU, Accelerator, tensor_answer
from torchedge.tracing.example_values import ExampleValues, mapped
from torchedge.tracing.footprints import footprint_of, valueless
from torchedge.tracing.torch_calls import words

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ITEM_SIZES if hasattr(torch, name)
}

_MOST_OPS = 100_000
_MOST_VALUES = 4 * _MOST_OPS
_CPU, _META = torch.device("cpu"), torch.device("meta")
_SPARSE = {"embedding": "arg4", "embedding_bag": "arg5"}
"""The argument by which an operator makes sparse gradients."""
_PLAIN = (int, float, str, bool, type(None))
_NO_TENSORS = frozenset((*_PLAIN, tuple, list, dict, set, OrderedDict))


class Token:
    """Connects a value of the graph to its Python object; the end of the token releases the value."""

    __slots__ = ("index", "released")

    def __init__(self, index: int, released: list[int]) -> None:
        self.index = index
        self.released = released

    def __del__(self) -> None:
        if hasattr(self, "released"):  # torch.compile makes objects of any type without their values
            self.released.append(self.index)


class TracedTensor(torch.Tensor):
    """A meta tensor with the batch prime as batch size, standing for one value of the graph."""

    # Inside a handler the tracing mode is off, and plain PyTorch must see plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    token: Token
    sizes: torch.Size
    dtype_name: str
    recorder: Recorder

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows through the value: models choose checkpointing by it."""
        return self.recorder.needs_gradient(self.token.index)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Let the value require a gradient as `requires_grad_` does."""
        self.recorder.require_gradient(self, value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the value is none that autograd computes."""
        return not self.requires_grad or self.recorder.is_own_leaf(self.token.index)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """An object of no use in place of autograd's node, None where there is none."""
        return None if self.is_leaf else _NODE

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The sizes, without a call of the tracing mode."""
        return self.recorder.shown(self.sizes, sys._getframe(1))

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the capture inside the model, the meta device inside the tracing mode."""
        if not torch._C._len_torch_function_stack():
            return _META
        answer: torch.device = self.recorder.device_answer("device", sys._getframe(1))
        return answer

    def register_hook(self, hook: Any) -> Any:
        """Return the handle of a hook of the backward pass, which is not followed."""
        self.recorder.note(
            f"a tensor's hook (register_hook{where()}) is not followed: memory is too low where it allocates"
        )
        return RemovableHandle(OrderedDict())

    def retain_grad(self) -> None:
        """Note that the gradient stays, which is not followed."""
        self.recorder.note(
            f"retain_grad{where()} is not followed: the gradient that it keeps counts as freed"
        )

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.sizes)

    def size(self, dim: int | None = None) -> Any:
        """Return the sizes, or one of them."""
        sizes = self.recorder.shown(self.sizes, sys._getframe(1))
        return sizes if dim is None else sizes[dim]

    def __len__(self) -> int:
        if self.sizes[0] >= LARGEST_CONSTANT and not is_library(sys._getframe(1)):
            self.recorder.reads_batch = True
        return self.sizes[0]


_NODE = SimpleNamespace(next_functions=(), name=lambda: "Node")
"""Stands for a node of autograd."""


class BatchSize(int):
    """A size that follows the batch, for the model's code: comparisons and divisions of it are noticed."""

    __slots__ = ()

    def _compared(self, other: Any, answer: Any, least: int) -> Any:
        """Notice a comparison with a number above `least`, whose answer differs between batch sizes."""
        recorder = active_recorder()
        if recorder is not None and isinstance(other, (int, float)) and _is_constant(other, least):
            recorder.reads_batch = True
        return answer

    def __eq__(self, other: object) -> Any:
        return self._compared(other, int.__eq__(self, other), 0)

    def __ne__(self, other: object) -> Any:
        return self._compared(other, int.__ne__(self, other), 0)

    def __lt__(self, other: int) -> Any:
        return self._compared(other, int.__lt__(self, other), 1)

    def __le__(self, other: int) -> Any:
        return self._compared(other, int.__le__(self, other), 0)

    def __gt__(self, other: int) -> Any:
        return self._compared(other, int.__gt__(self, other), 0)

    def __ge__(self, other: int) -> Any:
        return self._compared(other, int.__ge__(self, other), 1)

    def __hash__(self) -> int:
        recorder = active_recorder()
        if recorder is not None and not is_library(sys._getframe(1)):  # a key of a dict or a set
            recorder.reads_batch = True
        return int.__hash__(self)


def _is_constant(number: Any, least: int) -> bool:
    """Return whether a number above `least` is the model's own, not a size that follows the batch."""
    if type(number) is BatchSize or not least < number < _LARGEST_SIZE:
        return False
    if number < LARGEST_CONSTANT or isinstance(number, float):
        return True
    try:
        decode_dim(number)
    except NotAffineError:
        return True
    return False


def _follows(name: str) -> Any:
    """Return an operation of whole numbers whose result follows the batch as a size does."""
    operation = getattr(int, name)

    def run(*numbers: Any) -> Any:
        result = operation(*numbers)
        return BatchSize(result) if type(result) is int and result >= LARGEST_CONSTANT else result

    return run


def _read(name: str) -> Any:
    """Return an operation that makes a plain number of a size: the model may branch on it unnoticed."""
    operation = getattr(int, name)

    def run(*numbers: Any) -> Any:
        recorder = active_recorder()
        if recorder is not None:
            recorder.reads_batch = True
        return operation(*numbers)

    return run


for _name in ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__"):
    setattr(BatchSize, _name, _follows(_name))
for _name in words(
    """
    __int__ __float__ __floordiv__ __rfloordiv__ __truediv__ __rtruediv__ __mod__ __rmod__ __divmod__
    __rdivmod__ __rsub__ __neg__ __pow__ __lshift__ __rshift__ __and__ __or__ __xor__ __invert__ __round__
    __ceil__ __floor__ __trunc__ bit_length bit_count
    """
):
    setattr(BatchSize, _name, _read(_name))


_UNSEEN = words("numel log2 log10 isqrt gcd lcm factorial comb perm numpy np")
"""Names in code that computes with whole numbers where no operation of a BatchSize is called."""
_LARGEST_SIZE = 2**53


def _computes_unseen(frame: FrameType) -> bool:
    """Return whether code that reads a size may compute with it unnoticed (`x.shape.numel()`, `log2`)."""
    names = frame.f_code.co_names
    return not _UNSEEN.isdisjoint(names) or ("log" in names and ("math" in names or "log" in frame.f_globals))


def without_batch_sizes(item: Any) -> Any:
    """Return an argument of a call with plain numbers in place of sizes that follow the batch."""
    return mapped(item, lambda entry: int.__add__(entry, 0) if type(entry) is BatchSize else entry)


def plain(item: Any) -> Any:
    """Return an attribute as immutable plain data: sizes as affine functions, torch types as text."""
    kind = type(item)
    if kind is int:
        return item if item < LARGEST_CONSTANT else _size_or_number(item)
    if kind in _PLAIN or kind is Affine:
        return item
    if isinstance(item, (tuple, list)):
        return tuple([plain(i) for i in item])
    if isinstance(item, slice):
        return slice(plain(item.start), plain(item.stop), plain(item.step))
    if item is Ellipsis:
        return "..."
    if isinstance(item, Mapping):
        return {str(k): plain(v) for k, v in item.items()}
    return str(item).removeprefix("torch.")


def _size_or_number(item: int) -> int | Affine:
    try:
        return decode_dim(item)
    except NotAffineError:
        return item  # a large constant such as sys.maxsize in a slice, no size


class _Active(threading.local):
    """The recorders of the traces that this thread runs."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_active = _Active()


def active_recorder() -> Recorder | None:
    """Return the recorder of this thread's trace, if any: programs from files use it."""
    return _active.recorders[-1] if _active.recorders else None


Leaves = Callable[[], Iterable[tuple[str, torch.Tensor, Role]]]
"""Returns every tensor of the model with its name and role; called once, at the first such tensor."""


def leaves_of(model: torch.nn.Module) -> Leaves:
    """Return the parameters and buffers of a module, and the tensors in its plain attributes."""

    def leaves() -> Iterator[tuple[str, torch.Tensor, Role]]:
        names_in_file = getattr(model, "names_in_file", {})
        weights: list[tuple[str, torch.Tensor, Role]] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in vars(module).items():
                if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor):
                    yield prefix + name, value, "constant"
            for home, role in ((module._buffers, "buffer"), (module._parameters, "parameter")):
                for name, tensor in home.items():
                    if tensor is not None:
                        key = prefix + name
                        weights.append((names_in_file.get(key, key), tensor, role))  # type: ignore[arg-type]
        yield from reversed(weights)  # tied parameters get their first name

    return leaves


class Recorder:
    """Collects values and operators while a model is traced.

    leaves: the model's own tensors. fixed_batch: the one batch size to trace, None: every. accelerator: the
    device that the model seems to run on.
    """

    def __init__(
        self, leaves: Leaves, fixed_batch: int | None = None, accelerator: Accelerator = PLAIN_CPU
    ) -> None:
        self._builder = GraphBuilder()
        self.values, self.ops = self._builder.values, self._builder.ops
        self.sizes: list[tuple[int, ...]] = []  # of each value, at the batch size of the trace
        self.releases: list[tuple[int, ...]] = []
        self._released: list[int] = []
        self._needs: list[bool] = []
        self._judged = 0
        self._tokens = self._booked = 0
        self.scopes: list[str] = [""]
        self.autograd = AutogradState()
        self._trains = torch.is_grad_enabled()
        self.example = ExampleValues(self.values)
        self.fixed_batch = fixed_batch
        self.batch = fixed_batch or BATCH_PRIME
        self.folded: dict[int, torch.Tensor] = {}
        self._owners: dict[int, ref[TracedTensor]] = {}
        self._latest: dict[int, int] = {}  # the value that a tensor's storage has by now
        self._hiding = set[int]()  # results that are views of what their operator made
        self._views: dict[int, Op] = {}  # the operator behind each value that shares another's storage
        self.casts: dict[tuple[int, torch.dtype], Any] = {}
        self.accelerator = accelerator
        self.questions: dict[str, None] = {}  # about the device, with where they were asked
        self.own_autocasts = 0
        self.shows_batch = self.reads_batch = False
        self.notes: list[str] = []
        self.has_complex = False
        self._named_leaves = leaves
        self._leaves: dict[int, int] = {}
        self._metas: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        self._named: dict[int, tuple[str, torch.Tensor, Role]] | None = None

    def set_leaves(self, leaves: Leaves) -> None:
        """Replace the model's own tensors, before the first of them is recorded."""
        self._named_leaves = leaves

    # values -----------------------------------------------------------------------------------

    def add_value(
        self, name: str, sizes: Sequence[int], dtype: str, role: Role, alias: int | None = None
    ) -> int:
        """Append a value and return its index."""
        self.sizes.append(tuple(sizes))
        shape = self.sizes[-1] if self.fixed_batch is not None else decode_shape(self.sizes[-1])
        self.has_complex = self.has_complex or dtype[0] == "c"
        return self._builder.add(name, shape, dtype, role, alias=alias)

    def wrap(self, tensor: torch.Tensor, index: int) -> TracedTensor:
        """Return the stand-in of a value for the model's code."""
        traced = tensor.as_subclass(TracedTensor)
        traced.sizes = torch.Tensor.size(tensor)
        traced.dtype_name = self.values[index].dtype
        traced.token = self.token(index)
        traced.recorder = self
        if self.values[index].alias is None:
            self._owners[index] = ref(traced)
            if tensor._base is not None:
                self._hiding.add(index)
        return traced

    def _owner(self, index: int) -> TracedTensor | None:
        """Return the tensor of a value that is no view; None where it is gone."""
        owner = self._owners.get(index)
        return None if owner is None else owner()

    def needs_gradient(self, index: int) -> bool:
        """Return whether a gradient flows through a value, as far as the graph is known."""
        extend_needs(self._needs, self.values, self.ops[self._judged :])
        self._judged = len(self.ops)
        return self._needs[index]

    def is_own_leaf(self, index: int) -> bool:
        """Return whether the model made a value a leaf by `requires_grad_()`."""
        return index in self._views and makes_leaf(self._views[index])

    def require_gradient(self, tensor: TracedTensor, requires_grad: bool = True) -> None:
        """Record that a model makes a value require a gradient, if none flows through it already.

        What reads the tensor from here on is differentiated although nothing before it is trained.
        """
        old = tensor.token.index
        if not (requires_grad and self._trains and tensor.dtype_name in FLOATING) or self.needs_gradient(old):
            return
        attrs, form = {"requires_grad": True}, (tensor.sizes, tensor.dtype_name)
        (index,) = self.add_call("requires_grad", [old], attrs, [form], old, inplace=True)
        if old in self.example:
            self.example.add_call("requires_grad", torch.Tensor.detach, [tensor], {}, self.index_of, [index])
        tensor.token = self.token(index)

    def overwrite(self, tensor: TracedTensor, index: int) -> None:
        """Let a tensor have the value that an in-place operator wrote, and the tensor that it is a view of.

        Autograd then takes the operator as one on the whole tensor (`CopySlices`), and its views anew
        (`AsStridedBackward`).
        """
        root = old = tensor.token.index
        tensor.token = self.token(index)
        is_view = False
        while root in self._views:
            is_view = is_view or not self._views[root].inplace
            root = self.values[root].alias  # type: ignore[assignment]
        if not (is_view or root in self._hiding) or self.values[root].role not in ("activation", "input"):
            self._latest[root] = index
        elif self.ops[-1].grad and (self.needs_gradient(old) or self.needs_gradient(index)):
            whole, base = self._owner(root), self._latest.get(root, root)
            (written,) = self.add_call("copy_slices", [base, index], {}, [self._form(base)], base, True)
            self._latest[root], token = written, self.token(written)
            if whole is not None and whole is not tensor:
                whole.token = self._view_again(whole, written) if root in self._hiding else token
            tensor.token = self._view_again(tensor, written)

    def run_function(self, function: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a custom autograd function; an operator behind those of its forward has its memory.

        That is what its own forward and backward take on meta tensors, with what `ctx` keeps. Where they
        cannot run so, autograd is taken to keep every input.
        """
        if function is KEEPS_INPUTS:  # of the region, which needs a node where gradients are recorded
            with torch._C.DisableTorchFunction():
                return torch.empty(0, requires_grad=True).view(0)
        before = {id(t): t.token.index for t in (*args, *kwargs.values()) if type(t) is TracedTensor}
        inputs: list[int] = []
        needs: list[bool] = []
        with torch._C.DisableTorchFunction():
            shapes = self._arguments((args, kwargs), inputs, needs, 2) if before else (args, kwargs)
        if True not in needs:
            return apply(*args, **kwargs)
        with self.autograd.function(self.note) as region:
            results = apply(*args, **kwargs)
        several = results if isinstance(results, tuple) else (results,)
        if not region or any(type(item) is not TracedTensor for item in several if torch.is_tensor(item)):
            return results
        outputs: list[TracedTensor] = [item for item in several if type(item) is TracedTensor]
        with torch._C.DisableTorchFunction():
            on_every_batch = self.fixed_batch is None
            footprint = footprint_of(function.apply, shapes[0], shapes[1], needs, decoded=on_every_batch)
            if footprint is not None and len(footprint.tensors) != len(inputs) + len(outputs):
                footprint = None
            self._note_function(function.__name__, footprint)
            old = [output.token.index for output in outputs]
            new = self.add_call("custom_function", inputs, {"body": region}, [self._form(k) for k in old])
            written = [before.get(id(output), k) != k for output, k in zip(outputs, old, strict=True)]
            self.ops[-1] = replace(self.ops[-1], footprint=footprint, inplace=True in written[:1])
            for place, (index, k) in enumerate(zip(new, old, strict=True)):
                output, self.values[index] = outputs[place], replace(self.values[index], alias=k)
                if written[place]:
                    self._views[index] = self.ops[-1]
                    self.overwrite(output, index)
                elif id(output) in before:  # an input as it is: PyTorch returns a view of it
                    outputs[place] = self.wrap(output, index)
                else:
                    output.token, self._owners[index] = self.token(index), ref(output)
        ends = iter(outputs)
        returned = tuple([next(ends) if torch.is_tensor(item) else item for item in several])
        return returned if several is results else returned[0]

    def _note_function(self, name: str, footprint: Footprint | None) -> None:
        memory = "its memory that of its own forward and backward"
        if footprint is None:
            memory = "and every input counts as kept, since it does not run on tensors without values"
        self.note(
            f"{name} is a custom autograd function: its time is that of the operators of its forward, which "
            f"count again in the backward pass, {memory}"
        )

    def _arguments(self, item: Any, inputs: list[int], needs: list[bool], nesting: int) -> Any:
        """Return arguments of a function on meta tensors; collect the tensors' values, and which are trained.

        Those in containers are none of autograd's. nesting: containers to the function's own arguments.
        """
        if torch.is_tensor(item):
            index = self.index_of(item)
            inputs.append(index)
            needs.append(not nesting and self.needs_gradient(index))
            return valueless(self.meta_of(item))
        if type(item) in (tuple, list):
            return type(item)([self._arguments(part, inputs, needs, nesting - 1) for part in item])
        if type(item) is dict:
            return {key: self._arguments(part, inputs, needs, nesting - 1) for key, part in item.items()}
        return without_batch_sizes(item)

    def _view_again(self, tensor: TracedTensor, whole: int) -> Token:
        """Return the value of a tensor whose storage `whole` has by now."""
        old = tensor.token.index
        (index,) = self.add_call("view_again", [old, whole], {}, [self._form(old)], old)
        return self.token(index)

    def _form(self, index: int) -> tuple[tuple[int, ...], str]:
        return self.sizes[index], self.values[index].dtype

    def token(self, index: int) -> Token:
        """Return a new token for a value."""
        self._tokens += 1
        return Token(index, self._released)

    def leaked(self) -> bool:
        """Return whether stand-ins outlive the trace, in a cache."""
        return self._tokens > self._booked + len(self._released)

    def survivors(self) -> list[TracedTensor]:
        """Return the stand-ins that outlive the trace."""
        import gc

        return [t for t in gc.get_referrers(TracedTensor) if type(t) is TracedTensor and t.recorder is self]

    def inherit(self, tensors: Sequence[TracedTensor], first: Recorder) -> None:
        """Take stand-ins that outlive a first trace as tensors that exist before this one."""
        homes: dict[int, int] = {}
        for tensor in tensors:
            old = root = tensor.token.index
            while (alias := first.values[root].alias) is not None:
                root = alias
            if root not in homes:
                name = f"cached_{len(homes)}"
                homes[root] = self.add_value(name, first.sizes[root], first.values[root].dtype, "constant")
            index = homes[root]
            if old != root:
                (index,) = self.add_call("alias", [index], {}, [first._form(old)], index)
            self.example.take(index, first.example, old)
            tensor.token, tensor.recorder = self.token(index), self

    def feed(self, name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> TracedTensor:
        """Add an input of the graph; returns its stand-in."""
        index = self.add_value(name, sizes, DTYPE_NAMES[dtype], "input")
        return self.wrap(torch.empty(sizes, dtype=dtype, device="meta"), index)

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the value of a tensor; a tensor of the model becomes a value at its first use."""
        if type(tensor) is TracedTensor:
            return tensor.token.index
        index = self._leaves.get(id(tensor))
        return self._leaf(tensor) if index is None else index

    def _leaf(self, tensor: torch.Tensor) -> int:
        leaf = self._model_tensors().get(id(tensor))
        role: Role
        if leaf is None:
            if tensor.device.type == "meta":
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} reaches an operator from code that tracing "
                    "cannot see (a transform of torch.func, a scripted function or a compiled extension)"
                )
            name, role = f"constant_{len(self.values)}", "constant"
        else:
            name, _, role = leaf
        if role == "constant" and any(type(size) is not int for size in tensor.shape):
            raise CaptureError(
                f"{name} is made by a function transform (torch.func) with sizes that follow the batch; "
                "capture the model without it"
            )
        trainable = role == "parameter" and tensor.requires_grad  # its shape never follows the batch
        self.sizes.append(tuple(tensor.shape))
        self.has_complex = self.has_complex or tensor.dtype.is_complex
        index = self._builder.add(name, self.sizes[-1], DTYPE_NAMES[tensor.dtype], role, trainable)
        if role != "parameter":
            self.example.add(index, tensor)
        self._leaves[id(tensor)] = index
        self._alive.append(tensor)
        return index

    def _model_tensors(self) -> dict[int, tuple[str, torch.Tensor, Role]]:
        """Return the model's own tensors with name and role, by id."""
        if self._named is None:
            self._named = {id(t): (name, t, role) for name, t, role in self._named_leaves()}
        return self._named

    def shown(self, sizes: torch.Size, frame: FrameType) -> torch.Size:
        """Return sizes as the code of a frame gets them: the user's notices what follows the batch."""
        if self.fixed_batch is not None or not sizes or is_library(frame):
            return sizes
        if max(sizes) < LARGEST_CONSTANT:
            return sizes
        self.shows_batch = True
        if _computes_unseen(frame):
            self.reads_batch = True
        return torch.Size([BatchSize(size) if size >= LARGEST_CONSTANT else size for size in sizes])

    def counted(self, number: Any, frame: FrameType) -> Any:
        """Return a number of elements as the code of a frame gets it, as `shown` does sizes."""
        follows = type(number) is int and number >= LARGEST_CONSTANT and self.fixed_batch is None
        if not follows or is_library(frame):
            return number
        self.shows_batch = True
        return BatchSize(number)

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or a buffer of the model, which moves with it."""
        leaf = self._model_tensors().get(id(tensor))
        return leaf is not None and leaf[2] != "constant"

    def meta_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor of the same shape and strides, so that no operator reads real parameters."""
        if type(tensor) is TracedTensor:
            return tensor
        meta = self._metas.get(id(tensor))
        if meta is None:
            source = tensor.detach()
            if source.device.type == "meta":
                meta = source
            elif source.layout is not torch.strided:
                raise CaptureError(
                    f"a tensor with layout {source.layout} cannot be captured; expected dense tensors"
                )
            else:
                meta = valueless(source)
            self._metas[id(tensor)] = meta
            self.index_of(tensor)
        return meta

    def note(self, text: str) -> None:
        """Add a note to the graph, once."""
        if text not in self.notes:
            self.notes.append(text)

    def ask(self, question: str) -> None:
        """Take note of a question about the device."""
        self.questions[f"{question}{where()}"] = None

    def end_autocast(self) -> None:
        """Drop the casts of weights: the outermost autocast ended."""
        self.casts.clear()

    def device_answer(self, kind: str, frame: FrameType) -> Any:
        """Return a tensor's answer to a query about its device from the code of a frame."""
        return tensor_answer(kind, self.accelerator, self.ask, frame)

    def low_dtype(self) -> torch.dtype | None:
        """Return the dtype of autocast on the device; None where it is off."""
        device = self.accelerator.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _own_autocast(self) -> str:
        """Return `Op.autocast` of an operator inside of an autocast that the model enters itself."""
        dtype = self.low_dtype()
        return "off" if dtype is None else DTYPE_NAMES[dtype]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the recorder of the trace that this thread runs."""
        _active.recorders.append(self)
        try:
            yield
        finally:
            _active.recorders.pop()

    # operators --------------------------------------------------------------------------------

    def add_call(
        self,
        kind: str,
        inputs: Sequence[int | None],
        attrs: Mapping[str, Any],
        results: Sequence[tuple[Sequence[int], str]],
        alias: int | None = None,
        inplace: bool = False,
    ) -> range:
        """Append an operator and its results, each of a shape and dtype; return the results' indices.

        alias: the value whose storage the results share. Values that the model released since the previous
        operator are released after that one.
        """
        first = len(self.values)
        if first + len(results) > _MOST_VALUES:
            raise CaptureError(
                f"the forward pass makes more than {_MOST_VALUES} tensors: a loop over the batch or data"
            )
        for index, (sizes, dtype) in enumerate(results, first):
            self.add_value(f"{kind}_{index}", sizes, dtype, "activation", alias)
        if self.ops:
            self._flush()
            if len(self.ops) >= _MOST_OPS:
                raise CaptureError(
                    f"the forward pass runs more than {_MOST_OPS} operators: a loop over the batch or data"
                )
        else:
            self._booked += len(self._released)
            self._released.clear()
        outputs = range(first, len(self.values))
        plain_attrs = {k: plain(v) for k, v in attrs.items()}
        grad, (*outer, region) = self.autograd.now(self.note)
        self.ops.append(
            Op(kind, tuple(inputs), tuple(outputs), plain_attrs, self.scopes[-1], inplace, grad, region,
               kind in registry(), autocast=self._own_autocast() if self.own_autocasts else "",
               outer=tuple(outer))
        )  # fmt: skip
        if alias is not None:
            self._views.update(dict.fromkeys(outputs, self.ops[-1]))
        return outputs

    def add_event(self, kind: str, inputs: Sequence[int] = (), **attrs: Any) -> None:
        """Append an event of a whole step (`STEP_EVENTS`)."""
        self.add_call(kind, inputs, {}, [])
        self.ops[-1] = replace(self.ops[-1], attrs=attrs, known=True)

    def _flush(self) -> None:
        released = self._released
        self._booked += len(released)
        self.releases.append(tuple(released))
        released.clear()

    def finish(
        self,
        inputs: list[int],
        outputs: list[int],
        loss: int | None,
        training: bool,
        name: str,
        notes: tuple[str, ...],
    ) -> ForwardGraph:
        """Return the graph; the recorder must not be used afterwards."""
        if not self.ops:
            raise CaptureError(
                f"{name} runs no operator on its inputs; expected a module whose forward computes something"
            )
        self._flush()
        unread = self._unread()
        if loss is not None and not self.needs_gradient(loss):
            self.note(
                "no gradient reaches a parameter (all are frozen, or the loss is detached), so backward() "
                "would fail: the forward pass alone is predicted"
            )
        self._note_dtypes()
        # Branches may depend on the answers.
        if self.questions:
            asked = ", ".join(list(self.questions)[:3]) + ", ..." * (len(self.questions) > 3)
            self.note(
                f"the forward pass asks for the device ({asked}): answered as on {self.accelerator.label}"
            )
        asks = bool(self.questions) or any(op.autocast for op in self.ops)
        sparse = [op for op in self.ops if op.kind in _SPARSE and op.attrs.get(_SPARSE[op.kind]) is True]
        if loss is not None and sparse:
            self.note("gradients of sparse embeddings are counted as dense ones")
        return ForwardGraph(
            values=tuple(self.values), ops=tuple(self.ops), inputs=tuple(inputs), outputs=tuple(outputs),
            loss=loss, training=training, releases=tuple(self.releases), fixed_batch=self.fixed_batch,
            name=name, notes=(*notes, *self.notes), unread=unread,
            captured_for=self.accelerator.label if asks else None, reads_batch=self.reads_batch,
        )  # fmt: skip

    def _note_dtypes(self) -> None:
        """Note the first product of tensors of two dtypes."""
        if len({value.dtype for value in self.values if value.dtype in FLOATING}) < 2:
            return
        for op in self.ops:
            if spec_of(op.kind).work.multiplies_matrices:
                dtypes = [self.values[index].dtype for index in op.inputs if index is not None]
                floating = sorted({dtype for dtype in dtypes if dtype in FLOATING})
                if len(floating) > 1:
                    self.note(
                        f"{op.kind} reads {' and '.join(floating)}, which PyTorch refuses without autocast: "
                        "give the example the dtype of the weights"
                    )
                    return

    def _unread(self) -> tuple[Value, ...]:
        """Return the parameters and buffers of the model that no operator reads; note the parameters."""
        read = {value.name for value in self.values}
        unread = [
            Value(
                name,
                tuple(t.shape),
                DTYPE_NAMES[t.dtype],
                role,
                trainable=role == "parameter" and t.requires_grad,
            )
            for name, t, role in reversed(self._model_tensors().values())
            if role != "constant" and name not in read and t.dtype in DTYPE_NAMES
        ]
        parameters = [value for value in unread if value.role == "parameter"]
        if parameters:
            mib = sum(value.nbytes[0] for value in parameters) / 2**20
            names = ", ".join([value.name for value in parameters[:3]]) + ", ..." * (len(parameters) > 3)
            self.note(
                f"parameters that the forward pass does not read count as weights, {mib:.1f} MiB, without "
                f"gradient and optimizer state: {names}"
            )
        return tuple(unread)
