"""Settings that the time model does not see are named in the result."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchedge


def test_what_is_not_timed_is_said():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    graph = torchedge.capture(net, input_size=(3, 16, 16))
    predictor = torchedge.Predictor("jetson-tx2")
    plain = predictor.predict(graph, 4)
    told = predictor.predict(graph, 4, amp="bfloat16", accumulation=4)
    timed = predictor.predict(graph, 4, optimizer="adagrad")
    assert timed.latency.value > plain.latency.value
    assert not any("latency" in note for note in (*plain.notes, *timed.notes))
    assert any("bfloat16" in note for note in told.notes)


def test_latency_is_that_of_all_micro_batches_and_of_one_update():
    graph = torchedge.capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), input_size=(3, 16, 16))
    predictor = torchedge.Predictor("jetson-tx2")
    one, alone, four = (
        predictor.predict(graph, 4, **options) for options in ({}, {"optimizer": "none"}, {"accumulation": 4})
    )
    assert four.latency.value == pytest.approx(one.latency.value + 3 * alone.latency.value)
    spans = [span.phase for span in four.timeline.spans if span.lane == "host"]
    assert spans.count("forward") == 4 and spans[-1] == "update"


def test_inference_from_training_measurements_is_assumed():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    graph = torchedge.capture(net, input_size=(3, 16, 16), mode="infer")
    found = torchedge.Predictor("jetson-tx2").predict(graph, 4)
    assert str(found.provenance) == "assumed" and found.mode == "infer"
    assert any("inference memory was not measured" in note for note in found.notes)
    train = torchedge.Predictor("jetson-tx2").predict(torchedge.capture(net, input_size=(3, 16, 16)), 4)
    assert str(train.provenance) == "public data"
    assert found.latency.value < train.latency.value and found.memory.value < train.memory.value


def test_breakdown_adds_up():
    graph = torchedge.capture(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU()), input_size=(3, 96, 96))
    for batch in (1, 32, 512):
        found = torchedge.Predictor("jetson-tx2").predict(graph, batch)
        assert abs(sum(found.breakdown.values()) - found.needed.value) < 1e-6 * found.needed.value
        assert found.memory.low <= found.memory.value <= found.memory.high


def test_the_largest_batch_size_is_the_last_that_fits():
    graph = torchedge.capture(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU()), input_size=(3, 96, 96))
    predictor = torchedge.Predictor("jetson-tx2")
    first = predictor.predict(graph, 8)
    for limit in (1800, 2500, 4000):
        most = first.max_batch_size(limit)
        assert most > 0 and predictor.predict(graph, most).fits(limit)
        assert not predictor.predict(graph, most + 1).fits(limit)
    assert first.max_batch_size(10) == 0


def test_many_are_each_one_predicted():
    nets = [nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU()) for width in (8, 24)]
    graphs = [torchedge.capture(net, input_size=(3, 48, 48)) for net in nets]
    predictor = torchedge.Predictor("jetson-tx2")
    found = predictor.predict_many(graphs, [1, 5, 64, 300])
    for row, graph in enumerate(graphs):
        for column, batch in enumerate((1, 5, 64, 300)):
            one = predictor.predict(graph, batch)
            assert np.isclose(found.memory[row, column], one.memory.value, rtol=1e-9)
            assert np.isclose(found.latency_high[row, column], one.latency.high, rtol=1e-9)
            assert np.isclose(found.reserved[row, column], one.reserved.value, rtol=1e-9)


def test_a_training_step_without_a_loss_is_refused():
    with pytest.raises(torchedge.InputError, match="loss is None; expected a function loss"):
        torchedge.predict(nn.Linear(3, 2), 4, "jetson-tx2", loss=None)


class WithUnknownOperators(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count, self.layer = count, nn.Conv2d(3, 16, 3)

    def forward(self, x):
        x = self.layer(x)
        for _ in range(self.count):
            x = torch.special.i0(x)
        return x.mean((2, 3))


def test_unknown_operators_are_counted_as_element_wise_and_the_text_says_so():
    predictor = torchedge.Predictor("jetson-tx2")
    plain, unknown = (
        predictor.predict(torchedge.capture(WithUnknownOperators(n), input_size=(3, 96, 96)), 32)
        for n in (0, 20)
    )
    assert plain.unsupported_remarks == ()
    assert [kind.removeprefix("special_") for kind in unknown.unsupported] == ["i0"]
    activation_mib = 32 * 16 * 94 * 94 * 4 / 2**20
    assert unknown.allocated.value - plain.allocated.value >= 15 * activation_mib
    assert unknown.latency.value > plain.latency.value
    (remark,) = unknown.unsupported_remarks
    assert remark.endswith("counted as element-wise; training keeps its inputs")
    assert remark in str(unknown) and "not counted" not in str(unknown)


def test_prediction_makes_no_tensor_where_the_model_lies():
    """A model on a GPU is predicted without memory there: nothing is allocated but stand-ins on meta."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    example, largest = torch.zeros(512, 64), []
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            largest.extend(
                t.numel()
                for t in tree_leaves(result)
                if isinstance(t, torch.Tensor) and not t.is_meta and t.untyped_storage().data_ptr() not in own
            )
            return result

    with Watch():
        prediction = torchedge.predict(model, 512, example=example, device="nvidia-h200", optimizer=optimizer)
    assert prediction.memory.value > 0
    assert max(largest, default=0) < 64
    assert not optimizer.state
