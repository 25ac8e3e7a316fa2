"""A capture in one thread changes nothing that another thread sees, and nothing of the model."""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from oracles.crews import together
from oracles.graph_checks import digest as digest_of
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from tracing.networks import NETWORKS, LayerDrop, image

from torchedge.tracing import torch_calls
from torchedge.tracing.capturing import capture
from torchedge.tracing.joint_graphs import plain_kernels
from torchedge.tracing.sources import load_model
from torchedge.tracing.steps import capture_step


class Norms(nn.Module):
    """Batch norm and dropout: both look at the training flag."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(8)]
        )
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(self.body(x))


class Tagged(torch.Tensor):
    """A tensor subclass that counts the functions it sees."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def pickles(round_):
    assert ForkingPickler.loads(ForkingPickler.dumps(range(3))) == range(3)  # as for a DataLoader's worker
    assert type(range(3)) is range
    assert range.__module__ == "builtins"


def draws(round_):
    drawn = torch.rand(4), random.random(), np.random.rand()
    again = torch.rand(4), random.random(), np.random.rand()
    assert not torch.equal(drawn[0], again[0])
    assert drawn[1:] != again[1:]


def checkpoints(round_):
    calls = []

    def counted(x):
        calls.append(1)
        return x.sin().exp()

    for reentrant in (False, True):
        x = torch.ones(3, requires_grad=True)
        checkpoint(counted, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 4, "each is run again in the backward pass"


def subclasses(round_):
    tagged = torch.ones(3).as_subclass(Tagged)
    before = Tagged.seen
    assert isinstance(nn.functional.relu(tagged), Tagged)
    assert Tagged.seen > before


ROUNDS = 40


@pytest.mark.parametrize("work", [pickles, draws, checkpoints, subclasses])
def test_other_threads_are_not_disturbed(work):
    model, errors = Norms(), []
    done = threading.Event()

    def loop():
        try:
            for round_ in range(ROUNDS):
                work(round_)
        except BaseException as error:
            errors.append(error)
        done.set()

    other = threading.Thread(target=loop)
    other.start()
    captures = 0
    while not done.is_set() or captures < 5:
        capture(model, image(8), mode="infer" if captures % 2 else "train")
        captures += 1
    other.join()
    assert not errors


def test_a_model_may_be_used_while_it_is_captured():
    torch.manual_seed(0)
    model = Norms().eval()
    x = torch.randn(5, 8)
    expected, statistics = model(x), copy.deepcopy(model.state_dict())
    results: list[bool] = []
    done = threading.Event()

    def run():
        for _ in range(200):
            results.append(torch.equal(model(x), expected))
        done.set()

    other = threading.Thread(target=run)
    other.start()
    captures = 0
    while not done.is_set() or captures < 5:
        capture(model, image(8), mode="train")
        captures += 1
    other.join()
    assert all(results)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in statistics.items())
    assert not any(module.training for module in model.modules())


