"""Pictures of runs: each can be drawn, says what it shows, and needs no display; bad input is named."""

import io
import sys

import numpy as np
import pytest
from oracles.random_instances import random_instance

from torchedge.errors import InputError, MissingExtraError
from torchedge.streaming.figures import (
    Lane,
    draw_comparison,
    draw_gantt,
    draw_lanes,
    draw_memory,
    draw_tradeoff,
    lane_of_runs,
)
from torchedge.streaming.instances import MEBIBYTE, Instance, Layer
from torchedge.streaming.plans import OverlapPlan, always_next, preload_everything, same_type
from torchedge.streaming.rates import derive_rates
from torchedge.streaming.simulation import simulate_plan

pytest.importorskip("matplotlib")

INSTANCE = random_instance(3, "medium")
STRATEGIES = (always_next, same_type, preload_everything)


@pytest.fixture(scope="module")
def rates():
    from torchedge.devices import find_device

    return derive_rates(find_device("adreno-750"))


@pytest.fixture(scope="module")
def runs(rates):
    alive = [1000] * len(INSTANCE.layers)
    return [simulate_plan(INSTANCE, strategy(INSTANCE), rates, alive) for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def empty(rates):
    """A run that takes no time and holds nothing."""
    instance = Instance(1, (Layer("only", 0, 0.0, "reusable"),), ())
    return simulate_plan(instance, OverlapPlan("OPTIMAL", 0.0, 0.0, (), (), 0), rates)


def texts(figure):
    """All words of a figure, drawn."""
    from matplotlib.text import Text

    figure.savefig(io.BytesIO(), format="png")
    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_visible())


def test_memory_over_time(runs):
    figure = draw_memory(runs[0], limit_bytes=500 * MEBIBYTE)
    words = texts(figure)
    for expected in (
        "time (ms)",
        "memory (MiB)",
        "limit: 500 MiB",
        "allocated: ",
        "average: ",
        "rates assumed",
    ):
        assert expected in words
    assert "weights" in words and "staging buffers" in words and "activations" in words


def test_the_curve_drawn_is_the_curve_simulated(runs):
    figure = draw_lanes([lane_of_runs("all", runs)])
    line = next(line for line in figure.axes[0].lines if line.get_label() == "memory")
    lane = lane_of_runs("all", runs)
    assert np.array_equal(line.get_ydata(), lane.memory.total / MEBIBYTE)
    assert lane.spans[-1][2] == pytest.approx(sum(run.latency_ms for run in runs))


def test_a_gantt_chart_of_all_layers_and_of_some(runs):
    words = texts(draw_gantt(runs[0]))
    for expected in ("disk", "copies", "layers", "read from the disk", "weights, by first use"):
        assert expected in words
    few = draw_gantt(runs[0], layers=(2, 4))
    assert "layers 2 to 4" in texts(few)
    begin, end = few.axes[1].get_xlim()
    assert begin == runs[0].layers.starts_ms[1] and end == runs[0].layers.ends_ms[3]


@pytest.mark.parametrize("layers", [(0, 2), (3, 2), (1, 10**6)])
def test_layers_that_are_none_are_refused(runs, layers):
    with pytest.raises(InputError, match="layers are"):
        draw_gantt(runs[0], layers=layers)


def test_strategies_side_by_side(runs):
    figure = draw_comparison({run.strategy: run for run in runs})
    words = texts(figure)
    expected = (INSTANCE.name, "waiting for weights", "average memory in use", "×)", " ms", "always-next")
    assert all(word in words for word in expected)
    widths = sum(bar.get_width() for bar in figure.axes[0].patches if bar.get_y() < 0)
    assert widths == pytest.approx(runs[0].latency_ms)


def test_models_in_turn(runs):
    lanes = [lane_of_runs("streamed", runs[:2]), lane_of_runs("preloaded", runs[2:] * 3)]
    figure = draw_lanes(lanes, limit_bytes=MEBIBYTE)
    words = texts(figure)
    assert "streamed: " in words and "preloaded: " in words and "limit: 1 MiB" in words
    highest = max(lane.allocated_bytes for lane in lanes) / MEBIBYTE
    assert all(axes.get_ylim()[1] >= max(highest, 1) for axes in figure.axes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (draw_memory, "allocated: 0 MiB"),
        (draw_gantt, "disk"),
        (lambda run: draw_tradeoff([("only", run)]), "only"),
        (lambda run: draw_comparison({"one": run, "two": run}), "0 MiB, allocated 0 MiB"),
        (lambda run: draw_lanes([Lane("only", run.memory, (("only", 0.0, 0.0),), 0)]), "only: 0 ms, 0 MiB"),
    ],
)
def test_a_run_of_nothing_can_be_drawn(empty, draw, words):
    """Every axis keeps a width above 0, without a warning, and the figures read 0."""
    figure = draw(empty)
    assert words in texts(figure)
    for axes in figure.axes:
        for low, high in (axes.get_xlim(), axes.get_ylim()):
            assert np.isfinite([low, high]).all() and low != high


def test_pyplot_is_left_alone(runs):
    before = "matplotlib.pyplot" in sys.modules
    draw_memory(runs[0])
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_without_matplotlib_the_extra_is_named(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torchedge\[plots\]'"):
        draw_memory(runs[0])
