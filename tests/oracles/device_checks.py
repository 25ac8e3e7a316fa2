"""Operators run through OpenCL, kernels and all, to be held against PyTorch in float64."""

import numpy as np
import torch
from oracles.targets import target_here
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchedge.graphs.steps import GraphBuilder, Ref
from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.opencl.choosing import SIMULATORS
from torchedge.runtime.executors import Executor
from torchedge.tracing.aten_graphs import step_of
from torchedge.tracing.decompositions import decompositions
from torchedge.tracing.joint_graphs import plain_kernels

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
VIEWS = (
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
)  # fmt: skip
NAMES = {getattr(torch, name): name.replace("float64", "float32") for name in DTYPES}


_alive = []


def kept_alive(executor):
    """Return an executor; on a simulator it stays: Oclgrind 21.10 reports memory that is used again."""
    if executor.context.device.platform in SIMULATORS:
        _alive.append(executor)
    return executor


def run_on_device(target, args, kwargs, made, device_class="cpu"):
    """Return what a Program of one operator makes on the device: an array each, None for an empty tensor.

    made: what PyTorch makes, for shapes and dtypes. device_class: whose kernels are made.
    """
    kind = str(target._schema.name).split("::")[-1]
    if kind not in all_rules():
        step, constants, tensors = captured(target, args, kwargs)
        executor = kept_alive(Executor(lower(step, target_here(device_class))))
        executor.load({name: tensor.numpy() for name, tensor in constants.items()})
        arrays = [tensor.detach().numpy().astype(NAMES[tensor.dtype]) for tensor in tensors]
        with np.errstate(all="ignore"):
            return executor.run(*arrays)
    builder, inputs, arrays = GraphBuilder(), [], []

    def plain(item):
        if isinstance(item, torch.Tensor):
            dtype = NAMES[item.dtype]
            inputs.append(builder.add(f"x{len(inputs)}", tuple(item.shape), dtype, "input"))
            arrays.append(item.detach().numpy().astype(dtype))
            return Ref(inputs[-1])
        if isinstance(item, (list, tuple)):
            return tuple([plain(i) for i in item])
        return NAMES[item] if isinstance(item, torch.dtype) else item

    names = ["input" if a.name == "self" else a.name for a in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    attrs = {name: plain(item) for name, item in given.items() if item is not None}
    present = [t for t in made if t is not None]
    outputs = builder.call(kind, attrs, [(tuple(t.shape), NAMES[t.dtype]) for t in present])
    wanted = [o for o, t in zip(outputs, present, strict=True) if t.numel()]
    program = lower(builder.finish(inputs, wanted), target_here(device_class))
    with np.errstate(all="ignore"):
        found = iter(kept_alive(Executor(program)).run(*arrays))
    return [next(found) if t.numel() else None for t in present]


def sample_decompositions():
    """Return the decompositions of a capture, with views in place of the copies that functionalize makes."""
    aten, views = torch.ops.aten, {}
    for name in VIEWS:
        plain, copying = getattr(aten, name), getattr(aten, f"{name}_copy")
        for overload in copying.overloads():
            if hasattr(plain, overload):
                views[getattr(copying, overload)] = getattr(plain, overload)
    return {**decompositions(all_rules()), **views}


def captured(target, args, kwargs):
    """Return an operator without a rule as a captured step in float32, with its constants and tensors."""
    leaves, structure = tree_flatten((args, kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[k] for k in places]

    def call(*given):
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        made = target(*tree_unflatten(filled, structure)[0], **tree_unflatten(filled, structure)[1])
        return [t for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor)]

    single = [t.detach().float() if t.is_floating_point() else t for t in tensors]
    with plain_kernels():
        module = make_fx(
            torch.func.functionalize(call, remove="mutations_and_views"),
            decomposition_table=sample_decompositions(),
            tracing_mode="fake",
        )(*single)
    step, constants = step_of(module, [(f"x{k}", "input") for k in range(len(single))])
    return step, constants, tensors
