"""`torchedge report`: what it writes, and every way to ask for it wrongly."""

import html.parser
import json
import re

import pytest

from torchedge.cli import main

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHEDGE_DEVICE", raising=False)


class Page(html.parser.HTMLParser):
    """Which tags a page has, and what they refer to."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_one_html_file_holds_everything(small_dataset, fitted, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(small_dataset), "-d", str(fitted), "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out.replace("\n", " ") or out.exists()
    page = Page()
    text = out.read_text(encoding="utf-8")
    page.feed(text)
    assert page.tags.count("img") == 10 and "script" not in page.tags and "link" not in page.tags
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text).replace("http-equiv", "")
    words = " ".join(page.text)
    assert "Γ, training memory" in words and "rows that err most" in words
    assert "published" in words and "NVIDIA Jetson TX2 Module Data Sheet" in words


def test_a_png_or_a_folder_of_them(small_dataset, fitted, tmp_path):
    file, folder = tmp_path / "all.png", tmp_path / "pictures"
    assert main(["report", str(small_dataset), "-d", str(fitted), "-o", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(small_dataset), "-d", str(fitted), "-o", str(folder), "--json"]) == 0
    names = {path.name for path in folder.iterdir()}
    kinds = ("predicted-measured", "errors", "by-network", "by-level", "by-batch-size")
    assert names == {f"training-{f}-{kind}.png" for f in ("memory", "latency") for kind in kinds}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_tables_and_json_without_a_file(small_dataset, fitted, capsys):
    assert main(["report", str(small_dataset), "-d", str(fitted)]) == 0
    out = capsys.readouterr().out
    assert "Γ, MiB" in out and "Φ, ms" in out and max(map(len, out.splitlines())) <= 80
    assert main(["report", str(small_dataset), "-d", str(fitted), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "made-up" and document["files"] == []
    assert document["fitted_to_these_rows"] is False
    assert [f["symbol"] for f in document["figures"]] == ["Γ", "Φ"]
    assert document["figures"][0]["rows"] == 80 and len(document["figures"][0]["worst"]) == 15


def test_rows_that_a_profile_was_fitted_to_are_left_out_or_marked(small_dataset, tmp_path, capsys):
    pytest.importorskip("sklearn")
    own = tmp_path / "own"
    assert main(["fit", str(small_dataset), "--out", str(own), "--no-accuracy"]) == 0
    words = ["report", str(small_dataset), "-d", str(own), "--json"]
    capsys.readouterr()
    assert main(words) == 0
    unseen = json.loads(capsys.readouterr().out)
    assert "networks not trained on" in unseen["method"] and unseen["fitted_to_these_rows"] is False
    assert main([*words, "--protocol", "profile"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["fitted_to_these_rows"] is True and "fitted to these very" in seen["method"]
    assert seen["figures"][0]["error"]["median"] < unseen["figures"][0]["error"]["median"]
    page = tmp_path / "seen.html"
    assert main(["report", str(small_dataset), "-d", str(own), "--protocol", "profile", "-o", str(page)]) == 0
    assert 'class="method seen"' in page.read_text(encoding="utf-8")


def test_rows_that_a_profile_was_adapted_to_are_not_compared(small_dataset, fitted, tmp_path, capsys):
    pytest.importorskip("sklearn")
    own = tmp_path / "own"
    words = ["fit", str(small_dataset), "--base", str(fitted), "--points", "20", "--out", str(own)]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["report", str(small_dataset), "-d", str(own), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fitted_to_these_rows"] is False and document["figures"][0]["rows"] == 60
    assert "70 of 90 rows that the profile was not adapted to" in document["notes"][0]


def test_a_profile_alone_shows_its_figures_and_accuracy(tmp_path, capsys):
    assert main(["report", "adreno-640"]) == 0
    out = capsys.readouterr().out
    assert "ships no measurements" in out and "bandwidth_gb_s" in out
    page = tmp_path / "tx2.html"
    assert main(["report", "jetson-tx2", "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Models of training" in text and "Γ, training memory" in text and "left-out" in text


def test_a_profile_that_ships_its_measurements_is_compared_with_them(small_dataset, fitted, tmp_path, capsys):
    import shutil

    folder = tmp_path / "shipped"
    shutil.copytree(fitted, folder)
    shutil.copytree(small_dataset, folder / "campaign")
    assert main(["report", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["dataset"] == "made-up/campaign" and document["figures"][0]["rows"] == 80


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing-here"], "neither a folder of measurements nor a device"),
        (["EMPTY"], "holds neither measurements.csv nor device.toml"),
        (["adreno-640", "--protocol", "own"], "ships no measurements to compare with"),
        (["adreno-640", "--device", "jetson-tx2"], "is a device already"),
        (["adreno-640", "--out", "EMPTY/x.png"], "ships no measurements to draw"),
        (
            ["DATA", "--out", "EMPTY/report.pdf"],
            "expected a file that ends in .html, .htm, .png, or a folder",
        ),
        (["DATA", "--out", "EMPTY/none/report.html"], "expected it in a folder that exists"),
        (["DATA", "--device", "unheard-of"], "unheard-of"),
        (["DATA", "--protocol", "guess"], "invalid choice"),
    ],
)
def test_wrong_words_are_told(small_dataset, tmp_path, capsys, words, says):
    empty = tmp_path / "empty"
    empty.mkdir()
    given = [w.replace("EMPTY", str(empty)).replace("DATA", str(small_dataset)) for w in words]
    assert main(["report", *given]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert says in error and "Traceback" not in error
    assert list(empty.iterdir()) == []
