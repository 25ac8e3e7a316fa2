"""Sizes compute as integers do, and families of graphs are what capture gives for each member."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.graph_checks import verify

from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph, GraphFamily, Op, Value
from torchedge.graphs.families import without_operators
from torchedge.graphs.sizes import (
    Affine,
    Amounts,
    NotAffineError,
    Size,
    UndecidedError,
    poly,
    poly_at,
    symbolic,
)

A, B = Size.symbol("a"), Size.symbol("b")

leaves = st.one_of(st.integers(1, 9), st.sampled_from(["a", "b"]))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+*-"), inner, inner), st.tuples(st.just("//"), inner, st.integers(1, 5))
    ),
    max_leaves=8,
)


def compute(expression, values):
    """Evaluate an expression with whatever the symbols are given as."""
    if isinstance(expression, str):
        return values[expression]
    if isinstance(expression, int):
        return expression
    operator, left, right = expression
    x, y = compute(left, values), compute(right, values)
    return {"+": lambda: x + y, "*": lambda: x * y, "-": lambda: x - y, "//": lambda: x // y}[operator]()


@given(expressions, st.lists(st.tuples(st.integers(2, 50), st.integers(2, 50)), min_size=1, max_size=4))
def test_they_compute_as_integers_do(expression, columns):
    size = compute(expression, {"a": A, "b": B})
    expected = [compute(expression, {"a": a, "b": b}) for a, b in columns]
    if isinstance(size, Size):
        assert [size.substitute({"a": a, "b": b}) for a, b in columns] == expected
    assert Amounts([size, 7], ["a", "b"]).at(np.array(columns).T).tolist() == [expected, [7] * len(columns)]


def test_equality_is_that_of_the_polynomials():
    assert (A + B) * (A - B) == A * A - B * B and hash(A + B) == hash(B + A)
    assert A - A == 0 and A != B and A != 3 and (2 * A) // 2 == A


def test_only_comparisons_that_hold_for_all_are_answered():
    assert A > 1 and A >= 1 and A * B > 0 and not A < 1 and not A <= 0
    for compare in (lambda: A > 2, lambda: A < B, lambda: A - 3 > 0, lambda: float(A), lambda: range(A)):
        with pytest.raises(UndecidedError):
            compare()
    with pytest.raises(TypeError) as error:
        A + "a defect of a rule"
    assert not isinstance(error.value, UndecidedError)


def test_amounts_that_do_not_follow_the_batch_are_refused():
    (batch,) = symbolic((Affine(1),))
    assert poly(3 * batch - 5) == (-5, 3, 0)
    assert poly(-2 * batch) == (0, -2, 0)
    assert poly(4 * batch * batch - batch) == (0, -1, 4)
    for amount in (3 * batch // 2, batch**3, batch * (batch // 3), -(-batch // 8), A * (batch // 2)):
        with pytest.raises(NotAffineError, match="one fixed batch size"):
            poly(amount)


@settings(max_examples=50)
@given(st.integers(2, 2000), st.integers(1, 300))
def test_amounts_split_by_powers_of_the_batch(channels, batch):
    shape = symbolic((Affine(1), A, Affine(2, 3)))
    parts = poly(shape[0] * shape[1] * shape[2] + 5 * A)
    found = [p.substitute({"a": channels}) if isinstance(p, Size) else p for p in parts]
    assert poly_at(tuple(found), batch) == batch * channels * (2 * batch + 3) + 5 * channels


def chain() -> ForwardGraph:
    """x -> a -> b -> c, each the relu of the one before, values released when the next is there."""
    values = tuple(
        Value(name, (Affine(1), A), "float32", role)
        for name, role in zip("xabc", ["input"] + ["activation"] * 3, strict=True)
    )
    ops = tuple(Op("relu", (k,), (k + 1,), {"width": (A, 2)}) for k in range(3))
    return ForwardGraph(values, ops, (0,), (3,), releases=((), (1,), (2,)))


def test_a_family_gives_graphs_without_symbols():
    graph = GraphFamily(chain(), ("a",)).graph([7])
    verify(graph)
    assert graph.values[1].shape == (Affine(1), 7) and graph.ops[0].attrs == {"width": (7, 2)}
    for wrong in ([], [1], [7, 7]):
        with pytest.raises(InputError, match="expected 1 whole numbers from 2 on"):
            GraphFamily(chain(), ("a",)).graph(wrong)


def test_what_a_removed_operator_made_is_replaced_and_lives_as_long():
    graph = without_operators(chain(), {1}, {2: 1})
    verify(graph)
    assert [v.name for v in graph.values] == ["x", "a", "c"]
    assert [op.inputs for op in graph.ops] == [(0,), (1,)] and graph.outputs == (2,)
    assert graph.releases == ((), (1,))
