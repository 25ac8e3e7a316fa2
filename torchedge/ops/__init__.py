"""Operator knowledge: one file an operator family, one entry an operator, no torch."""

from torchedge.ops.specs import Call, LoadClass, OpSpec, call_of, families, registry

__all__ = ["Call", "LoadClass", "OpSpec", "call_of", "families", "registry"]
