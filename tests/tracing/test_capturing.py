"""Capture of small networks: what comes out, what is refused, and that the model is left as found."""

import contextlib
import copy
import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.graph_checks import digest as digest_of
from oracles.graph_checks import verify
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from tracing import networks
from tracing.networks import NETWORKS, BatchLoop, Halving, ManyInputs, Reads, SmallNet, image

from torchedge.errors import CaptureError, InputError
from torchedge.graphs import FUNCTION_REGION
from torchedge.graphs.sizes import BATCH_PRIME, poly, symbolic
from torchedge.ops import registry
from torchedge.tracing.capturing import CaptureRequest, capture, capture_each, capture_request, use_graph
from torchedge.tracing.copies import forget_cached

NO_EXPORT = {"layer_drop"}


def kinds(graph):
    return [op.kind for op in graph.ops]


def parameters(graph):
    return sum(v.numel[0] for v in graph.parameters)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", NETWORKS)
def test_trace(name, mode):
    build, example = NETWORKS[name]
    with left_as_found(build()) as model:
        graph = capture(model, example(), mode=mode, method="trace")
    verify(graph)
    assert not graph.unsupported
    assert graph.captured_by == "trace"
    assert graph.training == (mode == "train") == (graph.loss is not None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - NO_EXPORT))
def test_export_agrees_with_trace(name, mode):
    build, example = NETWORKS[name]
    with left_as_found(build()) as model:
        exported = capture(model, example(), mode=mode, method="export")
    traced = capture(model, example(), mode=mode, method="trace")
    verify(exported)
    assert exported.captured_by == "export"
    assert exported.releases is None
    assert not exported.unsupported
    assert {v.name for v in exported.parameters} == {v.name for v in traced.parameters}
    assert parameters(exported) == parameters(traced)
    shapes = [[g.values[i].shape for i in g.outputs] for g in (exported, traced)]
    assert shapes[0] == shapes[1]
    heavy = [
        [o.kind for o in g.ops if registry()[o.kind].load.name == "REUSABLE"] for g in (exported, traced)
    ]
    assert heavy[0] == heavy[1]


class State:
    """Everything of a model and the process that a capture must not change."""

    def __init__(self, model):
        self.tensors = {k: v.detach().clone() for k, v in model.state_dict(keep_vars=True).items()}
        self.identities = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
        self.modes = [m.training for m in model.modules()]
        self.required = [p.requires_grad for p in model.parameters()]
        self.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.attributes = [{k: id(v) for k, v in vars(m).items()} for m in model.modules()]
        self.inside = [
            [len(v) for v in vars(m).values() if isinstance(v, (dict, list, set))] for m in model.modules()
        ]
        self.torch_state = torch.get_rng_state().clone()
        self.python_state = random.getstate()
        self.numpy_state = np.random.get_state()[1].copy()

    def assert_same(self, model):
        now = State(model)
        assert self.identities == now.identities
        assert all(
            torch.equal(a, b) for a, b in zip(self.tensors.values(), now.tensors.values(), strict=True)
        )
        assert all(
            (a is None and b is None) or torch.equal(a, b) for a, b in zip(self.grads, now.grads, strict=True)
        )
        assert torch.equal(self.torch_state, now.torch_state)
        assert np.array_equal(self.numpy_state, now.numpy_state)
        for field in ("modes", "required", "attributes", "inside", "python_state"):
            assert getattr(self, field) == getattr(now, field), field


@contextlib.contextmanager
def left_as_found(model):
    """Give a model gradients, and hold it and the process against what they were before."""
    for parameter in model.parameters():
        if parameter.is_leaf:
            parameter.grad = torch.ones_like(parameter)
    before = State(model)
    yield model
    before.assert_same(model)


@pytest.mark.parametrize("network", [Reads, Halving, lambda: BatchLoop("range")])
def test_the_model_is_left_as_found_after_a_failure(network):
    model = network().eval()
    before = State(model)
    with pytest.raises(CaptureError):
        capture(model, input_size=(8,))
    before.assert_same(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["caching", "memoised", "lstm", "small"])
