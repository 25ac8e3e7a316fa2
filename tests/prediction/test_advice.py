"""`torchedge.advise`: its settings fit by `predict`, split the batch as little as possible, and pay."""

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchedge
from torchedge.errors import InputError


def network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def advised(limit, batch_size=48, **more):
    model = network()
    return model, torchedge.advise(
        model,
        batch_size,
        device="nvidia-h200",
        memory_limit=limit,
        input_size=(3, 64, 64),
        optimizer="adamw",
        **more,
    )


def needs(model, batch_size, **settings):
    options = {"device": "nvidia-h200", "input_size": (3, 64, 64), "optimizer": "adamw", **settings}
    return torchedge.predict(model, batch_size, **options).needed_mib()


def test_a_step_that_fits_needs_no_change():
    model, advice = advised(100_000)
    first = advice.settings[0]
    assert first.changes == () and (first.batch_size, first.accumulation) == (48, 1) and advice.fits
    assert first.needed_mib == needs(model, 48)
    assert all(s.update_ms < first.update_ms for s in advice.settings[1:])  # other changes pay in time only


@pytest.mark.slow
def test_micro_batches_are_the_largest_that_fit_and_cover_the_batch():
    model = network()
    limit = (needs(model, 12, accumulation=2) + needs(model, 16, accumulation=2)) / 2
    model, advice = advised(limit)
    (setting,) = [s for s in advice.settings if s.changes == ("accumulation",)]
    assert setting.batch_size * setting.accumulation >= 48
    assert (setting.accumulation - 1) * setting.batch_size < 48
    assert needs(model, setting.batch_size, accumulation=setting.accumulation) <= limit
    larger = -(-48 // (setting.accumulation - 1))
    assert needs(model, larger, accumulation=2) > limit
    options = {"device": "nvidia-h200", "input_size": (3, 64, 64)}
    passes, step = (
        torchedge.predict(model, setting.batch_size, optimizer=name, **options).latency.value
        for name in ("none", "adamw")
    )
    assert passes < step  # the optimizer runs once an update, not once a micro-batch
    assert setting.update_ms == pytest.approx((setting.accumulation - 1) * passes + step)


@pytest.mark.slow
def test_settings_that_fit_are_not_dominated_and_the_model_is_left_alone():
    model = network()
    before = [(name, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()]
    limit = (needs(model, 24) + needs(model, 48)) / 2
    advice = torchedge.advise(
        model, 48, device="nvidia-h200", memory_limit=limit, input_size=(3, 64, 64), optimizer="adamw"
    )
    assert advice.fits and all(s.fits and s.needed_mib <= limit for s in advice.settings)
    assert ["head only"] in [list(s.changes) for s in advice.settings]
    for one in advice.settings:
        for other in advice.settings:
            assert not (set(other.changes) < set(one.changes) and other.update_ms <= one.update_ms)
    assert [(name, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()] == before


def test_autocast_is_advised_where_the_device_has_units_for_it():
    options = {"input_size": (3, 64, 64), "optimizer": "adamw"}
    advised = {
        name: {s.amp for s in torchedge.advise(network(), 64, device=name, **options).settings}
        for name in ("jetson-tx2", "nvidia-h200", "nvidia-v100")
    }
    assert advised["jetson-tx2"] == {None}
    assert advised["nvidia-h200"] <= {None, "bfloat16"} and advised["nvidia-v100"] <= {None, "float16"}


@pytest.mark.slow
def test_without_a_setting_that_fits_the_one_that_needs_least_is_returned():
    model, advice = advised(1.0)
    (setting,) = advice.settings
    assert not advice.fits and not setting.fits and setting.batch_size == 1 and setting.accumulation == 48
    assert setting.needed_mib <= needs(model, 1, optimizer="sgd")
    assert "no" in advice.rows()[1][0]
    assert advice.to_dict()["fits"] is False


class Switched(nn.Module):
    """A deep network with the switch of transformers' models."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
        self.is_activation_checkpointing = False

    def activation_checkpointing_enable(self):
        self.is_activation_checkpointing = True

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_activation_checkpointing else block(x)
        return x


@pytest.mark.slow
def test_models_with_a_switch_for_checkpointing_are_tried_with_it():
    model, options = Switched(), {"device": "nvidia-h200", "input_size": (256,)}
    full = torchedge.predict(model, 4096, **options)
    advice = torchedge.advise(model, 4096, memory_limit=full.needed_mib() - 5, **options)
    changes = [s.changes for s in advice.settings]
    assert ("checkpointing",) in changes and not model.is_activation_checkpointing
    checkpointed = advice.settings[changes.index(("checkpointing",))]
    assert checkpointed.needed_mib < full.needed_mib() - 5
    assert checkpointed.prediction.latency.value > full.latency.value  # the forward pass runs twice


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match="batch_size is 0"):
        torchedge.advise(network(), 0, device="nvidia-h200", input_size=(3, 64, 64))
    with pytest.raises(InputError, match="memory_limit is -1"):
        advised(-1)
