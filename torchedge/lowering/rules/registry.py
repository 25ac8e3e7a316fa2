"""The table of rules, filled by the files of this folder when it is first asked for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, TypeVar

from torchedge.errors import LoweringError
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.ranges import BoundsRule, Indexes

Rule = Callable[..., Any]
_Function = TypeVar("_Function", bound=Rule)
_RULES: dict[str, Rule] = {}


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """Facts of an operator on whole numbers: ranges of its indices, bounds of results, whether it divides."""

    indexes: Indexes | None = None
    bounds: BoundsRule | None = None
    divides: bool = False


_WHOLE: dict[str, WholeNumbers] = {}
_NO_FACTS = WholeNumbers()


@dataclass(frozen=True, slots=True)
class Result:
    """The outputs of an operator: the shape and dtype of each, from PyTorch."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return self.shapes[0]

    @property
    def dtype(self) -> str:
        """Dtype of the first output."""
        return self.dtypes[0]


def rule(
    *kinds: str,
    indexes: Indexes | None = None,
    bounds: BoundsRule | None = None,
    divides: bool = False,
    **settings: str | bool,
) -> Callable[[_Function], _Function]:
    """Register a function as the rule of ATen operators (base names).

    indexes, bounds, divides: `WholeNumbers` of these operators (`lowering.rules.ranges`), by which indices
    and divisors are checked. settings: further arguments of the function for these operators.
    It is called as `function(result, **arguments)`: `result` is a `Result`, the arguments have the names of
    the ATen schema (`self` is `input`; only those given), tensors are Nodes. It returns a Node, or one for
    each output (None for an output that nobody can read).
    """

    def register(function: _Function) -> _Function:
        for kind in kinds:
            if kind in _RULES:
                raise LoweringError(f"operator {kind} has two rules; expected one")
            _RULES[kind] = partial(function, **settings) if settings else function
            if indexes or bounds or divides:
                _WHOLE[kind] = WholeNumbers(indexes, bounds, divides)
        return function

    return register


def spatial_rule(*kinds: str, **settings: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401
    """Register one function for operators of several numbers of dimensions, such as avg_pool2d and 3d.

    Its first argument is that number, then it is called as a rule is, with the settings.
    """

    def register(function: _Function) -> _Function:
        for kind in kinds:
            rule(kind)(partial(function, int(re.sub(r"\D", "", kind)), **settings))
        return function

    return register


@cache
def all_rules() -> Mapping[str, Rule]:
    """Return every rule by operator."""
    for file in iter_modules([str(Path(__file__).parent)]):
        import_module(f"torchedge.lowering.rules.{file.name}")
    return MappingProxyType(_RULES)


def whole_numbers(kind: str) -> WholeNumbers:
    """Return the facts of an operator on whole numbers."""
    all_rules()
    return _WHOLE.get(kind, _NO_FACTS)


def rule_for(kind: str) -> Rule:
    """Return the rule of an operator.

    Raises:
        LoweringError: there is none.
    """
    rules = all_rules()
    if kind in rules:
        return rules[kind]
    near = difflib.get_close_matches(kind, rules, n=1)
    hint = f" (the nearest one known is {near[0]})" if near else ""
    raise LoweringError(
        f"operator aten.{kind} has no kernel{hint}; run this part of the model in PyTorch, or add a rule "
        "for it in torchedge/lowering/rules"
    )


def apply_rule(kind: str, result: Result, arguments: Mapping[str, Any]) -> tuple[Node | None, ...]:
    """Return the nodes of an operator's outputs.

    Raises:
        LoweringError: it has no rule, or the rule refuses these arguments.
    """
    try:
        output = rule_for(kind)(result, **arguments)
    except TypeError as error:
        raise LoweringError(
            f"operator aten.{kind} was called in a way its rule does not know: {error}"
        ) from error
    nodes = output if isinstance(output, tuple) else (output,)
    for node, shape, dtype in zip(nodes, result.shapes, result.dtypes, strict=True):
        if node is not None and (node.shape, node.dtype) != (shape, dtype):
            raise LoweringError(
                f"the rule of aten.{kind} made {node.dtype}{list(node.shape)}, PyTorch makes "
                f"{dtype}{list(shape)}; this is a defect of the rule, please report it"
            )
    return nodes
