"""Drafts: names made unique, repeated calls made once, dead values dropped."""

from __future__ import annotations

import pytest

from torchedge.errors import CaptureError
from torchedge.graphs.steps import GraphBuilder, Input, Ref


def small():
    draft = GraphBuilder()
    x, w = draft.add("x", (2, 3), "float32", "input"), draft.add("w", (3,), "float32", "parameter")
    return draft, x, w


def test_tensors_in_attributes_become_positions_among_the_inputs():
    draft, x, w = small()
    (made,) = draft.call("cat", {"tensors": (Ref(x), Ref(x), Ref(w)), "dim": 0}, [((7, 3), "float32")])
    op = draft.maker(made)
    assert op is not None and op.inputs == (x, x, w)
    assert op.attrs == {"tensors": (Input(0), Input(1), Input(2)), "dim": 0}
    assert draft.maker(x) is None


def test_a_call_is_made_once_unless_it_is_named():
    draft, x, _ = small()
    first = draft.like(x, "relu", {"input": Ref(x)}, "layer")
    assert draft.like(x, "relu", {"input": Ref(x)}, "elsewhere") == first
    assert draft.like(x, "relu", {"input": Ref(x)}, "layer", "again") != first
    assert draft.like(x, "add", {"input": Ref(x), "other": 1}) != draft.like(
        x, "add", {"input": Ref(x), "other": 1.0}
    ), "1 and 1.0 differ"


def test_names_are_unique():
    draft, x, w = small()
    names = [draft.values[draft.like(i, "neg", {"input": Ref(i)}, "a")].name for i in (x, w)]
    assert names == ["a/neg", "a/neg.1"]
    assert draft.values[draft.add("x", (), "float32")].name == "x.1"


def test_finish_drops_what_nothing_needs_and_orders_values():
    draft, x, w = small()
    unused = draft.add("unused", (4,), "float32", "parameter")
    draft.like(unused, "neg", {"input": Ref(unused)})
    y = draft.like(x, "mul", {"input": Ref(x), "other": Ref(w)})
    late = draft.add("state", (3,), "float32", "state")
    new = draft.like(w, "add", {"input": Ref(w), "other": Ref(late)})
    lr = draft.add("lr", (), "float32", "input")
    step = draft.finish(
        [x], [y], updates=[(w, new), (late, late)], hyperparameters={"lr": lr}, initial={late: 2.0}
    )
    assert [v.name for v in step.values] == ["x", "w", "state", "lr", "mul", "add"]
    assert [op.kind for op in step.ops] == ["mul", "add"]
    assert step.updates == ((1, 5),), "a state updated by itself is not updated"
    assert (dict(step.hyperparameters), dict(step.initial)) == ({"lr": 3}, {2: 2.0})


def test_an_output_mask_follows_what_is_read():
    draft, x, _ = small()
    attrs = {"input": Ref(x), "output_mask": (True, False, True)}
    first, last = draft.call("backward", attrs, [((2, 3), "float32"), ((3,), "float32")])
    both = draft.finish([x], [first, last]).ops[0]
    assert both.attrs["output_mask"] == (True, False, True) and len(both.outputs) == 2
    one = draft.finish([x], [last]).ops[0]
    assert one.attrs["output_mask"] == (False, False, True) and len(one.outputs) == 1


def test_a_copy_grows_alone_and_shares_names():
    draft, x, _ = small()
    other = draft.copy()
    y = other.like(x, "neg", {"input": Ref(x)})
    assert len(draft.ops) == 0 and [v.name for v in other.finish([x], [y]).values] == ["x", "neg"]


def test_an_update_of_another_shape_is_refused():
    draft, x, w = small()
    with pytest.raises(CaptureError, match="same shape and dtype"):
        draft.finish([x], [], updates=[(w, draft.like(x, "neg", {"input": Ref(x)}))])


def test_operators_on_a_value_have_its_shape_and_dtype():
    draft, x, w = small()
    y = draft.apply("add", x, Ref(w), "layer", alpha=2.0)
    op = draft.maker(y)
    assert op is not None and op.inputs == (x, w) and op.scope == "layer"
    assert op.attrs == {"input": Input(0), "other": Input(1), "alpha": 2.0}
    assert (draft.values[y].shape, draft.values[y].dtype) == ((2, 3), "float32")
    negative = draft.maker(draft.apply("neg", y))
    assert negative is not None and negative.attrs == {"input": Input(0)}


def test_a_cast_to_the_same_dtype_adds_nothing():
    draft, x, _ = small()
    assert draft.cast(x, "float32") == x and not draft.ops
    half = draft.values[draft.cast(x, "float16")]
    assert (half.shape, half.dtype, [op.kind for op in draft.ops]) == ((2, 3), "float16", ["_to_copy"])
