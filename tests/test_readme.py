"""README.md and pages of docs/: sessions and snippets, run again, print what they show; links exist.

Blocks marked `py` are fragments of other people's scripts and do not run. A block that begins with
`# NAME.py` or `# NAME.toml` is a file. A command without output below it runs, and its output is not
compared. Sessions are compared by meaning: words, and numbers within 2 %, whatever the layout. Paste new
output with `TORCHEDGE_UPDATE_README=1 python -m pytest -n0 -m "" tests/test_readme.py`.
"""

import ast
import contextlib
import doctest
import io
import math
import os
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn

import torchedge
from torchedge.cli import main
from torchedge.tracing.vision import prepare_torchvision

FENCE = re.compile(r"^```(pycon|python|console|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/predicting.md", "docs/devices.md", "docs/tutorial.md", "docs/quantisation.md")
FILE = re.compile(r"# ([\w/-]+\.(?:py|toml))\n")
TRACE = "Traceback (most recent call last):\n    ...\n"
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
DRAWN = re.compile(r"[#…│─━]+")
"""Bars, rules and cut words depend on the width of the terminal."""


TUTORIAL, RECIPES, LOOPS, OWN, MESSAGES = (
    f"docs/{page}.md" for page in ("tutorial", "recipes", "loops", "campaigns", "messages")
)
LONG = ("README.md", "docs/tutorial.md")
SLOW = {"A callback of transformers", "A callback of Lightning", "accelerate", "Measure this machine"}
SLOW |= {
    "Export and generate",
    "Plan before exporting",
    "torch.compile",
    "Several optimizers: a GAN",
    "Making and running one",
    "Plan a model",
}
TASKS = {
    "install, and see whether this machine is ready": (TUTORIAL, "Install"),
    "write down a network of one's own": (TUTORIAL, "Your network"),
    "does it fit, and how long is a step": (TUTORIAL, "Does it fit, and how long is a step?"),
    "make it fit": (TUTORIAL, "What should change?"),
    "see where the memory goes": (TUTORIAL, "Where does the memory go?"),
    "predict an existing script": (TUTORIAL, "Your own training script"),
    "train a step": (TUTORIAL, "Train a step here, through OpenCL"),
    "export a bundle and run it": (TUTORIAL, "Export it for a phone"),
    "run a model larger than the memory": (TUTORIAL, "A model larger than the memory"),
    "a loss of one's own": (RECIPES, "A loss of your own"),
    "several losses": (RECIPES, "Several outputs, several losses"),
    "accumulate gradients": (RECIPES, "Accumulation"),
    "autocast inside the model": (RECIPES, "Autocast"),
    "clip gradients, scale a loss, average weights": (RECIPES, "Clipping, GradScaler and moving averages"),
    "fine-tune a head": (RECIPES, "Frozen layers"),
    "LoRA with peft": (RECIPES, "LoRA with peft"),
    "a language model at several lengths": (RECIPES, "A language model, and its sequence lengths"),
    "predict a GAN": (RECIPES, "A GAN, and other steps with several optimizers"),
    "a model of ONNX": (RECIPES, "An ONNX file"),
    "refuse a run in CI": (RECIPES, "Refuse a run in a script or in CI"),
    "a device that has no profile": (OWN, "A device without a profile"),
    "search under limits": ("docs/search.md", "Prune a network until it fits"),
    "a script with arguments": (LOOPS, "A training script"),
    "a notebook": (LOOPS, "A notebook"),
    "a callback of transformers": (LOOPS, "A callback of transformers"),
    "a callback of Lightning": (LOOPS, "A callback of Lightning"),
    "accelerate": (LOOPS, "accelerate"),
    "torch.compile": ("docs/training.md", "torch.compile"),
    "train a GAN": ("docs/training.md", "Several optimizers: a GAN"),
    "export a training step": ("docs/bundles.md", "Making and running one"),
    "plan the streaming of weights": ("docs/streaming.md", "Plan a model"),
    "generate text with a language model": ("docs/language-models.md", "Export and generate"),
    "plan a language model before exporting it": ("docs/language-models.md", "Plan before exporting"),
    "weights in fewer bits": ("docs/quantisation.md", "Memory"),
    "run a bundle without Python": ("docs/runner.md", "Building and running it"),
    "measure this machine and fit a profile": (OWN, "Measure this machine"),
    "write a plan of one's own": (OWN, "Plans"),
    "it does not fit": (MESSAGES, "The answer is no"),
    "a name is wrong": (MESSAGES, "Names"),
    "an input is wrong": (MESSAGES, "Inputs and settings"),
    "a model cannot be captured": (MESSAGES, "Models"),
    "training through OpenCL is refused": (MESSAGES, "Training and running through OpenCL"),
}
"""What a newcomer wants to do, and the page and section that answer it."""