def test_draws_in_python_do_not_touch_the_shared_generators():
    class Coin(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) if random.random() < 0.5 + np.random.rand() / 2 else x.relu()

    models = Coin(), LayerDrop(0.5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for model in models:
        assert len({digest_of(capture(model, image(8))) for _ in range(4)}) == 1
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_capture_asks_nothing_of_the_shared_generators(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("the shared generator was set")

    build, example = NETWORKS[name]
    model = build()
    monkeypatch.setattr(torch, "set_rng_state", refuse)
    monkeypatch.setattr(random, "seed", refuse)
    monkeypatch.setattr(random, "setstate", refuse)
    monkeypatch.setattr(np.random, "seed", refuse)
    capture(model, example(), method="trace")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_regions(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = checkpoint(lambda y: self.a(y).relu(), self.b(x), use_reentrant=reentrant)
            return checkpoint(self.c, x, use_reentrant=reentrant)

    graph = capture(Checkpointed(), image(8))
    assert [op.region for op in graph.ops if op.kind in ("linear", "relu")] == (
        [0, -1, -1, -2] if reentrant else [0, 1, 1, 2]
    )
    assert all(op.grad for op in graph.ops if op.kind in ("linear", "relu"))


def resampling_operators():
    with enable_python_dispatcher():
        traced = make_fx(partial(nn.functional.interpolate, scale_factor=2))(torch.ones(1, 1, 2, 2))
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def test_resampling_stays_whole_in_the_capturing_thread_alone():
    """PyTorch decomposes it before autograd: other threads trace, torch.export lists what decomposes."""
    utils = pytest.importorskip("torch._export.utils")
    remembered = utils._collect_all_valid_cia_ops_for_aten_namespace
    decomposed, decomposable = resampling_operators(), utils._collect_all_valid_cia_ops()
    remembered.cache_clear()
    with plain_kernels(), ThreadPoolExecutor(1) as other:
        (whole,) = resampling_operators()
        assert other.submit(resampling_operators).result() == decomposed
        assert utils._collect_all_valid_cia_ops() == decomposable
    assert whole is torch.ops.aten.upsample_nearest2d.default
    assert len(decomposed) > 1


SEEN: SimpleQueue = SimpleQueue()  # no state of Python that a capture looks at


class Recording(nn.Module):
    """Attention and a recurrent layer; notes PyTorch's switches while it runs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        SEEN.put(switches())
        return self.lstm(self.attention(x, x, x)[0])[0]


def switches():
    cuda = torch.backends.cuda
    with ThreadPoolExecutor(1) as other:
        compiling = other.submit(lambda: (torch.compiler.is_compiling(), torch.compiler.is_exporting()))
    kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    fast = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    return (*kernels, *fast, *compiling.result(), gc.isenabled(), torch.get_default_dtype())


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, lambda output: output.sum()])
def test_captures_leave_the_switches_of_the_process(loss):
    step = capture_step(Recording(), torch.zeros(2, 5, 8), loss=loss, training=loss is not None).step
    capture(Recording(), image(5, 8), mode="infer")
    seen = [SEEN.get() for _ in range(SEEN.qsize())]
    assert set(seen) == {switches()} and len(seen) > 1
    kinds = {op.kind for op in step.ops}
    assert not any(word in kind for kind in kinds for word in ("scaled_dot", "mkldnn", "native_multi"))


def ping(depth):
    return random.random() if depth == 0 else pong(depth - 1)


def pong(depth):
    return ping(depth)


class Through(nn.Module):
    """Draws by a function that another one calls, and that calls it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class ThroughPing(Through):
    def forward(self, x):
        return self.linear(x) if ping(2) < 2 else x


class ThroughPong(Through):
    def forward(self, x):
        return self.linear(x) if pong(2) < 2 else x


def test_functions_that_call_each_other_draw_from_no_shared_generator():
    before = random.getstate()
    for model in (ThroughPing(), ThroughPong()):
        capture(model, image(8))
        assert random.getstate() == before


def test_threads_that_capture_for_the_first_time_get_the_same_graph(monkeypatch):
    build, example = NETWORKS["encoder"]
    model = build()
    digest = digest_of(capture(model, example()))
    for cache in ("_bodies", "_rooms", "_resolved"):
        monkeypatch.setattr(torch_calls, cache, {})
    assert set(together(lambda number: digest_of(capture(model, example())))) == {digest}


def test_models_by_name_take_nothing_from_the_shared_generator(monkeypatch):
    pytest.importorskip("timm")

    def refuse(*args):
        raise AssertionError("the shared generator was set")

    monkeypatch.setattr(torch, "set_rng_state", refuse)
    before = torch.get_rng_state(), list(warnings.filters)
    together(lambda number: [load_model(name) for name in ("mobilenet_v2", "timm:resnet10t")])
    assert torch.equal(torch.get_rng_state(), before[0]) and list(warnings.filters) == before[1]
