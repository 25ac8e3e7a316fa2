"""`capture`: any nn.Module to a ForwardGraph, by tracing if possible, else by torch.export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.utils._pytree import tree_flatten, tree_map

from torchedge.devices import Device, find_device
from torchedge.errors import (
    CaptureError,
    InputError,
    TorchedgeError,
    check_choice,
    check_whole,
    checked_call,
    described,
    first_line,
    not_a_module,
)
from torchedge.graphs import ForwardGraph
from torchedge.graphs.graph import Mode
from torchedge.graphs.partitions import Partition
from torchedge.graphs.sizes import LARGEST_BATCH, Affine, NotAffineError
from torchedge.graphs.training_steps import Loss, as_tuple, check_loss
from torchedge.notices import noticed
from torchedge.tracing.copies import is_library
from torchedge.tracing.device_answers import Accelerator
from torchedge.tracing.input_size import infer_input
from torchedge.tracing.interception import ForwardCall, batch_of, trace, with_batch
from torchedge.tracing.objectives import as_arguments, loss_function, named_errors
from torchedge.tracing.plain_tensors import check_tensors
from torchedge.tracing.programs import FileProgram

_DETECTORS = frozenset(
    ("GeneralizedRCNN", "FasterRCNN", "MaskRCNN", "KeypointRCNN", "RetinaNet", "FCOS", "SSD")
)


def checked_model(model: object) -> torch.nn.Module:
    """Return the model itself, inside of wrappers; raises InputError for another type.

    Raises CaptureError for whole detectors, scripted modules and lazy layers without weights.
    """
    if not isinstance(model, torch.nn.Module):
        raise not_a_module(model)
    model = unwrapped(model)
    name = type(model).__name__
    if type(model).__module__.startswith("torchvision.models.detection") and name in _DETECTORS:
        raise CaptureError(
            f"{name} chooses boxes by their scores, so its shapes depend on the data; capture its backbone "
            "instead: capture(model.backbone, input_size=(3, 800, 800))"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{name} is compiled by TorchScript, which hides its operators; pass the original nn.Module"
        )
    parameters = dict(model.named_parameters())
    lazy = next((p for p, v in parameters.items() if isinstance(v, torch.nn.UninitializedParameter)), None)
    if lazy is not None:
        raise CaptureError(
            f"{name} has a lazy layer without weights ({lazy}); expected weights: call it once on an example"
        )
    check_tensors(parameters, name, values=False)
    return model


Method = Literal["auto", "trace", "export"]
T = TypeVar("T")
_Inputs = tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True)
class CaptureRequest:
    """A model and the options of its capture.

    model: an nn.Module, a ForwardGraph (captured already), or text that `load_model` understands.
    batch_size: the batch size that the graph is for; None: every.
    device: the one that the model seems to run on; None: a CPU. compiled: it runs under torch.compile, as a
    model that is compiled does; recorded: with CUDA graphs. partitioned: split such a step into its graphs,
    as under autocast to `amp`. The other fields are those of `capture`.
    """

    model: Any
    batch_size: int | None = None
    mode: Mode = "train"
    example: Any = None
    input_size: tuple[int, ...] | None = None
    loss: Loss | None = "default"
    method: Method = "auto"
    name: str | None = None
    batch_dim: int | None = None
    device: Device | None = None
    targets: tuple[Any, ...] = ()
    compiled: bool = False
    recorded: bool = False
    amp: str | None = None
    partitioned: bool = False

    def __post_init__(self) -> None:
        """Raise InputError for invalid options."""
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("method", self.method, get_args(Method))
        if self.loss is not None:
            check_loss(self.loss)
            loss_function(self.loss, self.targets, synthesize=True)
        if self.batch_size is not None:
            check_whole("batch_size", self.batch_size, most=LARGEST_BATCH)
        if self.batch_dim is not None:
            check_whole("batch_dim", self.batch_dim, least=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note where the example has several samples, but another number than the batch size asked for."""
        if self.example is None or self.batch_size is None:
            return ()
        dims = (0, 1) if self.batch_dim is None else (self.batch_dim,)  # which it is, capture finds
        samples = [batch_of(self.example, dim) for dim in dims]
        if self.batch_size in samples or not samples[0] or samples[0] == 1:
            return ()
        return (f"the example is {samples[0]} samples; the figures are for batch size {self.batch_size}",)

    def loaded(self) -> CaptureRequest:
        """Return the request with the model itself if the request has its name."""
        if not isinstance(self.model, str):
            return self
        from torchedge.tracing.sources import load_model

        model, label = load_model(self.model)
        return replace(self, model=model, name=self.name or label)