@pytest.mark.parametrize("method", ["trace", "export"])
def test_the_model_runs_after_its_capture(name, method):
    build, example = NETWORKS[name]
    model = build()
    capture(model, example(), mode="infer", method=method)
    result = model(torch.randn_like(example()))
    assert type(result) is torch.Tensor
    assert result.device.type == "cpu"
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_on_meta_gives_the_same_graph(device):
    with torch.device(device):
        model = SmallNet()
    assert digest_of(capture(model, input_size=(3, 8, 8))) == digest_of(
        capture(SmallNet(), input_size=(3, 8, 8))
    )


def test_no_gradient_where_autograd_was_off():
    graph = capture(networks.NoGrad(), image(8))
    assert [op.grad for op in graph.ops if op.kind == "linear"] == [False, True]
    assert not any(op.grad for op in capture(networks.NoGrad(), image(8), mode="infer").ops)


def test_custom_functions_are_recorded_with_gradients_and_a_note():
    graph = capture(networks.CustomFunction(), image(8))
    own = "custom_function"
    assert kinds(graph)[:7] == ["linear", "mul", own, "mul", "mul", "mul", own]
    assert all(op.grad for op in graph.ops[:7])
    assert [len(op.footprint.saved) for op in graph.ops[:7] if op.kind == own] == [1, 1]
    assert ["Square" in note or "Cube" in note for note in graph.notes] == [True, True]


def test_a_custom_function_is_a_region_inside_of_a_checkpoint_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = networks.Square.apply(layer(x))
            return x

    class Checkpointed(Net):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    regions = [op.region for op in capture(Net(), image(8)).ops[:6]]
    assert regions == [0, regions[1], 0, 0, regions[4], 0]
    assert FUNCTION_REGION < regions[1] < regions[4]
    # before PyTorch 2.13, a checkpoint creates an empty tensor
    operators = [op for op in capture(Checkpointed(), image(8)).ops if op.kind != "empty"]
    inside = [(op.outer, op.region) for op in operators[:6]]
    checkpoint = inside[0][1]
    assert [outer for outer, _ in inside] == [(), (checkpoint,), ()] * 2
    assert [region for outer, region in inside if not outer] == [checkpoint] * 4


def test_autocast_inside_a_model_casts():
    graph = capture(networks.Autocast(), image(3, 8, 8), mode="infer")
    assert kinds(graph) == ["to_copy", "to_copy", "to_copy", "conv2d", "batch_norm", "softmax", "to_copy"]
    conv = next(op for op in graph.ops if op.kind == "conv2d")
    assert graph.values[conv.outputs[0]].dtype == "bfloat16"
    assert graph.values[graph.outputs[0]].dtype == "float32"


def test_frozen_layers_keep_their_mode():
    graph = capture(networks.Frozen(), image(3, 8, 8))
    assert next(op for op in graph.ops if op.kind == "batch_norm").attrs["training"] is False
    assert {v.name: v.trainable for v in graph.parameters}["conv.weight"] is False


def test_views_and_in_place_share_storage():
    graph = capture(networks.InPlace(), image(8), mode="infer")
    clone = next(op.outputs[0] for op in graph.ops if op.kind == "clone")

    def root(index):
        alias = graph.values[index].alias
        return index if alias is None else root(alias)

    assert root(graph.outputs[0]) == clone
    assert [op.inplace for op in graph.ops if op.kind == "relu"] == [True]


def test_fused_encoder_path_is_not_taken():
    graph = capture(networks.encoder(), image(5, 16), mode="infer")
    assert kinds(graph).count("scaled_dot_product_attention") == 2
    assert len(graph.parameters) == 24


def test_pytrees_of_inputs():
    example = {
        "batch": {"image": image(8), "ids": torch.zeros(2, dtype=torch.int64)},
        "extra": (image(8), image(8)),
    }
    graph = capture(ManyInputs(), example)
    assert len(graph.inputs) == 4
    assert len(graph.outputs) == 3
    positional = capture(ManyInputs(), (example["batch"], torch.zeros(())), mode="infer")
    assert positional.values[positional.inputs[-1]].shape == ()


@pytest.mark.parametrize("how", ["range", "iterate", "list", "split"])
def test_loops_over_the_batch_end_in_an_error(how):
    with pytest.raises(CaptureError, match=r"loops over the samples of the batch.*batch_size="):
        capture(BatchLoop(how), input_size=(8,), method="trace")
    graph = capture(BatchLoop(how), input_size=(8,), batch_size=3, mode="infer")
    assert graph.fixed_batch == 3
    assert graph.values[graph.outputs[0]].shape == (3, 8)


