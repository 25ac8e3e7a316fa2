"""Quantised weights: kernels compute them where they load them, in forward and in backward."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchedge
from torchedge.lowering.inference import capture_model, lower_inference
from torchedge.lowering.targets import TARGETS

pytest.importorskip("pyopencl")

VOCABULARY, WIDTH, HIDDEN = 301, 64, 172
FORMATS = [("int8", None, False), ("int8", 32, True), ("int4", 32, False), ("int4", 128, True)]


class Adapted(nn.Module):
    """A linear layer and a low-rank correction of it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 8)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Tied(nn.Module):
    """Rows of an embedding, a layer up and down, scores by the embedding; `HIDDEN` fills no whole groups."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.down(F.silu(self.up(x))))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Tied().eval()


def dequantized(quantized):
    """Return a model of plain layers with the weights that a quantised one computes, in float64."""
    plain = Tied()
    with torch.no_grad():
        for name in ("embedding", "up", "down"):
            layer = getattr(quantized, name)
            getattr(plain, name).weight.copy_(layer.weight)
        plain.up.bias.copy_(quantized.up.bias)
    return plain.double().eval()


def is_matrix(shape):
    """Return whether a tensor has the size of a weight, whole or padded to groups of 32."""
    return torch.Size(shape).numel() in {VOCABULARY * WIDTH, HIDDEN * WIDTH, WIDTH * (HIDDEN + 20)}


def drawn(rows):
    return torch.randint(0, VOCABULARY, (1, rows), generator=torch.Generator().manual_seed(rows))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("format", "group", "zero_points"), FORMATS)
def test_an_inference_computes_what_the_dequantised_model_computes(model, format, group, zero_points):
    quantized = torchedge.quantize(model, format, group=group, zero_points=zero_points)
    ids = drawn(7)
    with torch.no_grad():
        exact = dequantized(quantized)(ids).numpy()
        single = abs(dequantized(quantized).float()(ids).numpy() - exact).max()
        eager = quantized(ids).numpy()
    assert abs(eager - exact).max() <= 2 * single
    (output,), _ = torchedge.plan(quantized, ids, device="local-cpu").run(ids)
    assert abs(output - exact).max() <= 4 * single


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("format", "group", "zero_points"), FORMATS)
def test_a_product_with_a_vector_reads_its_matrix_as_it_lies(target, format, group, zero_points):
    quantized = torchedge.quantize(nn.Linear(256, 96), format, group=group, zero_points=zero_points)
    programs = [
        lower_inference(capture_model(quantized, torch.zeros(rows, 256)), TARGETS[target]).program
        for rows in (1, 600)
    ]
    vector, matrix = ([kernel for kernel in p.kernels if kernel.kind == "matmul"] for p in programs)
    assert [kernel.name.split("_")[0] for kernel in (*vector, *matrix)] == ["rows", "contraction"]
    assert vector[0].load_class == matrix[0].load_class == "reusable"  # weights stream beside both


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 600])
@pytest.mark.parametrize("target", TARGETS)
def test_no_tensor_of_a_program_holds_weights_that_are_unpacked(model, target, rows):
    quantized = torchedge.quantize(model, "int4", group=32)
    program = lower_inference(capture_model(quantized, drawn(rows)), TARGETS[target]).program
    weights = VOCABULARY * WIDTH + HIDDEN * WIDTH + WIDTH * (HIDDEN + 20)  # padded to whole groups
    stored = [t for t in program.tensors if t.role not in ("input", "output", "intermediate")]
    floats = [t for t in stored if t.name == "up.bias"]
    assert sum(t.layout.nbytes(t.shape, t.dtype) for t in stored if t not in floats) <= weights * 4.5 / 8 + 8
    assert not [t for t in program.tensors if t.role == "intermediate" and is_matrix(t.shape)]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "group", "zero_points"), FORMATS)
def test_adapters_of_a_quantised_base_get_the_gradients_of_the_dequantised_model(
    model, format, group, zero_points
):
    quantized = torchedge.quantize(model, format, group=group, zero_points=zero_points)
    exact = dequantized(quantized)
    for parameter in [*quantized.parameters(), *exact.parameters()]:
        parameter.requires_grad_(False)
    torch.manual_seed(1)
    for name in ("up", "down"):
        adapted = Adapted(getattr(quantized, name))
        setattr(quantized, name, adapted)
        wrapped = Adapted(getattr(exact, name))
        wrapped.load_state_dict(
            {**wrapped.base.state_dict(prefix="base."), "down": adapted.down, "up": adapted.up}
        )
        setattr(exact, name, wrapped.double())
    ids, labels = drawn(48), drawn(49)[:, 1:]

    def loss(scores, labels):
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

    before = {name: p.detach().clone() for name, p in quantized.named_parameters() if p.requires_grad}
    loss(exact(ids), labels).backward()
    adapters = [p for p in quantized.parameters() if p.requires_grad]
    mine = torch.optim.SGD(adapters, lr=1.0)
    with torchedge.Trainer(quantized, ids, labels, loss=loss, optimizer=mine) as trainer:
        trainer.step(ids, labels)
        programs = [executor.program for executor in trainer._executors()]
    made = [t for program in programs for t in program.tensors if t.role == "intermediate"]
    assert not [t for t in made if is_matrix(t.shape)]
    for name, gradient in ((n, p.grad) for n, p in exact.named_parameters() if p.requires_grad):
        step = before[name].double() - quantized.get_parameter(name).double()
        assert (step - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


@pytest.mark.slow
def test_a_bundle_of_packed_weights_streams_fewer_bytes(model, tmp_path):
    ids = drawn(7)
    sizes, outputs = [], []
    for net in (model, torchedge.quantize(model, "int4", group=32)):
        torchedge.export(net, ids, device="local-cpu", out=tmp_path / str(len(sizes)))
        bundle = torchedge.load_bundle(tmp_path / str(len(sizes)))
        sizes.append((bundle.path / "weights.safetensors").stat().st_size)
        outputs.append(bundle.run(ids.numpy())[0])
    expected, _ = torchedge.plan(net, ids, device="local-cpu").run(ids)
    assert outputs[1].tobytes() == expected[0].tobytes()
    assert sizes[1] < sizes[0] / 4  # each tensor begins at a page


def test_layers_keep_their_classes_and_share_what_they_shared(model):
    before = deepcopy(model.state_dict())
    quantized = torchedge.quantize(model, "int8", skip=["down"])
    assert quantized.head.quantized is quantized.embedding.quantized
    assert isinstance(quantized.up, nn.Linear) and type(quantized.down) is nn.Linear
    assert (quantized.up.weight - model.up.weight).abs().max() <= model.up.weight.abs().max() / 254 * 1.001
    assert {t.dtype for t in quantized.up.quantized.state_dict().values()} == {torch.int8, torch.float32}
    again = torchedge.quantize(Tied(), "int8", skip="down")
    again.load_state_dict(quantized.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(drawn(7)), quantized(drawn(7)))
        assert quantized.double()(drawn(7)).dtype == torch.float64
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e6, 1e30])
def test_weights_of_any_size_are_rounded_within_half_a_step(size):
    layer = nn.Linear(64, 16)
    with torch.no_grad():
        layer.weight.mul_(size)
    for format, steps in (("int8", 127), ("int4", 7)):
        weight = torchedge.quantize(nn.Sequential(layer), format, group=32)[0].weight
        step = layer.weight.detach().unflatten(1, (-1, 32)).abs().amax(2) / steps
        error = (weight - layer.weight.detach()).unflatten(1, (-1, 32)).abs().amax(2)
        assert (error <= 0.6 * step).all()


def test_weights_that_are_not_finite_are_refused_by_name():
    layer = nn.Sequential(nn.Linear(8, 8))
    with torch.no_grad():
        layer[0].weight[2, 3] = float("nan")
    with pytest.raises(torchedge.InputError, match=r"0\.weight is not finite in all places"):
        torchedge.quantize(layer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "int3"}, "int3"),
        ({"group": 1}, "group is 1; expected a whole number from 2 on"),
        ({"skip": ["heads"]}, "skip names heads, which Tied does not have"),
        ({"skip": ["up", "down", "head", "embedding"]}, "no linear layer and no embedding"),
    ],
)
def test_what_cannot_be_quantised_says_so(model, arguments, message):
    with pytest.raises(torchedge.InputError, match=message):
        torchedge.quantize(model, **arguments)


def test_an_embedding_of_another_class_computes_what_its_forward_says():
    class Scaled(nn.Embedding):
        def forward(self, ids, scale=3.0):
            return super().forward(ids) * scale

    torch.manual_seed(0)
    model, ids = nn.Sequential(Scaled(20, 8)), torch.arange(20)
    with torch.no_grad():
        torch.testing.assert_close(torchedge.quantize(model)(ids), model(ids), atol=0.05, rtol=0)
