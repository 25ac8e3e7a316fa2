"""The work of a step counted for the time models: frozen parameters and activation checkpointing."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchedge.devices.catalog import find_device
from torchedge.prediction.analysis import analyse
from torchedge.prediction.latency import workload
from torchedge.prediction.latency.roofline import PHASES, named, pack, prior_mean, work_times
from torchedge.prediction.latency.workload import (
    DEPTHWISE_COLUMNS,
    LAUNCHES,
    PASSES,
    PRODUCT_COLUMNS,
    UNTRACKED_LAUNCHES,
    count_work,
)
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import predict_graph
from torchedge.tracing.capturing import capture
from torchedge.tracing.optimizer_replays import OptimizerReplay, replay_of


class Stack(nn.Module):
    """Convolutions, all in one checkpoint or none, and a head."""

    def __init__(self, checkpointed=False, depth=4):
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(3 if not k else 16, 16, 3, padding=1), nn.ReLU()) for k in range(depth)
        ]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(16, 10)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(x.mean((2, 3)))


def graph_of(model, mode="train"):
    return capture(model, torch.zeros(2, 3, 16, 16), mode=mode)


def total(work, column=None):
    products = dict(zip(PRODUCT_COLUMNS, work.products.T, strict=True))
    return float(np.sum(products["count"] * (1 if column is None else products[column])))


def latency(graph):
    return predict_graph(graph, 8, find_device("raspberry-pi-5")).latency.value


def test_frozen_layers_have_no_backward_work():
    model = Stack()
    model.body.requires_grad_(False)
    work = count_work(graph_of(model))
    assert total(work) == 5
    assert total(work, "weight_grad") == 1  # the head's
    assert total(work, "input_grad") == 0
    launches = dict(zip(LAUNCHES, work.launches, strict=False))
    assert launches["product_fwd"] == pytest.approx(1 + 4 * UNTRACKED_LAUNCHES)
    assert (launches["product_bwd"], launches["parameter"]) == (1, 2)


def test_frozen_weights_above_a_trained_one_have_input_gradients_only():
    model = Stack()
    model.body[1:].requires_grad_(False)
    work = count_work(graph_of(model))
    assert total(work, "weight_grad") == 2  # the first convolution's and the head's
    assert total(work, "input_grad") == 4


def test_training_the_head_alone_takes_little_longer_than_inference():
    whole, head = Stack(depth=8), Stack(depth=8)
    head.body.requires_grad_(False)
    inference = latency(graph_of(whole, "infer"))
    assert inference < latency(graph_of(head)) < (inference + latency(graph_of(whole))) / 2


def test_a_checkpoint_runs_its_forward_pass_again():
    plain, again = count_work(graph_of(Stack())), count_work(graph_of(Stack(checkpointed=True)))
    assert total(plain, "runs") == 5
    assert total(again, "runs") == 9  # the four convolutions twice
    assert total(again, "weight_grad") == total(plain, "weight_grad")
    third = 1 / 3  # of a forward and a backward pass
    growth = again.passes / np.where(plain.passes > 0, plain.passes, 1)
    assert growth.max() == pytest.approx(1 + third)
    assert latency(graph_of(Stack(checkpointed=True))) > latency(graph_of(Stack()))


def again(run, x):
    return checkpoint(run, x, use_reentrant=False)


NESTED = {
    "inner at the end": lambda x: again(lambda x: again(lambda y: y.exp().tanh(), x.sigmoid()), x),
    "a sum behind it": lambda x: again(lambda x: again(lambda y: y.exp().tanh(), x.sigmoid()) + 1, x),
    "a kept result behind it": lambda x: again(lambda x: again(lambda y: y.exp().tanh(), x).sigmoid(), x),
    "three deep": lambda x: again(lambda x: again(lambda x: again(torch.exp, x.sigmoid()), x.tanh()), x),
    "three deep, a tail": lambda x: again(
        lambda x: again(lambda x: again(torch.exp, x.sigmoid()), x.tanh()).sigmoid(), x
    ),
    "one after the other": lambda x: again(lambda x: again(torch.sigmoid, again(torch.exp, x.tanh())), x),
}


class Nested(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run

    def forward(self, x):
        return self.run(self.layer(x))


class Runs(TorchDispatchMode):
    """Counts the runs of operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NESTED)
def test_operators_of_nested_checkpoints_run_as_often_as_in_pytorch(name, monkeypatch):
    model, x, counted = Nested(NESTED[name]), torch.randn(2, 4), Counter()
    with Runs() as runs:
        model(x).sum().backward()

    def counting(count):
        def run(counter, op, *more):
            counted[op.kind] += counter.runs
            return count(counter, op, *more)

        return run

    counts = {kind: counting(count) for kind, count in workload._COUNTS.items()}
    monkeypatch.setattr(workload, "_COUNTS", counts)
    workload.count_work(capture(model, x, loss=lambda output: output.sum()))
    kinds = ("exp", "tanh", "sigmoid")
    assert [counted[kind] for kind in kinds] == [runs.counts[kind] for kind in kinds]


def test_inference_runs_checkpoints_once():
    again = count_work(graph_of(Stack(checkpointed=True), "infer"))
    assert total(again, "runs") == 5