@checked_call()
def capture(
    model: torch.nn.Module,
    example: Any = None,
    *,
    input_size: tuple[int, ...] | None = None,
    mode: Mode = "train",
    loss: Loss | None = "default",
    targets: Any = (),
    method: Method = "auto",
    batch_size: int | None = None,
    name: str | None = None,
    batch_dim: int | None = None,
    device: str | Device | None = None,
) -> ForwardGraph:
    """Capture a forward pass of `model` (in train mode with its loss) as a ForwardGraph for every batch size.

    model: an nn.Module, or text as for `predict`: a name ("resnet50") or a file.
    example: any pytree of tensors (a tuple is taken as positional, a dict as keyword arguments); only shapes
    and dtypes count. batch_dim: the dimension of the first tensor that is the batch; by default 0, and 1 for
    an example that a recurrent layer with batch_first=False reads as (time, batch, features), with a note.
    input_size: shape of one sample without the batch, instead of `example`. Without both, the shape is that
    of the model's attribute `example_inputs` or its metadata.
    loss, targets: as in `TrainingStep`; None captures no loss.
    method: "trace" is the fast path, "export" torch.export, "auto" the first that works.
    batch_size: capture for this batch size only (`ForwardGraph.fixed_batch`), for models whose graph depends
    on the batch size.
    device: the one that the model seems to run on, a name or a Device, for models that ask for it
    (`torch.autocast("cuda")`, `x.is_cuda`); None: a CPU.
    The model does not change: no weight, buffer, mode, gradient or random state. Nothing is computed.
    Raises InputError for unusable arguments and CaptureError with the reason if the model cannot be captured.
    """
    request = CaptureRequest(
        model,
        batch_size,
        mode,
        example,
        input_size,
        loss,
        method,
        name,
        batch_dim,
        find_device(device) if isinstance(device, str) else device,
        as_tuple(() if targets is None else targets),
    ).loaded()
    if batch_size is not None:
        return _marked(_captured(request, [batch_size]), request)
    return _marked(_noted(_captured(request, [None, _EXAMPLE])), request)


def _noted(graph: ForwardGraph) -> ForwardGraph:
    """Return a graph for every batch size with a note where its branches may depend on the batch size."""
    if not graph.reads_batch or graph.fixed_batch is not None:
        return graph
    note = (
        "the forward pass computes with the batch size: its branches are taken as for large batches; "
        "predict one batch size alone for the branches at that one"
    )
    return replace(graph, notes=(*graph.notes, note))


def _marked(graph: ForwardGraph, request: CaptureRequest) -> ForwardGraph:
    """Return a graph with a mark where the model is compiled: its operators are eager PyTorch's."""
    modules = request.model.modules() if isinstance(request.model, torch.nn.Module) else ()
    if not request.compiled and not any(map(is_wholly_compiled, modules)):
        return graph
    partition = _partition_of(graph, request)
    if partition is None:
        return replace(graph, compiled=True)
    notes = (*graph.notes, _PARTITIONED, *([_RECORDED] if partition.recorded else []))
    return replace(graph, compiled=True, partition=partition, notes=notes)


_PARTITIONED = (
    "torch.compile: memory and time follow from the two graphs that PyTorch splits the step into, and from "
    "the kernels that Inductor fuses"
)


_RECORDED = (
    "CUDA graphs: allocated memory is that of the steps that are recorded; later ones show what lies outside "
    "of the graphs' pool alone"
)


def _partition_of(graph: ForwardGraph, request: CaptureRequest) -> Partition | None:
    """Return the graphs of a training step that is compiled as a whole for CUDA; None: unknown."""
    on_cuda = Accelerator(request.device).type == "cuda"
    special = any(op.region or op.autocast for op in graph.ops)
    wanted = request.compiled and request.partitioned and request.batch_size is not None
    if not wanted or not on_cuda or special or graph.loss is None:
        return None
    assert request.batch_size is not None
    from torchedge.tracing.partitions import partition

    call, _ = _resolved(request)
    args, kwargs = resized((call.args, call.kwargs), request.batch_size, call.batch_dim)
    try:
        with noticed("splitting the compiled step as PyTorch does"):
            own_loss = isinstance(request.loss, str)
            parts = partition(call.model, args, kwargs, request.batch_size, request.amp, own_loss=own_loss)
            return replace(parts, recorded=request.recorded)
    except CaptureError:
        return None


