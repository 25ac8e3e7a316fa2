"""The memory of steps under torch.compile: fused kernels by closed forms, and whole predictions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge.errors import CaptureError
from torchedge.graphs.partitions import PartGraph, PartOp
from torchedge.prediction.memory.compiled_steps import FusedGraph, step_bytes
from torchedge.tracing.partitions import partition

SIZE = 4096
ARGUMENT = PartOp("input", sizes=(SIZE,), elements=1024, rows=1024)


def pointwise(*sources):
    return PartOp("pointwise", tuple((s, 0) for s in sources), (SIZE,), 1024, 1024)


def library(*sources):
    return PartOp("kernel", tuple((s, 0) for s in sources), (SIZE,), 1024, 1024)


def peak(*ops, results, arguments=(), lent=()):
    graph = PartGraph(ops, tuple((position, 0) for position in results))
    return FusedGraph(graph).peak({(a, 0): SIZE for a in arguments}, {(a, 0) for a in lent})


def test_a_chain_of_element_wise_operators_holds_its_result_alone():
    assert peak(ARGUMENT, pointwise(0), pointwise(1), pointwise(2), results=[3]) == SIZE


def test_what_a_library_reads_and_writes_is_allocated():
    assert peak(ARGUMENT, pointwise(0), library(1), pointwise(2), results=[3]) == 2 * SIZE


def test_a_result_takes_the_place_of_an_argument_that_dies_unless_it_is_lent():
    assert peak(ARGUMENT, pointwise(0), results=[1], arguments=[0]) == SIZE
    assert peak(ARGUMENT, pointwise(0), results=[1], arguments=[0], lent=[0]) == 2 * SIZE


def test_a_library_cannot_write_over_what_it_reads():
    assert peak(ARGUMENT, library(0), results=[1], arguments=[0]) == 2 * SIZE


def test_rows_are_normalised_in_the_kernel_that_reduces_them():
    total = PartOp("reduction", ((1, 0),), (512,), 1024, 4)
    normal = PartOp("pointwise", ((1, 0), (2, 0)), (SIZE,), 1024, 1024)
    assert peak(ARGUMENT, pointwise(0), total, normal, results=[3]) == SIZE


def saved_bytes(model, *inputs, amp=None):
    split = partition(model, inputs, {}, inputs[0].shape[0], amp, own_loss=False)
    buffers = {buffer for _, buffer in split.saved}
    return sum(split.forward.ops[position].sizes[number] for position, number in buffers)


@pytest.mark.parametrize("amp", [None, "bfloat16"])
def test_products_save_what_their_gradients_read(amp):
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    item = 4 if amp is None else 2
    casts = 0 if amp is None else item * (64 * 256 + 256 * 1024)  # of the input, and of the second weight
    hidden = item * 64 * 1024
    assert saved_bytes(model, torch.empty(64, 256), amp=amp) == 2 * hidden + casts


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.project, self.mask = nn.Linear(64, 64), mask

    def forward(self, x):
        x = self.project(x)
        mask = torch.ones(64, dtype=torch.bool)
        masks = {"none": None, "dense": mask[None, None, None].expand(8, 1, 64, 64)}
        masks["rows"] = mask[None, None, :, None].expand(8, 1, 64, 64)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=masks[self.mask])


def test_a_mask_whose_rows_are_not_dense_keeps_the_probabilities():
    x = torch.empty(8, 4, 64, 64)
    none, dense, rows = (saved_bytes(Attention(mask), x) for mask in ("none", "dense", "rows"))
    probabilities = 4 * 8 * 4 * 64 * 64
    assert none <= dense < rows
    assert rows >= probabilities + 4 * x.numel()


def test_keys_of_one_head_for_all_queries_keep_the_probabilities():
    class OneHead(nn.Module):
        def __init__(self, heads):
            super().__init__()
            self.project, self.heads = nn.Linear(64, 64), heads

        def forward(self, x):
            x = self.project(x)
            keys = x[:, : self.heads]
            return F.scaled_dot_product_attention(x, keys, keys)

    x = torch.empty(8, 4, 64, 64)
    probabilities = 4 * 8 * 4 * 64 * 64
    assert saved_bytes(OneHead(1), x) > saved_bytes(OneHead(4), x) + probabilities


def test_tied_weights_are_one_argument():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    split = partition(Tied(), (torch.zeros(4, 16, dtype=torch.int64),), {}, 4, None, own_loss=False)
    weights = [op for op in split.forward.ops if op.role == "input" and op.sizes == (4 * 512 * 64,)]
    assert len(weights) == 1
    assert step_bytes(split) > 0


def test_what_decides_by_values_is_refused():
    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="one graph"):
        partition(Deciding(), (torch.empty(2, 8),), {}, 2, None, own_loss=False)


class Chain(nn.Module):
    """A product and a chain whose intermediate results eager PyTorch keeps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 4096)

    def forward(self, x):
        x = self.layer(x)
        for _ in range(6):
            x = torch.sin(x) * x
        return x


def test_predictions_of_compiled_models_follow_their_own_graphs():
    options = {"batch_size": 4096, "device": "nvidia-h100", "input_size": (256,), "loss": lambda y: y.mean()}
    eager, compiled = (torchedge.predict(Chain(), compile=c, **options) for c in (False, True))
    assert compiled.allocated.value < 0.5 * eager.allocated.value
    assert compiled.memory.value < eager.memory.value
    assert compiled.breakdown["saved_activations"] < compiled.allocated.value
    assert compiled.unsupported == ()
    assert any(note.startswith("torch.compile") for note in compiled.notes)
    assert torchedge.predict(torch.compile(Chain()), **options).allocated == compiled.allocated
    assert compiled.max_batch_size("8GiB") > eager.max_batch_size("8GiB")


def test_a_recurrent_model_keeps_the_figures_of_eager_pytorch():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(32, 32, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    options = {"batch_size": 4, "device": "nvidia-h100", "input_size": (16, 32), "loss": lambda y: y.mean()}
    eager, compiled = (torchedge.predict(Recurrent(), compile=c, **options) for c in (False, True))
    assert compiled.unsupported == ("torch.compile",)
    assert compiled.allocated.value == eager.allocated.value