@pytest.fixture
def readme(checkout):
    return (checkout / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An empty folder, no configuration, and 80 columns."""
    prepare_torchvision()
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # of the files that a page holds
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TORCHEDGE_DEVICE", raising=False)
    monkeypatch.delenv("TORCHEDGE_DEBUG", raising=False)
    monkeypatch.setattr("torchedge.devices.catalog.memory_mib", lambda: (16384.0, None))


@pytest.mark.parametrize(
    ("page", "snippets"),
    [
        ("README.md", False),
        *[pytest.param(page, True, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES],
    ],
)
def test_sessions_print_what_they_show(page, snippets, clean, checkout):
    """The snippets of `LONG` pages search, train, export and plan: they run with the slow tests."""
    pytest.importorskip("matplotlib")
    text = (checkout / page).read_text(encoding="utf-8")
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = nn.Sequential(*layers)  # a training script's own
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "torchedge": torchedge}
    check(checkout / page, text, rerun(text, snippets, names))


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[pytest.mark.slow] * (heading in SLOW))
        for task, (page, heading) in TASKS.items()
        if page not in PAGES
    ],
)
def test_a_newcomer_finds_the_answer(task, clean, checkout):
    """Each section runs alone, behind the page's introduction."""
    page, heading = TASKS[task]
    parts = sections(checkout, page)
    introduction, section = parts[next(iter(parts))], parts[heading]
    for package in ("transformers", "peft", "pytorch_lightning", "accelerate", "onnx"):
        if re.search(rf"(?:import|from) {package}\b", section):
            pytest.importorskip(package)
    names = {"__name__": "__main__"}
    rerun(introduction, names=names)
    check(checkout / page, section, rerun(section, names=names))


def test_every_recipe_is_a_task(checkout):
    assert len(TASKS) >= 30
    for page, heading in TASKS.values():
        assert heading in sections(checkout, page), heading
    for page in (TUTORIAL, RECIPES, LOOPS, OWN, MESSAGES):
        recipes = {heading for heading, text in [*sections(checkout, page).items()][1:] if FENCE.search(text)}
        assert recipes == {heading for place, heading in TASKS.values() if place == page} & recipes


def sections(checkout, page):
    """The text below each heading of a page."""
    parts, fenced = {}, False
    for line in (checkout / page).read_text(encoding="utf-8").splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            heading = line.strip("# \n")
            parts[heading] = ""
        else:
            parts[heading] += line
    return parts


def check(page, text, today):
    """Compare a text's sessions with those of today; or write today's into the page."""
    if os.environ.get("TORCHEDGE_UPDATE_README"):
        page.write_text(page.read_text(encoding="utf-8").replace(text, today), encoding="utf-8")
    else:
        for (kind, shown), (_, printed) in zip(FENCE.findall(text), FENCE.findall(today), strict=True):
            assert kind == "python" or same_meaning(shown, printed), printed


def same_meaning(shown, printed):
    """Whether two outputs have the same words, and numbers that differ by 2 % at most."""
    ours, theirs = DRAWN.sub("", shown), DRAWN.sub("", printed)
    if NUMBER.sub("0", ours).split() != NUMBER.sub("0", theirs).split():
        return False
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (ours, theirs)]
    return all(math.isclose(a, b, rel_tol=0.02, abs_tol=0.1) for a, b in zip(*numbers, strict=True))


def test_meaning_is_words_and_numbers():
    shown = "memory  1,000 MiB  ####\nfits"
    assert same_meaning(shown, "memory 1,011 MiB  ###\n  fits")
    for other in ("memory 1,030 MiB fits", "memory 1,000 MB fits", "memory 1,000 MiB", "γ 1,000 MiB fits"):
        assert not same_meaning(shown, other)


def test_the_first_screen_holds_a_session_of_each_kind(readme):
    first = readme.split("\n## Install")[0]
    assert "make demo" in first and "make test" in first
    kinds = [kind for kind, _ in FENCE.findall(first)]
    assert "pycon" in kinds and "console" in kinds
    assert "TODO" not in readme and len(readme.splitlines()) <= 150