def is_wholly_compiled(model: object) -> bool:
    """Whether all of a module runs under torch.compile."""
    return isinstance(model, torch.nn.Module) and (
        hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
    )


def records_graphs(model: object) -> bool:
    """Whether torch.compile has a module's kernels replayed as CUDA graphs (mode "reduce-overhead")."""
    for compiled in (model, getattr(model, "_compiled_call_impl", None)):
        configuration = getattr(compiled, "get_compiler_config", lambda: None)()
        if isinstance(configuration, Mapping) and configuration.get("triton.cudagraphs"):
            return True
    return False


def capture_request(request: CaptureRequest) -> ForwardGraph:
    """Return a graph for every batch size, else for the batch size of the request or of its example.

    A ForwardGraph in the request is returned unchanged. Raises InputError and CaptureError as `capture` does.
    """
    request = request.loaded()
    if isinstance(request.model, ForwardGraph):
        return request.model
    graph = _marked(_captured(request, [None, request.batch_size or _EXAMPLE]), request)
    if request.batch_size is None or not graph.reads_batch or graph.fixed_batch is not None:
        return _noted(graph)
    fixed = _captured(request, [request.batch_size])
    if _agrees(graph, fixed, request.batch_size):
        return graph
    note = (
        f"the forward pass branches on the batch size: captured as at batch size {request.batch_size}, and "
        "valid for that one only"
    )
    return _marked(replace(fixed, notes=(*fixed.notes, note)), request)


def _agrees(graph: ForwardGraph, fixed: ForwardGraph, batch_size: int) -> bool:
    """Return whether a graph for every batch size runs at one of them what a graph of it alone runs."""
    if len(graph.ops) != len(fixed.ops) or len(graph.values) != len(fixed.values):
        return False
    same = all(
        (a.kind, a.inputs, a.outputs, a.inplace, a.grad, a.region, a.autocast)
        == (b.kind, b.inputs, b.outputs, b.inplace, b.grad, b.region, b.autocast)
        for a, b in zip(graph.ops, fixed.ops, strict=True)
    )
    return same and all(
        (a.at(batch_size), a.dtype, a.role) == (b.at(batch_size), b.dtype, b.role)
        and (a.role == "activation" or a.name == b.name)
        for a, b in zip(graph.values, fixed.values, strict=True)
    )


def use_graph(request: CaptureRequest, use: Callable[[ForwardGraph], T]) -> T:
    """Return `use(graph)`; on NotAffineError repeat with a graph for the request's batch size alone.

    Shapes can be affine in the batch size while the amounts of an operator are not (``3N // 2``).
    """
    request = request.loaded()
    graph = capture_request(request)
    try:
        return use(graph)
    except NotAffineError:
        if graph is request.model or graph.fixed_batch is not None or request.batch_size is None:
            raise
        return use(_marked(_captured(request, [request.batch_size]), request))


def capture_each(request: CaptureRequest, batch_sizes: Sequence[int]) -> list[ForwardGraph]:
    """Return a graph for each batch size: the same graph for all if it is valid for every batch size."""
    request, graphs = request.loaded(), list[ForwardGraph]()
    for batch_size in batch_sizes:
        holds_for_every = (
            bool(graphs)
            and graphs[0].fixed_batch is None
            and not graphs[0].reads_batch
            and graphs[0].partition is None
        )
        graphs.append(
            graphs[0] if holds_for_every else capture_request(replace(request, batch_size=batch_size))
        )
    return graphs


_EXAMPLE = 0
"""A marker: fall back to the batch size of the example if there is one."""


