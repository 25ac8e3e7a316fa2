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

__all__ = [
    "FLOATING",
    "FUNCTION_REGION",
    "ITEM_SIZES",
    "RESIDENT_ROLES",
    "SHARED_ROLES",
    "WEIGHT_ROLES",
    "ForwardGraph",
    "GraphFamily",
    "Mode",
    "Op",
    "Value",
]
