"""A captured ForwardGraph: its text, its digest, its invariants, its shapes at several batch sizes."""

import dataclasses

import pytest
import torch
from oracles.graph_checks import digest as digest_of
from oracles.graph_checks import verify
from torch import nn
from torch.overrides import TorchFunctionMode
from tracing.networks import NETWORKS, SmallNet, image

from torchedge.errors import CaptureError
from torchedge.graphs import Value
from torchedge.graphs.sizes import BATCH_PRIME, Affine, decode_dim, poly, poly_at, symbolic
from torchedge.tracing.capturing import capture

GOLDEN = """\
graph SmallNet (train, 9 ops, 126 parameters)
  %x: float32[N×3×8×8] = input
  %conv2d_2: float32[N×4×8×8] = conv2d(%x, %conv.weight, None) \
{stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1}  # conv
  %add_4: int64[scalar] = add!(%norm.num_batches_tracked) {other=1}  # norm
  %batch_norm_9: float32[N×4×8×8] = batch_norm(%conv2d_2, %norm.weight, %norm.bias, \
%norm.running_mean, %norm.running_var) {training=True, momentum=0.1, eps=1e-05, cudnn_enabled=True}  # norm
  %relu_10: float32[N×4×8×8] = relu!(%batch_norm_9)
  %adaptive_avg_pool2d_11: float32[N×4×1×1] = adaptive_avg_pool2d(%relu_10) {output_size=1}
  %flatten_12: float32[N×4] = flatten(%adaptive_avg_pool2d_11) {start_dim=1}
  %linear_15: float32[N×2] = linear(%flatten_12, %head.weight, %head.bias)  # head
  %zeros_16: int64[N] = zeros() {arg0=(N,), dtype=int64}  # loss
  %cross_entropy_loss_17: float32[scalar] = cross_entropy_loss(%linear_15, %zeros_16, None) \
{reduction=1, ignore_index=-100, label_smoothing=0.0}  # loss
  return %linear_15
  loss %cross_entropy_loss_17"""


def test_golden_text():
    assert str(capture(SmallNet(), image(3, 8, 8))) == GOLDEN


def test_digest_tells_graphs_apart():
    def digest(width=4, side=8, **options):
        return digest_of(capture(SmallNet(width), image(3, side, side), **options))

    assert digest() == digest() == digest(name="another name")
    different = {
        digest(),
        digest(5),
        digest(side=9),
        digest(mode="infer"),
        digest(batch_size=2),
        digest(loss=None),
    }
    assert len(different) == 6


def test_digest_does_not_depend_on_the_example():
    assert digest_of(capture(SmallNet(), torch.zeros(5, 3, 8, 8))) == digest_of(
        capture(SmallNet(), input_size=(3, 8, 8))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: {"outputs": (len(g.values) - 1, 10**6)}, ""),
        (lambda g: {"ops": g.ops[1:]}, "before it is made"),
        (lambda g: {"ops": (g.ops[0], *g.ops)}, "a second time"),
        (lambda g: {"releases": g.releases[1:]}, "differ in number"),
        (lambda g: {"releases": ((g.ops[0].outputs[0],), *g.releases[1:])}, "after it was released"),
        (lambda g: {"values": (g.values[0],) * len(g.values)}, "share a name"),
        (lambda g: {"values": (Value("x", (Affine(-1, 3),), "float32", "input"), *g.values[1:])}, "negative"),
    ],
)
def test_verify_finds_what_is_broken(change, words):
    graph = capture(SmallNet(), image(3, 8, 8))
    verify(graph)
    with pytest.raises(CaptureError, match=words or None):
        verify(dataclasses.replace(graph, **change(graph)))


class Shapes(TorchFunctionMode):
    """Collects the shapes that modules return, by the module's name: an oracle that shares no code."""

    def __init__(self, model):
        super().__init__()
        self.found = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self.hook(name))

    def hook(self, name):
        def keep(module, args, output):
            if isinstance(output, torch.Tensor):
                self.found[name] = tuple(output.shape)

        return keep


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mobilenet_v3_small", (3, 96, 96)),
        ("densenet121", (3, 64, 64)),
        ("swin_t", (3, 64, 64)),
        ("r3d_18", (3, 8, 32, 32)),
    ],
)
def test_shapes_agree_with_a_real_forward_pass(name, size):
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.get_model(name, weights=None).eval()
        graph = capture(model, input_size=size, mode="infer")
        oracle = Shapes(model)
        produced = {op.scope: op.outputs[0] for op in graph.ops if op.scope}
        for batch in (1, 2, 7):
            model(torch.empty(batch, *size))
            compared = [n for n in oracle.found if n in produced]
            assert len(compared) > 10
            for scope in compared:
                assert graph.values[produced[scope]].at(batch) == oracle.found[scope], scope


@pytest.mark.parametrize("name", ["lstm", "attention", "convolutions", "time_steps", "small", "encoder"])
def test_outputs_at_several_batch_sizes(name):
    build, example = NETWORKS[name]
    model = build().eval()
    graph = capture(model, example(), mode="infer")
    for batch in (1, 3, 8):
        with torch.no_grad():
            result = model(torch.zeros(batch, *example().shape[1:]))
        assert graph.values[graph.outputs[0]].at(batch) == tuple(result.shape)


def test_releases_follow_python():
    """The block's input lives until the addition; a value dropped earlier is released earlier."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            y = self.b(y)
            return x + y

    graph = capture(Residual(), image(8), mode="infer")
    first, second = graph.ops[0].outputs[0], graph.ops[1].outputs[0]
    where = {index: position for position, indices in enumerate(graph.releases) for index in indices}
    assert where[first] == 1
    assert second not in where or where[second] == 2


@pytest.mark.parametrize("slope", [1, 2, 49, 196])
@pytest.mark.parametrize("const", [-3, 0, 1, 1000])
def test_dimensions_are_read_back(slope, const):
    assert decode_dim(slope * BATCH_PRIME + const) == Affine(slope, const)


@pytest.mark.parametrize("size", [BATCH_PRIME // 2, BATCH_PRIME**2, BATCH_PRIME // 3 * 2])
def test_other_dimensions_are_refused(size):
    with pytest.raises(CaptureError, match="not affine"):
        decode_dim(size)


def test_amounts_are_polynomials():
    n, m = symbolic((Affine(2, 1), Affine(1)))
    assert poly(n * m + 5) == (5, 1, 2)
    assert poly_at(poly(n * m + 5), 10) == 21 * 10 + 5


def test_an_empty_graph_is_refused():
    with pytest.raises(CaptureError, match="runs no operator"):
        capture(nn.Identity(), image(8), mode="infer", method="trace")


def test_the_digest_tells_parameters_that_no_operator_reads():
    class Headed(nn.Module):
        def __init__(self, unused):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, unused)

        def forward(self, x):
            return self.used(x)

    assert len({digest_of(capture(Headed(n), input_size=(8,))) for n in (4, 16, 4)}) == 2