def _captured(request: CaptureRequest, batch_sizes: Sequence[int | None]) -> ForwardGraph:
    """Capture with the batch in the dimension where the layers take it."""
    graph = _captured_as(request, batch_sizes)
    if request.batch_dim is not None or not _time_follows_batch(graph):
        return graph
    if request.example is None:
        note = (
            "the sequence length of a recurrent layer with batch_first=False follows the batch size: pass an "
            "example= with batch_dim=1 if the model takes (time, batch, features)"
        )
        return replace(graph, notes=(*graph.notes, note))
    try:
        other = _captured_as(replace(request, batch_dim=1), batch_sizes)
    except TorchedgeError:  # an example without a batch: (time, features)
        return graph
    if _time_follows_batch(other):
        return graph
    note = (
        "dimension 1 of the example is taken as the batch: a recurrent layer with batch_first=False reads it "
        "as (time, batch, features); batch_dim= says otherwise"
    )
    return replace(other, notes=(*other.notes, note))


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _time_follows_batch(graph: ForwardGraph) -> bool:
    """Whether a recurrent layer reads the batch as its time: (N, constant, features) without batch_first."""
    for op in graph.ops:
        if op.kind in _RECURRENT and not op.attrs.get("batch_first", False) and op.inputs[0] is not None:
            shape = graph.values[op.inputs[0]].shape
            if len(shape) == 3 and isinstance(shape[0], Affine) and not isinstance(shape[1], Affine):
                return True
    return False


def _captured_as(request: CaptureRequest, batch_sizes: Sequence[int | None]) -> ForwardGraph:
    """Capture at the first of the batch sizes (None: every) for which a method succeeds."""
    call, methods = _resolved(request)
    failures: dict[str, TorchedgeError] = {}
    for attempt, batch_size in enumerate(batch_sizes):
        if batch_size == _EXAMPLE:
            batch_size = _fallback_batch(request, call)
            if batch_size is None:
                continue
        tried = call if batch_size is None else _fixed(call, batch_size, noted=attempt > 0)
        for method in methods:
            try:
                graph = _by(method, _after_failures(tried, failures) if method == "export" else tried)
                return replace(graph, channels_last=True) if _in_channels_last(call.model) else graph
            except TorchedgeError as error:
                if not attempt and isinstance(error, InputError):
                    raise
                failures[method] = error  # the last attempt has the sizes of the user's example
    if len(failures) == 1:
        raise next(iter(failures.values()))
    tracing, exporting = failures["trace"], failures["export"]
    reasons = [str(error).partition(" raised ")[2] or str(error) for error in (tracing, exporting)]
    step = _next_step(request, tracing) if " raised " in str(tracing) else ""
    by_values = ("DataDependent" in reasons[1] or "by their values" in reasons[0]) and not step
    if by_values and "torch.where" not in str(tracing):
        step = "; use torch.where, or make the choice an argument of the model"
    if reasons[0] == reasons[1] or by_values or _OWN_GRADIENTS in reasons[0]:
        raise CaptureError(f"{call.name} cannot be captured: {str(tracing).rstrip('.')}{step}") from tracing
    raise CaptureError(
        f"{call.name} cannot be captured. By tracing: {tracing}. By torch.export: "
        f"{str(exporting).rstrip('.')}{step or '.'}"
    ) from tracing


_OF_ANY_CALL = (NameError, NotImplementedError, ImportError, OSError)
"""Errors of a model's own code that no arguments mend."""


def _next_step(request: CaptureRequest, error: TorchedgeError) -> str:
    """Return the end of the sentence that says what to check, where the model or the loss raised an error."""
    if isinstance(error.__cause__, _OF_ANY_CALL):
        return ": correct the model"
    if str(error).startswith("the loss "):
        return ". Check that loss= and targets= suit each other and the outputs"
    if request.input_size is not None:
        return f". Check that input_size={request.input_size} is the shape of one sample, without the batch"
    tensors = [t for t in tree_flatten(request.example)[0] if isinstance(t, torch.Tensor)]
    if not tensors:
        return ". Pass example= with the arguments that the model is called with"
    kinds = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:4])
    return f". Check that the model takes the example, batch included: {kinds}"


