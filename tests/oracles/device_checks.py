"""Operators run through OpenCL, kernels and all, to be held against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import torch

from torchedge.graphs.steps import GraphBuilder, Ref
from torchedge.lowering.assembly import lower
from torchedge.runtime.executors import Executor

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
NAMES = {getattr(torch, name): name.replace("float64", "float32") for name in DTYPES}


def run_on_device(target, args, kwargs, made, device_class="cpu"):
    """Return what a Program of one operator makes on the device: an array each, None for an empty tensor.

    made: what PyTorch makes, for shapes and dtypes. device_class: whose kernels are made.
    """
    draft, inputs, arrays = GraphBuilder(), [], []

    def plain(item):
        if isinstance(item, torch.Tensor):
            dtype = NAMES[item.dtype]
            inputs.append(draft.add(f"x{len(inputs)}", tuple(item.shape), dtype, "input"))
            arrays.append(item.detach().numpy().astype(dtype))
            return Ref(inputs[-1])
        if isinstance(item, (list, tuple)):
            return tuple([plain(i) for i in item])
        return NAMES[item] if isinstance(item, torch.dtype) else item

    names = ["input" if a.name == "self" else a.name for a in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    attrs = {name: plain(item) for name, item in given.items() if item is not None}
    present = [t for t in made if t is not None]
    kind = str(target._schema.name).split("::")[-1]
    outputs = draft.call(kind, attrs, [(tuple(t.shape), NAMES[t.dtype]) for t in present])
    wanted = [o for o, t in zip(outputs, present, strict=True) if t.numel()]
    program = lower(draft.finish(inputs, wanted), device_class)
    with np.errstate(all="ignore"):
        found = iter(Executor(program).run(*arrays))
    return [next(found) if t.numel() else None for t in present]