class Squares(torch.autograd.Function):
    """Squares of a tensor, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


def test_a_custom_function_takes_no_launches_of_a_checkpoint():
    class Squared(nn.Module):
        def __init__(self, square):
            super().__init__()
            self.layer, self.square = nn.Conv2d(3, 8, 1), square

        def forward(self, x):
            return self.square(self.layer(x)).mean((2, 3))

    forward = LAUNCHES.index("pass_fwd")
    own, plain, again = (
        count_work(graph_of(Squared(square))).launches[forward]
        for square in (
            Squares.apply,
            lambda x: x * x,
            lambda x: checkpoint(torch.square, x, use_reentrant=False),
        )
    )
    assert own == plain + 1 < again - 10  # run again in the backward pass, as in a checkpoint


def test_updates_cost_what_the_optimizer_reads_and_writes():
    """By elements counted by hand; a named optimizer decays weights."""
    analysis = analyse(graph_of(Stack()))
    fused = OptimizerReplay("adamw", (("fused", True),))
    names = ("sgd-momentum", "sgd", "adamw", fused, "none")
    plain, _, adamw, *_ = works = [analysis.work_under(StepSettings(optimizer=name)) for name in names]
    update = PASSES.index("update")
    ratios = [work.passes[update, 1] / plain.passes[update, 1] for work in works]
    assert ratios == pytest.approx([1, 6 / 11, 21 / 11, 7 / 11, 0], rel=1e-4)
    assert (np.delete(adamw.passes, update, 0) == np.delete(plain.passes, update, 0)).all()


class Loop(torch.optim.Optimizer):
    """A loop over parameters in Python, with `often` calls on each, and values of it that are read."""

    def __init__(self, parameters, often, reads=0):
        super().__init__(parameters, {})
        self.often, self.reads = often, reads

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                for _ in range(self.often):
                    parameter.data.mul_(0.5)
                for _ in range(self.reads):
                    parameter.data.view(-1)[0].item()


def test_each_call_in_an_optimizers_own_loop_takes_the_host_as_long():
    model = Stack()
    analysis = analyse(graph_of(model))

    def launches(often, reads=0):
        optimizer = replay_of(Loop(model.parameters(), often, reads), model)
        return analysis.work_under(StepSettings(optimizer=optimizer)).launches[LAUNCHES.index("parameter")]

    few, more, most = (launches(often) for often in (2, 6, 10))
    assert most - more == pytest.approx(more - few)
    assert most > 2 * few > 0
    once, twice = (launches(2, reads) for reads in (1, 2))  # the host waits for the device
    assert twice - once == pytest.approx(once - few)
    assert once - few > launches(5) - few


class Called(nn.Module):
    """A model, checkpointed as a whole or not."""

    def __init__(self, model, checkpointed):
        super().__init__()
        self.model, self.checkpointed = model, checkpointed

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False) if self.checkpointed else self.model(x)


class Wrapped(nn.Module):
    """A layer inside of `depth` modules that call nothing but it, or the views of its result."""

    def __init__(self, depth, views=0):
        super().__init__()
        layer = nn.Linear(3, 3)
        for _ in range(depth):
            layer = nn.Sequential(layer)
        self.layer, self.views = layer, views

    def forward(self, x):
        x = self.layer(x)
        for _ in range(self.views):
            x = x.transpose(1, 2)
        return x


def test_calls_of_modules_and_views_are_counted():
    def calls(*args, checkpointed=False):
        graph = capture(Called(Wrapped(*args), checkpointed), torch.zeros(2, 3, 3), loss=torch.sum)
        return count_work(graph).launches[-1]

    assert calls(5) - calls(2) == 3
    assert calls(2, 4) - calls(2) == 4
    assert calls(5, 3, checkpointed=True) - calls(2, checkpointed=True) == 2 * (3 + 3)  # run twice


def test_casts_of_parameters_do_not_grow_with_the_batch():
    analysis = analyse(graph_of(Stack()))
    plain, cast = analysis.work_under(StepSettings()), analysis.work_under(StepSettings(amp="bfloat16"))
    copies = PASSES.index("copy")
    assert plain.passes[copies, 1] == 0
    parameters = sum(value.numel[0] for value in analysis.graph.parameters)
    assert 0.4 * parameters < cast.passes[copies, 1] <= parameters


class Tokens(nn.Module):
    """An image, its pixels normalised by channels and read as an image again, by convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.dense = nn.LayerNorm(16), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        pixels = self.norm(self.stem(x).permute(0, 2, 3, 1))
        return self.dense(self.deep(pixels.permute(0, 3, 1, 2)).contiguous()).mean((2, 3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_of_pixels_run_in_channels_last(layout):
    work = count_work(graph_of(Tokens().to(memory_format=layout)))
    everywhere = layout == torch.channels_last
    assert work.products[:, PRODUCT_COLUMNS.index("last")].tolist() == [everywhere] * 2
    assert work.depthwise[:, DEPTHWISE_COLUMNS.index("last")].tolist() == [True]


def test_images_in_channels_last_have_coefficients_of_their_own():
    coefficients, one = prior_mean(find_device("nvidia-h200")), np.zeros(1, dtype=int)
    rows = pack([count_work(graph_of(Tokens()))], one, np.array([2.0]))
    own, other = (
        work_times(rows, named(coefficients, last=last)) for last in (None, coefficients + np.log(2))
    )
    for phase in PHASES:
        np.testing.assert_array_equal(other.products[phase], own.products[phase])
        assert other.depthwise[phase] == pytest.approx(2 * own.depthwise[phase])


def test_batch_norms_take_as_long_as_those_of_more_channels_by_the_lanes():
    def elements(channels, mode="train", lanes=64.0):
        model = nn.Sequential(nn.Conv2d(3, channels, 1), nn.BatchNorm2d(channels))
        work, one = count_work(graph_of(model, mode)), np.zeros(1, dtype=int)
        swept = [
            pack([work], one, np.array([2.0]), lanes=n).passes[0, PASSES.index("norm")] for n in (0, lanes)
        ]
        return swept[1] - swept[0]

    assert [elements(channels) for channels in (8, 64)] == [64 * 2 * 16 * 16] * 2
    assert elements(8, "infer") == 0