def _in_channels_last(model: torch.nn.Module) -> bool:
    """Return whether weights of a module's convolutions lie in channels_last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        p is not None
        and p.dim() in formats
        and not p.is_contiguous()
        and p.is_contiguous(memory_format=formats[p.dim()])
        for module in model.modules()
        for p in module._parameters.values()
    )


def _resolved(request: CaptureRequest) -> tuple[ForwardCall, tuple[str, ...]]:
    """Return the forward pass of a request and the methods to try."""
    model, example = checked_model(request.model), request.example
    if example is None and request.input_size is None:
        example = getattr(model, "example_inputs", None)
    args, kwargs, notes = arguments_of(model, example, request.input_size)
    if request.batch_dim:
        _check_batch_dim(request.batch_dim, (args, kwargs))
    notes = (*notes, *parallel_notes(request.model))
    call = ForwardCall(
        model,
        args,
        kwargs,
        *_objective(request),
        training=request.mode == "train",
        name=request.name or (model.title if isinstance(model, FileProgram) else type(model).__name__),
        notes=notes,
        batch_dim=request.batch_dim or 0,
        accelerator=Accelerator(request.device),
    )
    if isinstance(model, FileProgram):
        return call, ("trace",)
    return call, ("trace", "export") if request.method == "auto" else (request.method,)


def _objective(request: CaptureRequest) -> tuple[tuple[Any, ...], Callable[..., Any] | None]:
    """Return the targets and the loss of a training step; neither for an inference."""
    if request.mode == "infer" or request.loss is None:
        return (), None
    function = loss_function(request.loss, request.targets, synthesize=True)
    return request.targets, named_errors(request.loss, function)


def _check_batch_dim(batch_dim: int, arguments: Any) -> None:
    """Raise InputError unless a tensor has the dimension that is the batch."""
    if batch_of(arguments, batch_dim) is None:
        most = max((t.dim() for t in tree_flatten(arguments)[0] if isinstance(t, torch.Tensor)), default=0)
        raise InputError(
            f"batch_dim is {batch_dim}, and no tensor of the example has more than {most} dimensions; "
            f"expected 0 to {most - 1}"
        )


def _fallback_batch(request: CaptureRequest, call: ForwardCall) -> int | None:
    """Return the batch size of the user's example or of a file, None if there is neither."""
    has_example = request.example is not None or getattr(call.model, "example_inputs", None) is not None
    if isinstance(call.model, FileProgram) or (has_example and request.method == "auto"):
        return batch_of((call.args, call.kwargs), call.batch_dim) or None
    return None


def _fixed(call: ForwardCall, batch_size: int, noted: bool) -> ForwardCall:
    """Return the call at one batch size."""
    note = f"valid for batch size {batch_size} only: the model's shapes do not follow the batch size"
    args, kwargs, targets = resized((call.args, call.kwargs, call.targets), batch_size, call.batch_dim)
    notes = (*call.notes, note) if noted else call.notes
    return replace(call, args=args, kwargs=kwargs, targets=targets, fixed_batch=batch_size, notes=notes)


def _after_failures(call: ForwardCall, failures: Mapping[str, TorchedgeError]) -> ForwardCall:
    """Return the call with a note where torch.export takes over from tracing."""
    if "trace" not in failures:
        return call
    note = (
        f"captured by torch.export, as {failures['trace']}; tensors are assumed to be freed after their last "
        "use, and branches taken as torch.export takes them"
    )
    return replace(call, notes=(*call.notes, note))


def _by(method: str, call: ForwardCall) -> ForwardGraph:
    """Capture by one method; an exception of the model becomes a CaptureError of one line."""
    run: Callable[[ForwardCall], ForwardGraph] = trace
    if method == "export":
        from torchedge.tracing.exporting import export_graph

        run = export_graph
    try:
        with torch.set_grad_enabled(call.training):
            return run(call)
    except TorchedgeError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "required" in str(error) and "argument" in str(error):
            raise InputError(
                f"{first_line(error)}; pass every input of {call.name} with example=, or in a shell name a "
                "training script (train.py)"
            ) from error
        if "does not require grad and does not have a grad_fn" in str(error):
            raise CaptureError(
                f"the forward pass {_OWN_GRADIENTS}{_place_of(error)}, which a capture does not follow; "
                "expected a model that computes no gradients itself: capture what it calls, without them"
            ) from error
        raise CaptureError(f"the forward pass raised {type(error).__name__}: {first_line(error)}") from error


_OWN_GRADIENTS = "asks autograd for gradients"


