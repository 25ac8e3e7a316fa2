"""The Graph and its parts: immutable nouns that every consumer reads; no torch here."""

from torchedge.graphs.dims import Affine, Dim, Poly, Shape, format_shape, poly_at
from torchedge.graphs.families import GraphFamily
from torchedge.graphs.graph import FLOATING, ITEM_SIZES, Graph, Op, Value
from torchedge.graphs.sizes import Size

__all__ = [
    "FLOATING",
    "ITEM_SIZES",
    "Affine",
    "Dim",
    "Graph",
    "GraphFamily",
    "Op",
    "Poly",
    "Shape",
    "Size",
    "Value",
    "format_shape",
    "poly_at",
]
