"""Drafts: names made unique, repeated calls made once, dead values dropped."""

import pytest

from torchedge.errors import CaptureError
from torchedge.graphs.steps import GraphBuilder, Input, Ref, Term


def small():
    builder = GraphBuilder()
    x, w = builder.add("x", (2, 3), "float32", "input"), builder.add("w", (3,), "float32", "parameter")
    return builder, x, w


def test_tensors_in_attributes_become_positions_among_the_inputs():
    builder, x, w = small()
    (made,) = builder.call("cat", {"tensors": (Ref(x), Ref(x), Ref(w)), "dim": 0}, [((7, 3), "float32")])
    op = builder.maker(made)
    assert op is not None and op.inputs == (x, x, w)
    assert op.attrs == {"tensors": (Input(0), Input(1), Input(2)), "dim": 0}
    assert builder.maker(x) is None


def test_a_call_is_made_once_unless_it_is_named():
    builder, x, _ = small()
    first = builder.like(x, "relu", {"input": Ref(x)}, "layer")
    assert builder.like(x, "relu", {"input": Ref(x)}, "elsewhere") == first
    assert builder.like(x, "relu", {"input": Ref(x)}, "layer", "again") != first
    assert builder.like(x, "add", {"input": Ref(x), "other": 1}) != builder.like(
        x, "add", {"input": Ref(x), "other": 1.0}
    ), "1 and 1.0 differ"


def test_names_are_unique():
    builder, x, w = small()
    names = [builder.values[builder.like(i, "neg", {"input": Ref(i)}, "a")].name for i in (x, w)]
    assert names == ["a/neg", "a/neg.1"]
    assert builder.values[builder.add("x", (), "float32")].name == "x.1"


def test_finish_drops_what_nothing_needs_and_orders_values():
    builder, x, w = small()
    unused = builder.add("unused", (4,), "float32", "parameter")
    builder.like(unused, "neg", {"input": Ref(unused)})
    y = builder.like(x, "mul", {"input": Ref(x), "other": Ref(w)})
    late = builder.add("state", (3,), "float32", "state")
    new = builder.like(w, "add", {"input": Ref(w), "other": Ref(late)})
    lr = builder.add("lr", (), "float32", "input")
    step = builder.finish(
        [x], [y], updates=[(w, new), (late, late)], hyperparameters={"lr": lr}, initial={late: 2.0}
    )
    assert [v.name for v in step.values] == ["x", "w", "state", "lr", "mul", "add"]
    assert [op.kind for op in step.ops] == ["mul", "add"]
    assert step.updates == ((1, 5),), "a state updated by itself is not updated"
    assert (dict(step.hyperparameters), dict(step.initial)) == ({"lr": 3}, {2: 2.0})


def test_an_output_mask_follows_what_is_read():
    builder, x, _ = small()
    attrs = {"input": Ref(x), "output_mask": (True, False, True)}
    first, last = builder.call("backward", attrs, [((2, 3), "float32"), ((3,), "float32")])
    both = builder.finish([x], [first, last]).ops[0]
    assert both.attrs["output_mask"] == (True, False, True) and len(both.outputs) == 2
    one = builder.finish([x], [last]).ops[0]
    assert one.attrs["output_mask"] == (False, False, True) and len(one.outputs) == 1


def test_a_copy_grows_alone_and_shares_names():
    builder, x, _ = small()
    other = builder.copy()
    y = other.like(x, "neg", {"input": Ref(x)})
    assert len(builder.ops) == 0 and [v.name for v in other.finish([x], [y]).values] == ["x", "neg"]


def test_an_update_of_another_shape_is_refused():
    builder, x, w = small()
    with pytest.raises(CaptureError, match="same shape and dtype"):
        builder.finish([x], [], updates=[(w, builder.like(x, "neg", {"input": Ref(x)}))])


def test_operators_on_a_value_have_its_shape_and_dtype():
    builder, x, w = small()
    term = Term(builder, x, "layer").apply("add", Term(builder, w), alpha=2.0)
    y = term.value
    op = builder.maker(y)
    assert op is not None and op.inputs == (x, w) and op.scope == "layer"
    assert op.attrs == {"input": Input(0), "other": Input(1), "alpha": 2.0}
    assert (builder.values[y].shape, builder.values[y].dtype) == ((2, 3), "float32")
    negative = builder.maker((-term).value)
    assert negative is not None and negative.attrs == {"input": Input(0)}


def test_a_cast_to_the_same_dtype_adds_nothing():
    builder, x, _ = small()
    assert builder.cast(x, "float32") == x and not builder.ops
    half = builder.values[builder.cast(x, "float16")]
    assert (half.shape, half.dtype, [op.kind for op in builder.ops]) == ((2, 3), "float16", ["_to_copy"])