def _place_of(error: BaseException) -> str:
    """Return " at FILE:LINE" of the innermost line of the user's code that an exception passed."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if not is_library(trace.tb_frame):
            file = trace.tb_frame.f_code.co_filename.rsplit("/", 1)[-1]
            place = f" at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def resized(tree: Any, batch_size: int, batch_dim: int = 0) -> Any:
    """Return an example with another batch size: its integers repeated, other tensors as meta tensors."""
    batch = batch_of(tree, batch_dim)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = with_batch(tuple(leaf.shape), batch, batch_size, batch_dim)
        if leaf.device.type != "meta" and not leaf.dtype.is_floating_point:
            if sizes is None or not batch:
                return leaf
            place = batch_dim if leaf.dim() > batch_dim else 0
            return leaf.index_select(place, torch.arange(batch_size, device=leaf.device) % batch)
        return torch.empty(sizes or leaf.shape, dtype=leaf.dtype, device="meta")

    return tree_map(resize, tree)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers for parallel training and compilation."""
    while isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def parallel_notes(model: object) -> tuple[str, ...]:
    """Return a note where DistributedDataParallel takes memory beside the model inside of it."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return ()
    mib = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 2**20
    views = getattr(model, "gradient_as_bucket_view", False)
    return (
        f"DistributedDataParallel: its buckets, {mib:.1f} MiB, are not counted"
        + ("; they are the gradients, which stay between steps" if views else ", nor is NCCL's memory"),
    )


def arguments_of(model: torch.nn.Module, example: Any, input_size: tuple[int, ...] | None) -> _Inputs:
    """Return positional and keyword arguments of a model, and notes on guessed shapes.

    Without an example they are meta tensors of batch size one, of `input_size` or of the shape in the model's
    metadata. Raises InputError for both an example and an input_size, or if no shape is known.
    """
    if example is not None and input_size is not None:
        raise InputError("there are both example= and input_size=; expected one of them")
    if example is not None:
        tensors = [t for t in tree_flatten(example)[0] if isinstance(t, torch.Tensor)]
        if not tensors:
            raise InputError(
                f"example is {described(example)} without tensors; expected a tensor or a pytree of tensors"
            )
        check_tensors(example, "example", values=False)
        if not tensors[0].numel():
            raise InputError(
                f"the first tensor of the example is empty, of shape {tuple(tensors[0].shape)}; expected a "
                "batch of one sample or more"
            )
        return (*as_arguments(example), ())
    if input_size is not None:
        size = _checked_size(input_size)
        first = next((m for m in model.modules() if getattr(m, "weight", None) is not None), None)
        integers = isinstance(first, torch.nn.Embedding)
        dtype = infer_input(model).dtype if integers else _floating_dtype(model)
        keyword = getattr(model, "main_input_name", None) if hasattr(model, "config") else None
        return _fed(torch.empty((1, *size), dtype=dtype, device="meta"), keyword, ())
    if isinstance(model, FileProgram):
        return model.example(), {}, ()
    spec = infer_input(model)
    dtype = _floating_dtype(model) if spec.dtype.is_floating_point else spec.dtype
    tensor = torch.empty((1, *spec.size), dtype=dtype, device="meta")
    args, kwargs, notes = _fed(tensor, spec.keyword, (spec.note,) if spec.note else ())
    if spec.decoder is not None:
        kwargs["decoder_input_ids"] = torch.empty((1, spec.decoder), dtype=torch.int64, device="meta")
        notes = (*notes, f"{spec.decoder} tokens of the decoder assumed")
    return args, kwargs, notes


def _fed(tensor: torch.Tensor, keyword: str | None, notes: tuple[str, ...]) -> _Inputs:
    return ((), {keyword: tensor}, notes) if keyword else ((tensor,), {}, notes)


def _floating_dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


_MOST_ELEMENTS = 2**40
"""The most elements of one sample: far beyond, PyTorch cannot count its bytes."""


def _checked_size(size: Any) -> tuple[int, ...]:
    plain = isinstance(size, (tuple, list)) and all(
        isinstance(s, int) and not isinstance(s, bool) for s in size
    )
    if not plain or any(s < 1 for s in size):
        raise InputError(
            f"input_size is {size!r}; expected whole numbers above 0 without the batch, like (3, 224, 224)"
        )
    if prod(size) > _MOST_ELEMENTS:
        raise InputError(
            f"input_size is {size!r}, {prod(size):.1e} elements; expected at most {_MOST_ELEMENTS:.1e}"
        )
    return tuple(size)
