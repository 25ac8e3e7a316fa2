"""What a report says and draws is what was measured and predicted."""

from dataclasses import replace

import numpy as np
import pytest

from torchedge.devices import find_device
from torchedge.profiling.reports import Compared, Report, figures_document, summarise

RANDOM = np.random.default_rng(0)


def compared(**changes):
    """Two pruned networks of three levels and one that was never pruned; predictions 10 % above."""
    rows = [
        (n, v, s) for n in ("one", "two") for v, s in ((0, ""), (30, "random"), (60, "random"), (60, "l1"))
    ]
    rows += [("plain", 0, "")]
    lines = [(*row, b) for row in rows for b in (4.0, 16.0, 64.0)]
    network, level, strategy, batch = (np.array(column) for column in zip(*lines, strict=True))
    measured = batch * np.array([2.0 if n == "one" else 3.0 for n in network]) * (1 - level / 100)
    label = np.array([f"{n}-{s}-{v}" for n, v, s in zip(network, level, strategy, strict=True)])
    table = Compared(
        "train",
        "latency",
        network,
        level.astype(np.int64),
        strategy,
        label,
        batch,
        measured,
        1.1 * measured,
        0.95 * measured,
        1.3 * measured,
    )
    return replace(table, **changes)


def test_errors_are_signed_percentages_and_coverage_counts_rows():
    table = compared()
    assert table.error == pytest.approx(np.full(27, 10.0))
    found = summarise(table)
    assert (found.rows, found.mean, found.median) == (27, pytest.approx(10), pytest.approx(10))
    assert found.coverage == 100
    low = table.low.copy()
    low[:3] = 1.05 * table.measured[:3]
    assert summarise(replace(table, low=low)).coverage == pytest.approx(100 * 24 / 27)


def test_every_network_counts_the_same_in_the_mean():
    table = compared()
    value = np.where(table.network == "plain", 1.4, 1.1) * table.measured
    found = summarise(replace(table, value=value))
    assert found.mean == pytest.approx((10 + 10 + 40) / 3)
    assert {name: entry[0] for name, entry in found.networks.items()} == {"one": 12, "two": 12, "plain": 3}
    assert found.levels[30] == (6, pytest.approx(10))


def test_the_rows_that_err_most_come_first():
    table = compared()
    value = table.value.copy()
    value[5], value[20] = 0.2 * table.measured[5], 1.5 * table.measured[20]
    worst = summarise(replace(table, value=value)).worst
    assert [round(row[4]) for row in worst[:2]] == [-80, 50]
    assert worst[0][0] == table.label[5] and worst[0][1] == int(table.batch[5])


def test_intervals_that_were_not_fitted_have_no_coverage():
    blank = np.full(27, np.nan)
    table = compared(low=blank, high=blank)
    report = Report(find_device("jetson-tx2"), "made up", "0" * 64, "guesses", (table,))
    assert not table.has_intervals
    assert np.isnan(figures_document(report)[0]["coverage"])


# what is drawn ----------------------------------------------------------------------------------------------


@pytest.fixture
def axes():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    return Figure().subplots()


def points(axes):
    return np.concatenate(
        [np.asarray(group.get_offsets()) for group in axes.collections if len(group.get_offsets())]
    )


def test_the_scatter_shows_every_row_once(axes):
    from torchedge.profiling.report_figures import draw_scatter

    table = compared()
    draw_scatter(axes, table)
    shown = np.concatenate(
        [np.asarray(c.get_offsets()) for c in axes.collections if type(c).__name__ == "PathCollection"]
    )
    expected = np.column_stack([table.measured, table.value])
    assert np.allclose(shown[np.lexsort(shown.T)], expected[np.lexsort(expected.T)])
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlabel() == "measured Φ, ms" and axes.get_ylabel() == "predicted Φ, ms"
    line = axes.lines[0].get_xydata()
    assert np.allclose(line[:, 0], line[:, 1])


def test_many_networks_share_one_grey(axes):
    from torchedge.profiling.report_figures import COLOURS, draw_scatter

    table = compared(network=np.array([f"n{i // 3}" for i in range(27)]))
    draw_scatter(axes, table)
    labels = axes.get_legend_handles_labels()[1]
    assert len(labels) == len(COLOURS) + 1 and "2 others" in labels


def test_bars_are_mean_errors_by_way_of_pruning(axes):
    from torchedge.profiling.report_figures import draw_errors_by_network

    table = compared()
    factor = np.select([table.strategy == "random", table.strategy == "l1"], [1.02, 1.05], 1.2)
    draw_errors_by_network(axes, replace(table, value=factor * table.measured))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two", "plain"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([2, 5, 2, 5, 20])
    assert axes.get_legend_handles_labels()[1] == ["random", "l1", "not pruned"]


def test_lines_by_level_are_means(axes):
    from torchedge.profiling.report_figures import draw_errors_by_level

    table = compared()
    draw_errors_by_level(axes, replace(table, value=table.measured * (1 + table.level / 1000)))
    assert axes.lines[0].get_xydata() == pytest.approx(np.array([[0, 0], [30, 3], [60, 6]]))


def test_the_histogram_holds_every_row(axes):
    from torchedge.profiling.report_figures import draw_error_histogram

    table = compared(value=compared().measured * RANDOM.uniform(0.2, 3, 27))
    draw_error_histogram(axes, table)
    assert sum(bar.get_height() for bar in axes.patches) == 27


def test_curves_over_batch_size_are_lines_predicted_and_dots_measured():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from torchedge.profiling.report_figures import draw_batch_sizes

    table, figure = compared(), Figure(layout="constrained")
    draw_batch_sizes(figure, table)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["one", "two"]
    for axes in panels:
        lines, dots = axes.lines[::2], axes.lines[1::2]
        assert len(lines) == len(dots) == 3
        for line, dot in zip(lines, dots, strict=True):
            level = int(dot.get_label().split()[0])
            chosen = (table.network == axes.get_title()) & (table.level == level) & (table.strategy != "l1")
            assert np.allclose(dot.get_xydata(), np.column_stack([table.batch, table.measured])[chosen])
            assert np.allclose(line.get_xydata(), np.column_stack([table.batch, table.value])[chosen])


def test_networks_without_levels_have_no_such_pictures():
    pytest.importorskip("matplotlib")
    from torchedge.profiling.report_figures import overview, pictures, png_bytes

    table = compared(level=np.zeros(27, np.int64), strategy=np.full(27, ""))
    report = Report(find_device("jetson-tx2"), "made up", "0" * 64, "guesses", (table,))
    drawn = list(pictures(report))
    assert [p.name.removeprefix("training-latency-") for p in drawn] == [
        "predicted-measured",
        "errors",
        "by-network",
    ]
    assert all(png_bytes(p).startswith(b"\x89PNG") for p in [*drawn, overview(report)])


# pages ------------------------------------------------------------------------------------------------------


def test_names_from_files_are_escaped():
    pytest.importorskip("matplotlib")
    from torchedge.profiling.report_pages import page, table_html

    hostile = "<script>alert('x')</script>"
    table = compared(network=np.full(27, hostile), label=np.full(27, hostile), level=np.zeros(27, np.int64))
    device = find_device("jetson-tx2")
    report = Report(device, hostile, "0" * 64, hostile, (table,), notes=(hostile,))
    text = page(report, device)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<b>" not in table_html(["<b>"], [["<b>"]])


def test_a_missing_matplotlib_is_told_with_its_extra(monkeypatch):
    import sys

    from torchedge.errors import MissingExtraError
    from torchedge.profiling.report_figures import require_matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"torchedge\[plots\]"):
        require_matplotlib()
