"""From graphs to operations: what counts as an operation, what each reads, what it costs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchedge.errors import InputError
from torchedge.streaming.layering import lay_out
from torchedge.tracing.capturing import capture


def laid_out(model, *example, **options):
    with torch.device("meta"):
        fed = tuple(torch.zeros(e) if isinstance(e, tuple) else e for e in example)
    graph = capture(model.eval(), fed, mode="infer", method=options.pop("method", "auto"))
    return lay_out(graph, **options)


def kinds(graph):
    return [op.kind for op in graph.operations]


class Viewed(nn.Module):
    """Reads one weight through a transpose, another through slices, long after the views are made."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(8, 4))
        self.packed = nn.Parameter(torch.zeros(3, 4, 4))

    def forward(self, x):
        turned = self.first.t()
        queries, keys, _ = self.packed.unbind(0)
        x = torch.tanh(x)
        x = torch.relu(x)
        x = x @ turned.contiguous().view(4, 8)[:, :4]
        x = x @ queries
        return x @ keys.transpose(0, 1)


@pytest.mark.parametrize("method", ["trace", "export"])
def test_a_weight_is_used_where_an_operation_reads_its_view(method):
    graph = laid_out(Viewed(), (2, 4), method=method)
    assert kinds(graph) == ["tanh", "relu", "clone", "matmul", "matmul", "matmul"]
    assert graph.uses == {"first": (3, 3), "packed": (5, 6)}
    assert {w.name: w.nbytes for w in graph.weights} == {"first": 2 * 8 * 4, "packed": 2 * 3 * 4 * 4}
    assert [op.inputs for op in graph.operations] == [(), (0,), (), (1, 2), (3,), (4,)]
    assert graph.outputs == (5,)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(F.dropout(self.middle(self.embed(tokens)), 0.1, self.training))


@pytest.mark.parametrize("method", ["trace", "export"])
def test_a_tied_weight_is_one_weight_and_an_embedding_reads_its_rows(method):
    tokens = torch.zeros(1, 7, dtype=torch.int64, device="meta")
    graph = laid_out(Tied(), tokens, method=method)
    assert kinds(graph) == ["embedding", "linear", "linear"]
    assert graph.uses["embed.weight"] == (1, 3)
    assert sum(w.nbytes for w in graph.weights) == graph.weight_bytes == 2 * (1000 * 16 + 16 * 16 + 16)
    embedding, middle, head = graph.operations
    assert embedding.load_class == "elemental"
    assert embedding.bytes_moved == 2 * 7 * 16 + 2 * 7 * 16 + 8 * 7  # rows read and written, tokens
    assert middle.load_class == head.load_class == "reusable"
    assert middle.flops == 2 * 7 * 16 * 16 + 7 * 16
    assert middle.bytes_moved == 2 * (7 * 16 + 16 * 16 + 16 + 7 * 16)
    assert head.flops == 2 * 7 * 16 * 1000
    assert graph.input_bytes == 8 * 7


