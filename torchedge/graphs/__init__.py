"""The nouns of a captured model: immutable, free of torch.

A `ForwardGraph` is read by prediction, streaming and search; its shapes are affine in the batch size. A
`Step` is lowered and run; it holds ATen operators of concrete shapes. Both consist of `Value`s and `Op`s.
"""

from torchedge.graphs.families import GraphFamily
from torchedge.graphs.graph import (
    FLOATING,
    FUNCTION_REGION,
    ITEM_SIZES,
    RESIDENT_ROLES,
    SHARED_ROLES,
    WEIGHT_ROLES,
    ForwardGraph,
    Mode,
    Op,
    Value,
)
from torchedge.graphs.sizes import Affine, Dim, Poly, Shape, Size, format_shape, poly_at
from torchedge.graphs.steps import GraphBuilder, Input, Ref, Step

__all__ = [
    "FLOATING",
    "FUNCTION_REGION",
    "ITEM_SIZES",
    "RESIDENT_ROLES",
    "SHARED_ROLES",
    "WEIGHT_ROLES",
    "Affine",
    "Dim",
    "ForwardGraph",
    "GraphBuilder",
    "GraphFamily",
    "Input",
    "Mode",
    "Op",
    "Poly",
    "Ref",
    "Shape",
    "Size",
    "Step",
    "Value",
    "format_shape",
    "poly_at",
]