@pytest.mark.slow
def test_batches_that_are_not_affine():
    with pytest.raises(CaptureError, match=r"not affine"):
        capture(Halving(), input_size=(8,))
    graph = capture(Halving(), torch.zeros(6, 8))
    assert graph.fixed_batch == 6
    assert "batch size 6 only" in graph.notes[-1]
    assert capture(Halving(), torch.zeros(6, 8), batch_size=10).values[0].shape == (10, 8)
    assert capture(Halving(), torch.zeros(6, 8), batch_size=10, method="export").fixed_batch == 10


def test_values_cannot_be_read_and_both_reasons_are_named():
    with pytest.raises(
        CaptureError, match=r"reads the value of a tensor .*networks.py:\d+.*torch.where"
    ) as caught:
        capture(Reads(), image(8))
    assert "\n" not in str(caught.value)


def test_unsuitable_models_are_refused_with_a_reason():
    with pytest.raises(CaptureError, match="TorchScript"):
        capture(torch.jit.script(nn.Linear(2, 2)), image(2))
    with pytest.raises(CaptureError, match="lazy"):
        capture(nn.LazyLinear(2), image(2))
    with pytest.raises(CaptureError, match="no tensor"):
        capture(nn.Sequential(nn.Linear(2, 2), Nothing()), image(2))


class Nothing(nn.Module):
    def forward(self, x):
        return None


def test_a_missing_input_names_example():
    with pytest.raises(InputError, match=r"example="):
        capture(ManyInputs(), {"scale": image(8)})


def test_losses():
    def own(outputs):
        return (outputs**2).mean()

    assert kinds(capture(SmallNet(), image(3, 8, 8), loss=own))[-2:] == ["pow", "mean"]
    assert capture(SmallNet(), image(3, 8, 8), loss=None).loss is None
    with pytest.raises(CaptureError, match="scalar"):
        capture(SmallNet(), image(3, 8, 8), loss=lambda y: y, method="trace")
    with pytest.raises(CaptureError, match="the loss is None; expected a scalar"):
        capture(SmallNet(), image(3, 8, 8), loss=lambda y: None, method="trace")


def test_patches_are_gone_afterwards():
    before = (nn.Module.__call__, range, torch.jit.ScriptFunction.__call__, nn.functional.has_torch_function)
    applied = networks.Square.apply
    capture(copy.deepcopy(SmallNet()), image(3, 8, 8))
    after = (nn.Module.__call__, range, torch.jit.ScriptFunction.__call__, nn.functional.has_torch_function)
    assert before == after
    assert networks.Square.apply == applied
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert len(range(BATCH_PRIME)) == BATCH_PRIME


class OwnDeviceAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.linear(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return self.linear(y.float())


def test_autocast_on_the_device_of_the_input():
    graph = capture(OwnDeviceAutocast(), image(8), mode="infer")
    linear = [graph.values[op.outputs[0]].dtype for op in graph.ops if op.kind == "linear"]
    assert linear == ["bfloat16", "float32"]


def test_a_request_falls_back_to_the_batch_size_it_is_needed_for():
    request = CaptureRequest(Halving(), input_size=(8,), mode="infer")
    with pytest.raises(CaptureError, match="not affine"):
        capture_request(request)
    sizes = [g.fixed_batch for g in capture_each(request, [6, 4])]
    assert sizes == [6, 4]
    first, second = capture_each(CaptureRequest(SmallNet(), input_size=(3, 8, 8)), [6, 4])
    assert first is second
    assert first.fixed_batch is None
    assert capture_request(CaptureRequest(first, 2)) is first


def test_amounts_that_do_not_follow_the_batch_size_are_counted_for_one():
    request = CaptureRequest(SmallNet(), 6, input_size=(3, 8, 8))

    def halved(graph):
        return poly(symbolic(graph.values[graph.inputs[0]].shape)[0] // 2)

    assert use_graph(request, halved) == (3, 0, 0)
    with pytest.raises(CaptureError, match="one fixed batch size"):
        use_graph(replace(request, batch_size=None), halved)


def test_caches_that_keep_stand_ins_are_cleared_and_no_others():
    def memoized():
        return functools.lru_cache(lambda key: {"of": (key,)})

    clean, leaking = memoized(), memoized()
    clean(1)
    with FakeTensorMode():
        leaking(torch.empty(2))
    assert forget_cached((FakeTensor,)) == [leaking]
    assert (clean.cache_info().currsize, leaking.cache_info().currsize) == (1, 0)
    assert forget_cached((FakeTensor,)) == []


class OfWeight(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.function(x, self.weight).flatten(1)


@pytest.mark.parametrize(
    ("function", "viewed"),
    [
        (lambda x, w: torch.einsum("bij,jk->bik", x, w), False),
        (lambda x, w: torch.tensordot(x, w, 1), False),
        (torch.inner, False),
        (lambda x, w: torch.nn.functional.bilinear(x, x, w.expand(4, 8, 8)), False),
        (lambda x, w: x.repeat_interleave(2, 1), False),
        (lambda x, w: x.movedim(1, 2), True),
        (lambda x, w: torch.diagonal(input=x, dim1=1, dim2=2), True),
    ],
)
def test_results_share_storage_with_arguments_alone(function, viewed):
    graph = capture(OfWeight(function), torch.zeros(2, 8, 8), mode="infer")
    op = next(op for op in graph.ops if op.kind not in ("expand", "transpose"))
    assert graph.values[op.outputs[0]].alias == (0 if viewed else None)


TABLES = {}


class Holder:
    table = None


HOLDER = Holder()


class Keeping(torch.nn.Module):
    """Keeps what it makes in its first call outside of itself, as `place` says."""

    def __init__(self, place):
        super().__init__()
        self.layer, self.place = torch.nn.Linear(4, 4), place

    def forward(self, x):
        x = self.layer(x)
        if self.place == "dict":
            if 4 not in TABLES:
                TABLES[4] = torch.arange(4, device=x.device).cos()
            return x * TABLES[4]
        if HOLDER.table is None:
            HOLDER.table = torch.arange(4, device=x.device).cos()
        return x * HOLDER.table


@pytest.mark.parametrize("place", ["dict", "attribute"])
def test_no_stand_in_stays_in_the_users_caches(place):
    model, x = Keeping(place), torch.ones(2, 4)
    for _ in range(2):
        graph = capture(model, x)
        (table,) = [value for value in graph.values if value.role == "constant"]
        assert table.shape == (4,)
        assert not [op for op in graph.ops if op.kind == "cos"]  # later steps do not make it
    assert torch.equal(model(x), model.layer(x) * torch.arange(4).cos())
    TABLES.clear()
    HOLDER.table = None


def user_module(forward):
    """Return a module with a layer whose forward is a function of itself and x."""
    module = type("User", (torch.nn.Module,), {"forward": forward})()
    module.layer = torch.nn.Linear(4, 4)
    return module


def test_a_forward_pass_that_computes_gradients_is_refused_by_name():
    def forward(self, x):
        y = self.layer(x)
        (gradient,) = torch.autograd.grad(self.layer(y).sum(), y, create_graph=True)
        return y - gradient

    with pytest.raises(CaptureError, match=r"asks autograd for gradients at test_capturing.py:\d+, which"):
        capture(user_module(forward), torch.ones(2, 4))


def test_hooks_of_tensors_are_noted():
    def forward(self, x):
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient * 2)
        y.retain_grad()
        return y.tanh()

    graph = capture(user_module(forward), torch.ones(2, 4))
    assert [op.kind for op in graph.ops][:2] == ["linear", "tanh"]
    assert [note.split(" at ")[0] for note in graph.notes] == [
        "a tensor's hook (register_hook",
        "retain_grad",
    ]


def test_a_tensor_says_whether_it_is_a_leaf():
    def forward(self, x):
        y = self.layer(x)
        if y.is_leaf or y.grad_fn is None or not x.is_leaf or x.grad_fn is not None:
            return y.sin()
        return y.cos()

    assert [op.kind for op in capture(user_module(forward), torch.ones(2, 4)).ops][1] == "cos"


def test_values_that_layers_of_pytorch_read_and_none_decides_are_answered():
    capture(torch.nn.BatchNorm1d(4, momentum=None), torch.ones(2, 4))

    def forward(self, x):
        return torch.nn.functional.gaussian_nll_loss(self.layer(x), x, x.exp())

    capture(user_module(forward), torch.ones(2, 4))