def test_lines_of_output_are_compared():
    shown = "```pycon\n>>> 1 + 1\n3\n```\n```console\n$ torchedge --version\nnone\n```\n"
    today = rerun(shown)
    assert "\n2\n" in today and "none" not in today
    assert rerun(today) == today


def test_the_picture_is_one(checkout):
    drawing = ET.parse(checkout / "docs" / "images" / "step.svg").getroot()
    assert drawing.tag.endswith("}svg") and sum(1 for _ in drawing.iter()) > 50


def test_relative_links_exist(checkout):
    pages = [*checkout.glob("*.md"), *checkout.glob("docs/*.md"), *checkout.glob("*/README.md")]
    broken = []
    for page in pages:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            place = page.parent / link if link else page
            if not place.exists() or (anchor and anchor not in map(slug, sections(place.parent, place.name))):
                broken.append(f"{page.name}: {link}#{anchor}")
    assert broken == []


def slug(heading):
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_a_page_is_short(checkout):
    """Generated tables are apart, in docs/tables."""
    lines = {
        page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in checkout.glob("docs/*.md")
    }
    assert {name: count for name, count in lines.items() if count >= 200} == {}


def test_the_page_of_the_command_line_names_every_command(checkout, capsys):
    main(["--help"])
    commands = set(re.findall(r"^  ([a-z]+)  +[A-Z]", capsys.readouterr().out, re.MULTILINE))
    page = (checkout / "docs" / "cli.md").read_text(encoding="utf-8")
    assert len(commands) > 8
    assert set(re.findall(r"^\| `torchedge ([a-z]+)`", page, re.MULTILINE)) == commands


@pytest.mark.slow
def test_the_page_of_messages_quotes_those_of_the_code(checkout):
    """Each part between dots of a quoted message is in a text of the package."""
    texts = []
    for module in (checkout / "torchedge").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        getattr(part, "value", "") if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    page = (
        (checkout / MESSAGES).read_text(encoding="utf-8").split("## Installation")[0]
    )  # PyTorch's and pip's
    rows = re.findall(r"^\| (`.+?) \| ", page, re.MULTILINE)
    parts = [
        part.strip(" ,;:")
        for row in rows
        for quoted in re.findall(r"`(.+?)`", row)
        for part in quoted.split("...")
    ]
    assert len(rows) > 30
    assert [part for part in parts if not any(part in text for text in texts)] == []


def test_the_index_names_every_page(checkout):
    index = (checkout / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (checkout / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def rerun(text, snippets=True, names=None):
    """The text with every session's output as it is now; names live through the text."""
    names = {"__name__": "__main__"} if names is None else names

    def replaced(match):
        kind, body = match[1], match[2]
        file = FILE.match(body)
        if file:
            Path(file[1]).parent.mkdir(exist_ok=True)
            Path(file[1]).write_text(body, encoding="utf-8")
        elif kind == "python" and snippets:
            snippet(body, names)
        if file or kind in ("python", "toml"):
            return match[0]
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
            try:
                exec(compile(example.source, "<stdin>", "single"), names)
            except Exception as error:
                if example.exc_msg is None:
                    raise
                print(f"{TRACE}{type(error).__module__}.{type(error).__qualname__}: {error}")
        names.pop("_", None)
        lines += out.getvalue().splitlines()
    return "".join(f"{line}\n" for line in lines)


def console(body):
    """Run `$ torchedge ...` lines, each perhaps with ` | head -n N` or `tail` behind it."""
    lines, shown = [], body.splitlines()
    for line, below in zip(shown, [*shown[1:], "$ "], strict=True):
        if not line.startswith("$ "):
            continue
        lines += [""] * (lines[-1:] != [] and not lines[-1].startswith("$ ")) + [line]
        command, _, behind = line[2:].partition(" | ")
        program, *words = shlex.split(command, comments=True)
        assert program == "torchedge"
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
        if below.startswith("torchedge: error:"):
            assert status == 2, line
            out = err
        else:
            assert status in ((0, 4) if words == ["doctor"] else (0, 3)), err.getvalue()
        printed = [] if below.startswith("$ ") else out.getvalue().splitlines()
        if behind:
            end, count = re.fullmatch(r"(head|tail) -n (\d+)", behind).groups()
            printed = printed[: int(count)] if end == "head" else printed[-int(count) :]
        lines += printed
    return "".join(f"{line}\n" for line in lines)
