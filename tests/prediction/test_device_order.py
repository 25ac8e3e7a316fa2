"""Devices are ordered as their figures are, and no step is faster at a larger batch on assumed devices."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.devices import find_device, list_devices, prediction_provenance
from torchedge.prediction.latency import rates
from torchedge.prediction.latency.rates import product_rates
from torchedge.prediction.latency.roofline import LAST, fitting_prior
from torchedge.prediction.profiles import CHANNELS_LAST, MATRICES, load_models, read_relative

PRECISIONS = (None, "float16", "bfloat16")
SCALED = ("nvidia-a100", "rtx-4090", "jetson-orin-nano", "adreno-750", "apple-m2", "raspberry-pi-5")


def mixed(mode):
    """Convolutions, depthwise ones, norms and products of matrices."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Conv2d(32, 96, 1), nn.BatchNorm2d(96), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(2), nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 64),
        nn.Flatten(), nn.Linear(96 * 64, 100),
    )  # fmt: skip
    return torchedge.capture(model, input_size=(3, 96, 96), mode=mode)


def residual(mode):
    """Convolutions with 3×3 kernels and a shortcut, grouped ones, and a wide linear head."""

    class Block(nn.Module):
        def __init__(self, channels, groups):
            super().__init__()
            self.first = nn.Conv2d(channels, channels, 3, 1, 1, groups=groups, bias=False)
            self.norm, self.second = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, 1, 1)

        def forward(self, x):
            return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))

    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(64, 1), nn.Conv2d(64, 128, 1, 2),
        Block(128, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 2048), nn.ReLU(),
        nn.Linear(2048, 1000),
    )  # fmt: skip
    return torchedge.capture(model, input_size=(3, 112, 112), mode=mode)


