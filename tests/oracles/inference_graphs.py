"""Inference graphs made by hand or at random, whose bytes and weights agree with their edges."""

from hypothesis import strategies as st

from torchedge.streaming.layering import InferenceGraph, Operation, StoredWeight

CLASSES = {
    **dict.fromkeys(("linear", "conv2d", "matmul", "lstm"), "reusable"),
    **dict.fromkeys(("softmax", "layer_norm", "mean", "batch_norm"), "hierarchical"),
    **dict.fromkeys(("gelu", "relu", "add", "mul", "cat", "embedding"), "elemental"),
}
KINDS = (*CLASSES, *("gelu", "relu", "add", "mul") * 3, *("linear", "conv2d") * 2)


def make_graph(*rows, outputs=None, weight_bytes=1000, input_bytes=64):
    """Rows are (name, kind, inputs, output_bytes, weights); inputs are names of earlier rows."""
    places = {row[0]: place for place, row in enumerate(rows)}
    sizes = {row[0]: row[3] for row in rows}
    operations = []
    for name, kind, inputs, size, weights in rows:
        moved = sum(sizes[i] for i in inputs) + size + weight_bytes * len(weights)
        flops = size * (100 if CLASSES[kind] == "reusable" else 1)
        operations.append(
            Operation(
                name,
                kind,
                CLASSES[kind],
                flops,
                moved,
                tuple(weights),
                tuple(places[i] for i in inputs),
                size,
            )
        )
    stored = dict.fromkeys(name for row in rows for name in row[4])
    returned = (len(rows) - 1,) if outputs is None else tuple(places[name] for name in outputs)
    weights = tuple(StoredWeight(name, weight_bytes) for name in stored)
    return InferenceGraph("net", tuple(operations), weights, input_bytes, returned)


@st.composite
def graphs(draw, most=14):
    """Any DAG: wide and narrow, results read often or never, weights shared, a chain here and there."""
    rows = []
    for place in range(draw(st.integers(1, most))):
        earlier = st.integers(max(0, place - 5), max(0, place - 1))
        inputs = draw(st.lists(earlier, min_size=1, max_size=2, unique=True)) if place else []
        if place and draw(st.booleans()):
            inputs = [place - 1]
        weights = draw(st.lists(st.integers(0, 6), max_size=2, unique=True))
        kind = draw(st.sampled_from(KINDS))
        size = draw(st.sampled_from((100,) * 8 + (40, 300)))
        rows.append((f"op{place}", kind, [f"op{i}" for i in inputs], size, [f"w{i}" for i in weights]))
    returned = draw(st.lists(st.integers(0, len(rows) - 1), max_size=2, unique=True))
    return make_graph(*rows, outputs=sorted({f"op{i}" for i in returned} | {f"op{len(rows) - 1}"}))
