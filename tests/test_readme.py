"""README.md: sessions and snippets, run again, print what it shows; relative links exist.

`TORCHEDGE_UPDATE_README=1 python -m pytest -n0 tests/test_readme.py` pastes today's output.
"""

import contextlib
import doctest
import io
import os
import re
import shlex

import pytest
import torch
from torch import nn

from torchedge.cli import main
from torchedge.tracing.vision import prepare_torchvision

FENCE = re.compile(r"^```(pycon|python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def readme(checkout):
    return (checkout / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An empty folder, nobody's configuration, and a device for snippets that name none."""
    prepare_torchvision()
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHEDGE_DEVICE", raising=False)
    monkeypatch.delenv("TORCHEDGE_DEBUG", raising=False)


def test_sessions_print_what_they_show(readme, clean, checkout):
    pytest.importorskip("matplotlib")
    today = rerun(readme)
    if os.environ.get("TORCHEDGE_UPDATE_README"):
        (checkout / "README.md").write_text(today, encoding="utf-8")
    else:
        assert today.splitlines() == readme.splitlines()


def test_the_first_screen_holds_a_session_of_each_kind(readme):
    first = readme.split("\n## Install")[0]
    assert "make demo" in first and "make test" in first
    kinds = [kind for kind, _ in FENCE.findall(first)]
    assert "pycon" in kinds and "console" in kinds
    assert "TODO" not in readme


def test_lines_of_output_are_compared():
    shown = "```pycon\n>>> 1 + 1\n3\n```\n```console\n$ torchedge --version\nnone\n```\n"
    today = rerun(shown)
    assert "\n2\n" in today and "none" not in today
    assert rerun(today) == today


def test_relative_links_exist(readme, checkout):
    links = re.findall(r"\]\(([^)#\s]+)", readme)
    relative = [link for link in links if "://" not in link]
    assert len(relative) > 5
    assert [link for link in relative if not (checkout / link).exists()] == []


def rerun(text):
    """The text with every session's output as it is now; names live through the file."""
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = nn.Sequential(*layers)  # a training script's own
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def replaced(found):
        kind, body = found[1], found[2]
        if kind == "python":
            snippet(body, names)
            return found[0]
        return f"```{kind}\n{pycon(body, names) if kind == 'pycon' else console(body)}```"

    return FENCE.sub(replaced, text)


def snippet(body, names):
    """Run a plain snippet, and the tests it defines."""
    before = set(names)
    exec(compile(body, "README.md", "exec"), names)
    for name in set(names) - before:
        if name.startswith("test_"):
            names[name]()


def pycon(body, names):
    lines = []
    for example in doctest.DocTestParser().get_examples(body):
        first, *more = example.source.rstrip("\n").split("\n")
        lines += [f">>> {first}", *(f"... {line}".rstrip() for line in more)]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example.source, "README.md", "single"), names)
        names.pop("_", None)
        lines += out.getvalue().splitlines()
    return "".join(f"{line}\n" for line in lines)


def console(body):
    """Run `$ torchedge ...` lines, each perhaps with ` | tail -n N` behind it."""
    lines = []
    for line in body.splitlines():
        if not line.startswith("$ "):
            continue
        lines += [""] * bool(lines) + [line]
        command, _, behind = line[2:].partition(" | ")
        program, *words = shlex.split(command, comments=True)
        assert program == "torchedge"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = main(words)
        assert status in (0, 3), line
        printed = out.getvalue().splitlines()
        if behind:
            printed = printed[-int(re.fullmatch(r"tail -n (\d+)", behind)[1]) :]
        lines += printed
    return "".join(f"{line}\n" for line in lines)