def transformer(mode):
    """Attention, layer norms and products of matrices."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix, self.out = nn.LayerNorm(192), nn.Linear(192, 576), nn.Linear(192, 192)
            self.feed = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))

        def forward(self, x):
            q, k, v = self.mix(self.norm(x)).reshape(-1, 64, 3, 4, 48).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(mixed.transpose(1, 2).reshape(-1, 64, 192))
            return x + self.feed(x)

    return torchedge.capture(nn.Sequential(Layer(), Layer()), input_size=(64, 192), mode=mode)


NETWORKS = (mixed, residual, transformer)
GRAPHS = {mode: [network(mode) for network in NETWORKS] for mode in ("train", "infer")}


def figures_of(device):
    """All that the time model reads of a device, larger for faster ones."""
    rates = [rate for precision in PRECISIONS for rate in product_rates(device, precision)]
    vector = device.value("peak_fp32_gflops")
    dispatch = device.figures.get("eager_operator_us", device.figure("launch_overhead_us")).value
    return np.array([*rates, vector, device.value("bandwidth_gb_s")]), dispatch


def base_of(device):
    """The device from whose measurements a device's latency is scaled, with that one's host and runtime."""
    return device.profile.get("relative", device.name if load_models(device).notes == () else device.vendor)


def has_forest(device, mode):
    return load_models(device, mode).latency.forest is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_device_with_twice_the_figures_is_not_slower(mode):
    devices, batches = list_devices(), [1, 8, 64, 512]
    times = {
        (device.name, precision): torchedge.Predictor(device)
        .predict_many(GRAPHS[mode], batches, amp=precision)
        .latency
        for device in devices
        for precision in PRECISIONS
    }
    compared = 0
    for fast in devices:
        for slow in devices:
            (rates, dispatch), (low, slower) = figures_of(fast), figures_of(slow)
            same = base_of(fast) == base_of(slow)
            # Libraries reach another share of the peak rates on each measured device.
            if not (rates >= (2 if same else 8) * low).all():
                continue
            # At small batches a step waits for its host, which is that of the measurements; and a forest
            # corrects the time of its own device alone.
            small = same and dispatch <= slower and not has_forest(fast, mode) and not has_forest(slow, mode)
            for precision in PRECISIONS:
                if {precision} - {None} - (fast.native_dtypes & slow.native_dtypes):
                    continue  # one of the two emulates it, at the rate of float32
                first, second = times[fast.name, precision], times[slow.name, precision]
                judged = slice(None) if small else slice(-1, None)
                ordered = first[:, judged] <= second[:, judged]
                assert ordered.all(), (fast.name, slow.name, precision, ordered)
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_doubled_figures_make_nothing_slower(name, precision):
    device = find_device(name)
    doubled = {
        key: replace(figure, value=2 * figure.value) if key.startswith(("peak_", "bandwidth_")) else figure
        for key, figure in device.figures.items()
    }
    faster = replace(device, figures=doubled, fingerprint=f"{device.fingerprint} doubled")
    for graph in (*GRAPHS["train"], *GRAPHS["infer"]):
        slow, fast = (torchedge.Predictor(d).predict(graph, 32, amp=precision) for d in (device, faster))
        assert slow.latency.value / 2 - 1e-9 <= fast.latency.value <= slow.latency.value


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_no_larger_batch_is_faster_where_no_forest_is_fitted(mode):
    batches = [*range(1, 70), 100, 127, 128, 129, 500]
    judged = 0
    for device in list_devices():
        if load_models(device, mode).latency.forest is None:
            for precision in PRECISIONS:
                many = torchedge.Predictor(device).predict_many(GRAPHS[mode], batches, amp=precision)
                assert (np.diff(many.latency, axis=1) >= 0).all(), (device.name, precision)
            judged += 1
    assert judged > 20


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_a100_trains_faster_than_an_rtx_3090_where_its_figures_are_larger(precision):
    """Its bandwidth and tensor rates are; its rate outside of tensor cores, for float32 products, is not."""
    judged = [residual] if precision is None else [residual, transformer]
    graphs = [GRAPHS["train"][NETWORKS.index(network)] for network in judged]
    first, second = (
        torchedge.Predictor(name).predict_many(graphs, [1, 64, 512], amp=precision).latency
        for name in ("nvidia-a100", "rtx-3090")
    )
    assert (first < second).all()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_table_of_devices_gives_the_provenance_of_their_predictions(mode):
    for device in list_devices():
        prediction = torchedge.Predictor(device).predict(GRAPHS[mode][0], 8)
        assert prediction.provenance == prediction_provenance(device, mode), device.name


@pytest.mark.slow
def test_half_precision_is_faster_than_single_where_the_figures_say_so():
    for name in ("nvidia-h200", "nvidia-a100", "rtx-3090"):
        full, half, brain = (
            torchedge.predict("vit_b_16", 64, name, amp=precision) for precision in PRECISIONS
        )
        assert half.latency.value < 0.8 * full.latency.value
        assert brain.latency.value == pytest.approx(half.latency.value, rel=0.01)
    t4, other = (torchedge.predict("vit_b_16", 64, "nvidia-t4", amp=p) for p in ("bfloat16", "float16"))
    assert t4.latency.value > 1.5 * other.latency.value  # it has no units for bfloat16


def test_weights_in_half_precision_are_timed_as_such():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    single = torchedge.predict(model, 4096, "nvidia-a100", input_size=(1024,))
    half = torchedge.predict(model.bfloat16(), 4096, "nvidia-a100", input_size=(1024,))
    assert half.latency.value < 0.4 * single.latency.value
    many = torchedge.Predictor("nvidia-a100").predict_many([model.float(), model.bfloat16()], [4096])
    assert many.latency.shape == (2, 1)


def test_the_prior_of_a_fit_takes_no_ratio_of_peaks():
    """Convolutions reach a smaller part of TF32's peak than products do of float32's."""
    device = find_device("nvidia-h200")
    assert product_rates(device)[0] > product_rates(device)[1]
    figures = {name: figure for name, figure in device.figures.items() if name != "peak_tf32_gflops"}
    np.testing.assert_array_equal(fitting_prior(device), fitting_prior(replace(device, figures=figures)))


def test_convolutions_attain_a_smaller_part_of_larger_matrix_units():
    device = find_device("nvidia-h200")
    rates = [product_rates(device, precision) for precision in (None, "bfloat16")]
    peaks = [device.value(f"peak_{name}_gflops") for name in ("tf32", "bf16_matrix")]
    assert all(attained < 0.4 * peak for (attained, _), peak in zip(rates, peaks, strict=True))
    assert rates[1][0] == pytest.approx(2 * rates[0][0], rel=0.01)  # half as many bytes to move
    assert rates[0][1] == device.value("peak_fp32_gflops") and rates[1][1] == peaks[1]
    plain = find_device("jetson-tx2")  # no matrix units: every product at the vector units' peak
    assert product_rates(plain) == (plain.value("peak_fp32_gflops"),) * 2
    assert product_rates(plain, "float16") == (plain.value("peak_fp16_gflops"),) * 2


def with_figures(device, **values):
    given = device.figure("peak_fp32_gflops")
    return replace(device, figures=device.figures | {n: replace(given, value=v) for n, v in values.items()})


def test_float32_products_are_bound_by_the_peak_or_by_the_power_of_the_board():
    t4, h200 = find_device("nvidia-t4"), find_device("nvidia-h200")
    assert product_rates(h200)[1] == h200.value("peak_fp32_gflops")  # the measured device is the unit
    assert product_rates(t4)[1] == rates.WATT_GFLOPS / 12 * 70
    cool = product_rates(with_figures(t4, power_w=300.0))[1]
    assert cool == rates.NARROW_GAIN * t4.value("peak_fp32_gflops")  # 16 lanes a scheduler
    figures = {n: f for n, f in t4.figures.items() if n != "power_w"}
    assert product_rates(replace(t4, figures=figures))[1] == cool
    assert product_rates(with_figures(t4, power_w=35.0), "float16") == product_rates(t4, "float16")


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_uneven_sides_do_not_make_a_layer_faster_on_a_device_that_nobody_measured(mode):
    even, uneven = (
        torchedge.predict(nn.Linear(size, size), 4096, "nvidia-a100", input_size=(size,), mode=mode)
        for size in (4096, 4097)
    )
    assert even.latency.value <= uneven.latency.value


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_kinds_of_steps_are_scaled_with_their_device(mode):
    """Of a device with the relative's own figures each kind has the relative's products."""
    relative = read_relative(find_device("nvidia-a100"), mode)
    same = replace(
        relative.device, profile={"relative": relative.device.name}, fingerprint=f"as unseen, {mode}"
    )
    models = load_models(same, mode)
    kinds = {(MATRICES, None), (LAST, None), (LAST, "bfloat16")}
    kinds |= {(CHANNELS_LAST, None)} if mode == "train" else set()
    assert set(relative.kinds) == kinds
    np.testing.assert_allclose(
        models.latency.matrices.coefficients, relative.kinds[MATRICES, None].coefficients
    )
    np.testing.assert_allclose(models.latency.coefficients, relative.latency.coefficients)
    if mode == "train":
        last = load_models(same, mode, None, True).latency
        np.testing.assert_allclose(last.coefficients, relative.kinds[CHANNELS_LAST, None].coefficients)