class Joined(nn.Module):
    """Two inputs, an in-place write and two results."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(3, 6)

    def forward(self, x, y):
        x, y = self.left(x), self.right(y)
        y.add_(1)
        return {"sum": x + y, "right": y.view(-1)}


def test_several_inputs_and_in_place_writes():
    graph = laid_out(Joined(), (1, 4), (1, 3))
    assert kinds(graph) == ["linear", "linear", "add", "add"]
    assert [op.inputs for op in graph.operations] == [(), (), (1,), (0, 2)]
    assert graph.outputs == (3, 2)
    assert graph.input_bytes == 2 * (4 + 3)


def test_what_is_read_after_a_write_through_a_view_depends_on_the_write():
    class Filling(nn.Module):
        def forward(self, x):
            room = torch.zeros_like(x)
            room[:, :2].copy_(x[:, :2])
            return room + x

    graph = laid_out(Filling(), (1, 4))
    assert kinds(graph) == ["zeros_like", "copy", "add"]
    assert graph.operations[2].inputs == (0, 1)


def test_statistics_of_batch_norm_are_weights_and_its_counter_is_none():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
    graph = laid_out(model, (1, 3, 8, 8))
    assert kinds(graph) == ["conv2d", "batch_norm", "relu"]
    assert [op.load_class for op in graph.operations] == ["reusable", "hierarchical", "elemental"]
    names = ["0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert [w.name for w in graph.weights] == names
    conv, norm, relu = graph.operations
    assert conv.flops == 2 * 8 * 6 * 6 * 27
    assert conv.bytes_moved == 2 * (3 * 64 + 8 * 27 + 8 * 36)
    assert norm.bytes_moved == 2 * (8 * 36 * 2 + 4 * 8)
    assert relu.output_bytes == 2 * 8 * 36


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("table", torch.zeros(64, 4))
        self.places = nn.Parameter(torch.zeros(64, 4))

    def forward(self, x):
        count = x.shape[1]
        x = x * self.scale + self.places[:count] + self.table[:count]
        return (x @ x.transpose(1, 2)).masked_fill(self.mask[:count, :count], 0.0)


@pytest.mark.parametrize("method", ["trace", "export"])
def test_of_buffers_the_slices_read_are_stored_of_parameters_all(method):
    graph = laid_out(Masked(), (1, 10, 4), method=method)
    assert {w.name: w.nbytes for w in graph.weights} == {
        "places": 2 * 64 * 4,
        "table": 2 * 10 * 4,
        "mask": 10 * 10,
    }
    assert (
        graph.operations[1].bytes_moved == 2 * (10 * 4) * 3
    )  # the slice of the table is read, not all of it


@pytest.mark.parametrize(("precision", "size"), [("float16", 2), ("float32", 4), ("model", 8)])
def test_precision(precision, size):
    graph = laid_out(nn.Linear(4, 5).double(), torch.zeros(1, 4, dtype=torch.float64), precision=precision)
    (linear,) = graph.operations
    assert [w.nbytes for w in graph.weights] == [size * 20, size * 5]
    assert (linear.output_bytes, graph.input_bytes) == (size * 5, size * 4)
    assert graph.precision == precision


@pytest.mark.parametrize(("precision", "expected"), [("float16", ["neg"]), ("model", ["to_copy", "neg"])])
def test_casts_between_floating_dtypes_vanish_where_all_is_one_precision(precision, expected):
    class Casting(nn.Module):
        def forward(self, x):
            return -x.double()

    assert kinds(laid_out(Casting(), (1, 4), precision=precision)) == expected


def test_broadcast_views_are_read_once():
    class Broadcasting(nn.Module):
        def forward(self, x):
            return x.expand(64, 8) + x

    (add,) = laid_out(Broadcasting(), (1, 8)).operations
    assert add.bytes_moved == 2 * (8 + 8 + 64 * 8)


def test_batch_size():
    model = nn.Linear(4, 5).to("meta")
    graph = capture(model, input_size=(4,), mode="infer")
    one, many = lay_out(graph).operations[0], lay_out(graph, batch_size=9).operations[0]
    assert many.flops == 9 * one.flops and many.output_bytes == 9 * one.output_bytes
    fixed = capture(model, input_size=(4,), mode="infer", batch_size=3)
    with pytest.raises(InputError, match="captured for 3 only"):
        lay_out(fixed)


def test_wrong_input():
    graph = capture(nn.Linear(4, 5), input_size=(4,), mode="infer")
    with pytest.raises(InputError, match="precision is 'int8'"):
        lay_out(graph, precision="int8")
    with pytest.raises(InputError, match='mode="infer"'):
        lay_out(capture(nn.Linear(4, 5), input_size=(4,)))


def test_unknown_operators_are_named():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x):
            return torch.renorm(x, 2, 0, 1.0) + torch.renorm(self.weight, 2, 0, 1.0)

    graph = laid_out(Strange(), (1, 4))
    assert kinds(graph) == ["renorm", "renorm", "add"]
    assert graph.operations[1].load_class == "reusable"
    assert "operator renorm is not known" in graph.notes[-1]


def test_names_of_operations_are_unique_and_say_where_they_are():
    graph = laid_out(Masked(), (1, 10, 4))
    names = [op.name for op in graph.operations]
    assert len(set(names)) == len(names)
    assert laid_out(nn.Sequential(nn.ReLU()), (1, 4)).operations[0].name == "0.relu"
