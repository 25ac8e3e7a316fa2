"""`torchedge report`: one HTML file that stands alone and shows every figure of the prediction."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import torchedge
from torchedge.cli import DOES_NOT_FIT
from torchedge.prediction.memory.tape import CATEGORIES
from torchedge.texts import number, span

HOSTILE = '<script src="https://evil.example/x.js">alert(1)</script> & "quoted" \x1b[2J'
VOID = {"meta"}
SHAPES = {"line", "polygon", "polyline", "circle"}
MODULE = """
from torch import nn

def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))
"""


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where a tag is not closed by its own end."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(MODULE)
    return f"{tmp_path / 'nets.py'}:small"


def figures(prediction):
    """Every figure of a prediction as it is printed."""
    for e in (
        prediction.memory,
        prediction.needed,
        prediction.latency,
        prediction.allocated,
        prediction.reserved,
    ):
        yield from (number(e.value), span(e.low, e.high))
    yield from map(number, prediction.breakdown.values())
    yield str(prediction.provenance)
    yield from prediction.notes
    for item in prediction.timeline.spans:
        yield f"{item.lane} {item.phase} {number(item.start_ms)} {number(item.end_ms)} {number(item.busy_ms)}"


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_page_shows_every_figure_and_loads_nothing(mode, tmp_path):
    out = tmp_path / "report.html"
    options = {"device": "jetson-tx2", "mode": mode, "input_size": (3, 20, 20)}
    prediction = torchedge.report(network(), 16, out=out, **options)
    assert prediction == torchedge.predict(network(), 16, **options)
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    for figure in figures(prediction):
        assert " ".join(figure.split()) in page.text
    assert page.tags.count("svg") == 3 and set(page.tags) | {"line"} >= SHAPES
    assert ("Settings that fit" in page.text) == (mode == "train")
    assert f"{sum(p.numel() for p in network().parameters()):,} parameters" in page.text
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "data", "action", "xlink:href", "onload"}
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"(?i)https?:|//[a-z]|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text and "nan" not in text.lower().split("provenance")[0]


def test_names_are_text(tmp_path):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b onload=x>", nn.Linear(4, 4))

        def forward(self, x):
            return self._modules["<b onload=x>"](x)

    graph = torchedge.capture(Holder(), torch.zeros(2, 4), name=HOSTILE)
    torchedge.report(graph, 2, device="jetson-tx2", out=tmp_path / "hostile.html")
    page = Page((tmp_path / "hostile.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags and "b" not in page.tags
    assert '<script src="https://evil.example/x.js">' in page.text and "<b onload=x>" in page.text
    assert "\x1b" not in page.text


def test_categories_over_the_step_add_up_to_the_peak():
    profile = torchedge.simulate(network(), 8, input_size=(3, 20, 20), optimizer="adam")
    timeline = profile.timeline()
    assert timeline.by_category.shape == (len(timeline.live_mib), len(CATEGORIES))
    at_peak = dict(zip(CATEGORIES, timeline.by_category[profile.peak.index], strict=True))
    assert at_peak == pytest.approx(dict(profile.breakdown))
    assert timeline.live_mib.max() == pytest.approx(profile.live_mib)


def test_a_graph_for_one_batch_size_has_one_point(tmp_path):
    graph = torchedge.capture(network(), input_size=(3, 20, 20), batch_size=4)
    torchedge.report(graph, 4, device="jetson-tx2", out=tmp_path / "one.html")
    Page((tmp_path / "one.html").read_text(encoding="utf-8"))


def test_the_command(run, nets, tmp_path, capsys):
    out = tmp_path / "small.html"
    words = ("report", nets, "--input-size", "3x16x16", "-d", "jetson-tx2", "-b", "8", "--html", str(out))
    assert "written to" in run(*words)
    assert "small" in Page(out.read_text(encoding="utf-8")).text
    printed = run(*words, "--memory-limit", "10MiB", status=DOES_NOT_FIT)
    assert "does not fit into 10.0 MiB" in printed and "\nfits into" not in printed
    document = json.loads(run(*words, "--json", "--memory-limit", "10MiB", status=DOES_NOT_FIT))
    assert document["fits"] is False and document["batch_size"] == 8
    page = Page(out.read_text(encoding="utf-8")).text
    assert "does not fit into 10.0 MiB" in page and "no setting fits" in page
    assert "largest batch size that fits at 95 % confidence: none" in page


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--html"),
        (("--html", "report.pdf"), "report.pdf"),
        (("--html", "no/such/folder/report.html"), "no/such/folder"),
        (("--html", "r.html", "--batch-size", "0"), "0"),
        (("--html", "r.html", "--device", "no-such-device"), "no-such-device"),
        (("--html", "r.html", "--confidence", "2"), "2"),
    ],
)
def test_wrong_use_gives_one_line_and_no_file(words, named, nets, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert named in refused("report", nets, "--input-size", "3x16x16", *words)
    assert {path for path in tmp_path.iterdir() if path.suffix in (".html", ".pdf")} <= before


@pytest.fixture
def browse(tmp_path):
    """Open a page in chromium: its text, its picture, what it writes to the console, what it asks for."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    (tmp_path / "user").mkdir()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run"]
    options += [f"--user-data-dir={tmp_path / 'user'}", f"--log-net-log={tmp_path / 'net.json'}"]

    def call(page, *flags):
        command = [chromium, *options, *flags, page.as_uri()]
        ended = subprocess.run(command, capture_output=True, timeout=120, check=True)
        log = (tmp_path / "net.json").read_text(encoding="utf-8", errors="replace")
        events = re.findall(r'"initiator":"([^"]*)".*"url":"(\w+://[^"]*)"', log)  # a line is an event
        asked = {url for initiator, url in events if initiator != "not an origin"}  # by the browser itself
        console = [line for line in ended.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
        return ended.stdout.decode(errors="replace"), console, asked

    return call


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path, browse):
    """No message on its console, no request, all headings; light and dark. A page that asks is noticed."""
    out, picture = tmp_path / "report.html", tmp_path / "page.png"
    torchedge.report(network(), 16, out=out, device="jetson-tx2", input_size=(3, 20, 20))
    text, console, asked = browse(out, "--dump-dom")
    assert (console, asked) == ([], set())
    for heading in (
        "Prediction",
        "Memory over the step",
        "Memory by batch size",
        "Settings that fit",
        "Layers",
    ):
        assert heading in Page(text).text
    pictures = pytest.importorskip("PIL.Image")
    for scheme, light in ((1, True), (0, False)):
        browse(out, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
        corner = pictures.open(picture).convert("L").getpixel((2, 2))
        assert (corner > 128) == light
    careless = tmp_path / "careless.html"
    careless.write_text("<script>console.error('oh')</script><img src='http://127.0.0.1:9/x.png'>")
    _, console, asked = browse(careless, "--dump-dom")
    assert "oh" in "".join(console) and asked == {"http://127.0.0.1:9/x.png"}
