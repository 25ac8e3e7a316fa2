"""model.onnx of a bundle: the inference graph, checked by onnx and compared with PyTorch by onnxruntime."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only

from torchedge.bundles.manifests import Plain
from torchedge.errors import CaptureError, clipped, first_line, needed
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.copies import isolated
from torchedge.tracing.decompositions import UnrolledProjections
from torchedge.tracing.interception import tensors_in
from torchedge.tracing.vision import prepare_torchvision

METADATA = "torchedge.streaming_plan"
"""Key of the streaming plan in the metadata of model.onnx."""

TOLERANCE = 1e-3
"""Largest difference to PyTorch's output, over that output's largest value."""


def check_packages() -> None:
    """Raise MissingExtraError where a package for writing ONNX files is not installed."""
    for package in ("onnx", "onnxscript"):
        with needed(package, extra="onnx", purpose="a bundle's model.onnx (omit it: onnx=False, --no-onnx)"):
            __import__(package)


def eager_outputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the output tensors of the model in evaluation, by PyTorch on a copy with buffers of its own."""
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, dict(kwargs)))  # a model may change them
    with torch.no_grad(), isolated(model, False) as twin:
        kept = {id(buffer): buffer.clone() for buffer in twin.buffers()}
        for module in twin.modules():
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, name, kept[id(buffer)])
        try:
            outputs = twin(*args, **kwargs)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} raised {type(error).__name__} on the example: {first_line(error)}; "
                "expected an example that PyTorch runs"
            ) from error
    return tensors_in(outputs, torch.Tensor)


def write_onnx(
    path: Path,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    ports: tuple[Sequence[str], Sequence[str]],
    expected: Sequence[torch.Tensor],
    streaming: tuple[Sequence[str], str] | None = None,
) -> dict[str, Plain]:
    """Write the model's inference as ONNX; return the facts for the manifest.

    ports: names of inputs and outputs. expected: what `eager_outputs` returned. streaming: names of weights
    in the order in which a plan loads them, and the plan as JSON: weights go into model.onnx.data in this
    order, the plan into the metadata of the model (`METADATA`).
    Raises CaptureError: PyTorch cannot export the model, or the file computes something else.
    """
    import onnx

    title = type(model).__name__
    exported = _exported(model, args, kwargs, ports[0])
    _name_outputs(exported.model.graph, ports[1])
    for node in exported.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces: paths of this machine, different from run to run
    if streaming is not None:
        order, plan = streaming
        initializers = exported.model.graph.initializers
        values = {name: initializers[name] for name in initializers}
        initializers.clear()
        for name in dict.fromkeys([*(name for name in order if name in values), *values]):
            initializers[name] = values[name]
        exported.model.metadata_props[METADATA] = plan
    exported.save(str(path), include_initializers=True, external_data=True if streaming else None)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise CaptureError(f"model.onnx of {title} is not valid ({_line(error)}); pass onnx=False") from error
    facts: dict[str, Plain] = {"checked_by": f"onnx {onnx.__version__}"}
    try:
        import onnxruntime
    except ImportError:
        return {**facts, "run_by": "nothing: onnxruntime is not installed"}
    arrays = [leaf.detach().cpu().numpy() for leaf in tensors_in((args, kwargs), torch.Tensor)]
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        wanted = {item.name for item in session.get_inputs()}
        fed = {name: array for name, array in zip(ports[0], arrays, strict=True) if name in wanted}
        outputs = session.run(None, fed)
    except Exception as error:  # onnxruntime's own have no common base
        raise CaptureError(
            f"onnxruntime cannot run model.onnx of {title} ({_line(error)}); pass onnx=False (--no-onnx) for "
            "a bundle without it"
        ) from error
    apart = max(
        [_difference(a, b.detach().cpu().numpy()) for a, b in zip(outputs, expected, strict=True)],
        default=0.0,
    )
    if not apart <= TOLERANCE:
        raise CaptureError(
            f"model.onnx of {title} computes something else than PyTorch: {apart:.3g} of the largest value "
            f"apart, expected at most {TOLERANCE}; pass onnx=False to leave it out"
        )
    return {**facts, "run_by": f"onnxruntime {onnxruntime.__version__}", "largest_difference": apart}


def _name_outputs(graph: Any, names: Sequence[str]) -> None:  # noqa: ANN401 - a graph of onnx_ir
    """Give the outputs these names (none: their own); one of an input or a weight gets an ending."""
    taken = {*graph.initializers, *[value.name for value in graph.inputs]}
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    names = names or [value.name for value in graph.outputs]
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = _free(name, "_output", taken)
    for value in inner:
        if value not in graph.outputs:
            value.name = _free(value.name, "_inner", taken)


def _free(name: str, ending: str, taken: set[str]) -> str:
    """Return a name with as many endings as make it a new one; add it to those taken."""
    while name in taken:
        name += ending
    taken.add(name)
    return name


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Sequence[str]
) -> Any:  # noqa: ANN401 - an ONNXProgram
    prepare_torchvision()
    silent = contextlib.redirect_stdout(io.StringIO())
    try:
        with warnings_ignored(), silent, isolated(model, False) as twin, UnrolledProjections():
            forward = twin.forward

            @wraps(forward)
            def copied(*args: Any, **kwargs: Any) -> list[torch.Tensor]:  # noqa: ANN401 - as the model
                # The exporter renames a value that is several outputs, or an input as well.
                return [leaf.clone() for leaf in tensors_in(forward(*args, **kwargs), torch.Tensor)]

            twin.forward = copied
            if args and isinstance(args[-1], dict):  # else it counts as keyword arguments
                args = (*args, {})
            return torch.onnx.export(
                twin,
                args,
                kwargs=dict(kwargs),
                input_names=list(inputs),
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except Exception as error:
        raise CaptureError(
            f"PyTorch cannot export {type(model).__name__} to ONNX ({_line(error)}); pass onnx=False "
            "(--no-onnx) for a bundle without it"
        ) from error


def _line(error: BaseException) -> str:
    error = error.__cause__ or error  # PyTorch's exporter raises its own from what went wrong
    return f"{type(error).__name__}: {clipped(first_line(error))}"


def _difference(output: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Return the largest difference over the largest value, 0 where both are the same."""
    if output.shape != expected.shape:
        return float("inf")
    if not expected.size or np.array_equal(output, expected, equal_nan=expected.dtype.kind == "f"):
        return 0.0
    scale = float(np.abs(expected.astype(np.float64)).max())
    apart = float(np.abs(output.astype(np.float64) - expected.astype(np.float64)).max())
    return apart / scale if scale else apart
