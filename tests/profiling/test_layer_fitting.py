"""Times of single convolutions: read, fitted, and taken as the prior of kinds of steps."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import torchedge
from torchedge.devices import find_device
from torchedge.errors import ProfileError
from torchedge.prediction.analysis import analyse
from torchedge.prediction.latency.roofline import (
    COEFFICIENT_NAMES,
    LAYER_NAMES,
    PHASES,
    depthwise_times,
    named,
    prior_mean,
    product_terms,
    product_times,
)
from torchedge.prediction.profiles import CHANNELS_LAST, CONVOLUTIONS, MATRICES
from torchedge.profiling import latency_fitting, layer_fitting
from torchedge.profiling.kind_fitting import _informed
from torchedge.profiling.layer_fitting import LAYER_TIMES, read_layer_times

TRUE = {"width_fwd": -0.8, "uneven_width_bwd_x": 1.2, "window_bwd_w": 1.5}


def shapes():
    """Convolutions of 32 x 32: groups of several widths, and depthwise ones with several windows."""
    for batch in (32,):
        for inputs, outputs, groups, kernel in (
            *((n, m, 1, k) for n in (64, 128, 250, 512) for m in (64, 256) for k in (1, 3)),
            *((width * 32, width * 32, 32, 3) for width in (2, 4, 8, 12, 16, 24, 32, 48)),
            *((n, n, n, k) for n in (96, 200, 384) for k in (3, 5, 7, 9, 11)),
            *((3, n, 1, 3) for n in (16, 32, 64)),
        ):
            yield dict(inputs=inputs, outputs=outputs, groups=groups, batch=batch, size=[32, 32]) | {
                name: [value] * 2
                for name, value in (
                    ("kernel", kernel),
                    ("stride", 1),
                    ("padding", kernel // 2),
                    ("dilation", 1),
                )
            }


def write(folder, times):
    keys = {"dtype": "bfloat16", "channels_last": True}
    lines = [
        json.dumps(
            shape | keys | {f"{p}_ms": float(t) for p, t in zip(layer_fitting.PROBED, row, strict=True)}
        )
        for shape, row in zip(shapes(), times, strict=True)
    ]
    (folder / LAYER_TIMES).write_bytes(gzip.compress("\n".join(lines).encode()))


def predicted(rows, coefficients):
    p = named(coefficients)
    products, deep = product_times(rows, product_terms(rows, p, np), np), depthwise_times(rows, p, np)
    return np.stack([np.concatenate([products[phase], deep[phase]]) for phase in PHASES], axis=1)


@pytest.fixture(scope="module")
def prior():
    return prior_mean(find_device("nvidia-h200"), "bfloat16")


@pytest.fixture
def times(prior, tmp_path, monkeypatch):
    """Rows read back from a file whose times follow from `TRUE`."""
    monkeypatch.setattr(layer_fitting, "_FEWEST", 10)
    monkeypatch.setattr(latency_fitting, "_ITERATIONS", 12)
    write(tmp_path, np.ones((len(list(shapes())), 3)))
    (layout,) = (read := read_layer_times(tmp_path))
    assert layout == ("bfloat16", True)
    true = np.append(prior, [TRUE.get(name, 0.0) for name in LAYER_NAMES])
    return replace(read[layout], measured=predicted(read[layout].rows, true) + layer_fitting._EVENTS_MS)


def test_a_convolution_has_the_work_that_its_layer_has_in_a_graph(times):
    graph = torchedge.capture(nn.Conv2d(64, 64, 3, padding=1, groups=32, bias=False), input_size=(64, 32, 32))
    line = analyse(graph).work.products[0]
    ours = times.rows.products[(times.rows.products[:, 9] == 32) & (times.rows.products[:, 0] == 2)][0]
    differ = line != ours
    assert not differ[[0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12]].any()  # all but which gradients are needed


def test_only_kinds_that_were_timed_are_informed(times, prior):
    layers = {("bfloat16", False): times, ("bfloat16", True): times}
    assert len(_informed(prior, (CHANNELS_LAST, "bfloat16"), layers)) == len(prior) + len(LAYER_NAMES)
    for products in (CONVOLUTIONS, MATRICES):
        moved = _informed(prior, (products, "bfloat16"), layers) != prior
        names = {name for name, flag in zip(COEFFICIENT_NAMES, moved.tolist(), strict=True) if flag}
        assert names and all(name.startswith("depthwise") for name in names)
        assert _informed(prior, (products, None), layers) is prior


@pytest.mark.parametrize("bad", [-1.0, 0.0])
def test_damaged_times_are_refused(bad, tmp_path):
    table = np.ones((len(list(shapes())), 3))
    table[1, 2] = bad
    write(tmp_path, table)
    with pytest.raises(ProfileError, match=r"2: sizes and times are not all positive"):
        read_layer_times(tmp_path)


def test_a_folder_without_timed_convolutions_has_none(tmp_path):
    assert read_layer_times(tmp_path) == {}
