"""The report script: pictures by level and batch size, and the HTML page."""

import html.parser
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from oracles.comparisons import compared
from oracles.small_datasets import write_small_dataset

from torchedge.devices import find_device
from torchedge.profiling.accuracy import Report

pytest.importorskip("matplotlib")
import report as script


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_lines_by_level_are_means(axes):
    table = compared()
    script.draw_errors_by_level(axes, replace(table, value=table.measured * (1 + table.level / 1000)))
    assert axes.lines[0].get_xydata() == pytest.approx(np.array([[0, 0], [30, 3], [60, 6]]))


def test_curves_over_batch_size_are_lines_predicted_and_dots_measured():
    from matplotlib.figure import Figure

    table, figure = compared(), Figure(layout="constrained")
    script.draw_batch_sizes(figure, table)
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
    table = compared(level=np.zeros(27, np.int64), strategy=np.full(27, ""))
    report = Report(find_device("jetson-tx2"), "made up", "0" * 64, "guesses", (table,))
    drawn = list(script.pictures(report))
    assert [p.name.removeprefix("training-latency-") for p in drawn] == [
        "predicted-measured",
        "errors",
        "by-network",
    ]
    assert all(p.png().startswith(b"\x89PNG") for p in drawn)


def test_names_from_files_are_escaped():
    hostile = "<script>alert('x')</script>"
    table = compared(network=np.full(27, hostile), label=np.full(27, hostile), level=np.zeros(27, np.int64))
    device = find_device("jetson-tx2")
    report = Report(device, hostile, "0" * 64, hostile, (table,), notes=(hostile,))
    text = script.page(report, device)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<b>" not in script.table_html(["<b>"], [["<b>"]])


class Page(html.parser.HTMLParser):
    """Which tags a page has, what they refer to, and its text."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.slow
def test_one_html_file_holds_everything_and_a_folder_a_file_a_picture(tmp_path, monkeypatch):
    data, out = write_small_dataset(tmp_path / "jetson-tx2"), tmp_path / "report.html"
    monkeypatch.setattr(sys, "argv", ["report.py", str(data), "--out", str(out)])
    script.main()
    page, text = Page(), out.read_text(encoding="utf-8")
    page.feed(text)
    assert page.tags.count("img") == 10 and "script" not in page.tags and "link" not in page.tags
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text).replace("http-equiv", "")
    words = " ".join(page.text)
    assert "Γ, training memory" in words and "rows that err most" in words
    assert "published" in words and "NVIDIA Jetson TX2 Module Data Sheet" in words
    monkeypatch.setattr(sys, "argv", ["report.py", str(data), "--out", str(tmp_path / "pictures")])
    script.main()
    kinds = ("predicted-measured", "errors", "by-network", "by-level", "by-batch-size")
    names = {f"training-{f}-{kind}.png" for f in ("memory", "latency") for kind in kinds}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == names
