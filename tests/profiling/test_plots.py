"""What the pictures show is what was measured and predicted."""

import sys

import numpy as np
import pytest
from oracles.comparisons import compared

from torchedge.devices import find_device
from torchedge.errors import InputError, MissingExtraError
from torchedge.profiling.accuracy import Report
from torchedge.profiling.plots import draw_overview, draw_scatter
from torchedge.storage.pictures import check_picture


@pytest.fixture
def axes():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    return Figure().subplots()


@pytest.mark.slow
def test_the_scatter_shows_every_row_once(axes):
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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_same_overview_gives_the_same_file(form, tmp_path):
    pytest.importorskip("matplotlib")
    table = compared(level=np.zeros(27, np.int64), strategy=np.full(27, ""))
    report = Report(find_device("jetson-tx2"), "made up", "0" * 64, "guesses", (table, compared()))
    files = [tmp_path / f"{name}.{form}" for name in "ab"]
    for file in files:
        check_picture("--out", file)
        draw_overview(report, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[form])


@pytest.mark.parametrize(
    ("name", "expected"), [("a.html", "ends in .png, .svg, .pdf"), ("none/a.png", "in a folder that exists")]
)
def test_a_path_that_cannot_be_drawn_to_is_refused_before_the_work(name, expected, tmp_path):
    with pytest.raises(InputError, match=expected):
        check_picture("--out", tmp_path / name)


def test_a_missing_matplotlib_is_reported_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"torchedge\[plots\]"):
        check_picture("--out", tmp_path / "a.png")
