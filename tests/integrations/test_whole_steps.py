"""Steps of several optimizers, losses and modules: their memory as an independent count has it."""

import pytest
import torch
from oracles.graph_checks import verify
from oracles.user_steps import STEPS, adam, counted_peak, layers, predicted_peak, watched

import torchedge

DEVICE = "nvidia-h200"


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_a_step_is_that_of_the_code_on_meta_tensors(name):
    for batch in (16, 1024):
        found = predicted_peak(watched(STEPS[name], batch), batch)
        assert found == pytest.approx(counted_peak(STEPS[name], batch), rel=0.02), f"batch {batch}"


def test_a_gan_has_both_updates_and_trains_nothing():
    loop = STEPS["gan_with_one_picture"](8)
    before = [p.clone() for module in loop.modules for p in module.parameters()]
    with torchedge.watch(DEVICE) as watch:
        loop.step()
    assert len(watch.settings.replays) == 2 and watch.graph.is_whole_step
    assert any("2 updates of 2 optimizers" in note for note in watch.prediction.notes)
    after = [p for module in loop.modules for p in module.parameters()]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
    assert watch.prediction.breakdown["optimizer_state"] > 0


def test_a_call_without_gradients_that_the_step_does_not_read_is_none_of_it():
    net, x = layers(64, 64, 4), torch.randn(8, 64)
    optimizer = adam(net)

    def step(evaluates):
        if evaluates:
            with torch.no_grad():
                assert float(net(x).sum()) != 0  # computed for real
        net(x).sum().backward()
        optimizer.step()

    graphs = []
    for evaluates in (False, True):
        with torchedge.watch(DEVICE) as watch:
            step(evaluates)
        graphs.append(watch.graph)
    assert [op.kind for op in graphs[0].ops] == [op.kind for op in graphs[1].ops]


def test_passes_that_are_alike_are_one_pass_several_times():
    net, x = layers(64, 64, 4), torch.randn(8, 64)
    optimizer = adam(net)
    with torchedge.watch(DEVICE) as watch:
        for _ in range(3):
            net(x).sum().backward()
        optimizer.step()
    assert watch.settings.accumulation == 3 and not watch.graph.is_whole_step
    verify(watch.graph)


def test_hooks_on_saved_tensors_are_named():
    net, x = layers(64, 64, 4), torch.randn(8, 64)
    optimizer = adam(net)
    with torchedge.watch(DEVICE) as watch:
        with torch.autograd.graph.save_on_cpu():
            loss = net(x).sum()
        loss.backward()
        optimizer.step()
    assert any("save_on_cpu" in note for note in watch.graph.notes)


def test_buckets_of_parallel_training_are_named():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = torch.nn.parallel.DistributedDataParallel(layers(256, 1024, 4))
        graph = torchedge.capture(net, torch.randn(2, 256))
    finally:
        torch.distributed.destroy_process_group()
    assert any("buckets, 1.0 MiB" in note for note in graph.notes)
