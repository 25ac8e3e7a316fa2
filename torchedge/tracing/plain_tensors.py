"""The tensors that can be captured and run: dense ones, with values where a step computes with them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from torchedge.errors import InputError


def check_tensors(tree: Any, what: str, *, values: bool = True) -> None:
    """Raise InputError that names the first sparse, nested or quantized tensor of a pytree.

    what: the name of the whole. values: tensors on the meta device, which have no values, are refused too.
    """
    if not any(_is_refused(leaf, values) for leaf in tree_leaves(tree)):
        return
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not _is_refused(leaf, values):
            continue
        name = ".".join([what, *[str(getattr(key, "key", getattr(key, "idx", key))) for key in path]])
        if leaf.is_quantized or leaf.is_nested or leaf.layout is not torch.strided:
            kind = "quantized" if leaf.is_quantized else "nested" if leaf.is_nested else str(leaf.layout)
            raise InputError(
                f"{name} is a tensor of kind {kind.removeprefix('torch.')}; expected a dense one: call "
                ".to_dense() or .dequantize() first"
            )
        raise InputError(
            f"{name} is on the meta device, without values; expected a tensor with values: load the "
            "weights, or pass real data"
        )


def content_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return what is the same for two tensors with values exactly if they hold the same."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, hashlib.sha256(content.data).digest()


def _is_refused(leaf: Any, values: bool) -> bool:
    return isinstance(leaf, torch.Tensor) and (
        leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested or (values and leaf.is_meta)
    )
