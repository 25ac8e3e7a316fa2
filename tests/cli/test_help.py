"""Every command: help with examples that parse, Python's names, --json; help imports nothing heavy."""

import inspect
import os
import shlex
import sys

import click
import pytest
from oracles.children import python
from oracles.messages import judged

from torchedge import cli
from torchedge.cli import main
from torchedge.cli.options import Command, OutputFile


def walk(group, context):
    """Words and command of every command below a group."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=context)
            yield from (((name, *words), found) for words, found in walk(command, inner))
        else:
            yield (name,), command


ROOT = click.Context(cli._root, info_name="torchedge", **cli._root.context_settings)
COMMANDS = {
    " ".join(words): command for words, command in walk(cli._root, ROOT) if isinstance(command, Command)
}


def test_the_bare_command_and_help_print_the_same(run):
    out = run()
    assert out == run("--help") == run("-h")
    assert all(name.split()[0] in out for name in COMMANDS) and "Exit status" in out
    assert max(map(len, out.splitlines())) <= 80


def test_summaries_are_those_of_the_commands(run):
    """The root's help shows summaries without importing the commands."""
    for section in cli.SECTIONS.values():
        for name, (_, summary) in section.items():
            text = cli._root.get_command(ROOT, name).help or summary
            assert inspect.cleandoc(text).split("\n")[0] == summary, name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_an_example(name, run):
    command = COMMANDS[name]
    out = run(*name.split(), "--help")
    assert "Examples:" in out and f"  torchedge {name}" in out
    for option in ("--json", "-q, --quiet", "-v, --verbose", "-h, --help"):
        assert option in out
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.help[0].isupper() and parameter.opts[0] in out, parameter.name
    assert max(map(len, out.split("Examples:")[0].splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_parsed(name):
    command = COMMANDS[name]
    for example in command.examples:
        program, *words = shlex.split(example)
        assert program == "torchedge" and words[: len(name.split())] == name.split()
        command.make_context(name, words[len(name.split()) :], parent=ROOT)  # commands keep their help option


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_parsed_is_one_line(name, capsys):
    assert main([*name.split(), "--no-such-option"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("torchedge: error: ") and err.count("\n") == 1
    assert "--no-such-option" in err and f"torchedge {name} --help" in err


NUMBERS = ("-1", "2.5", "many", "9" * 20)
WRONG_VALUES = {
    "N": NUMBERS, "N|all": NUMBERS, "N[,N...]": ("", "8,", *NUMBERS), "integer": ("many", "2.5"),
    "SIZE": ("", "much", "nan", "-5", "0MiB", "500XB", "2000000GiB"), "SIZE|none": ("nothing", "0KiB"),
    "CxHxW": ("3x", "large", "3x0x8"), "P": ("1", "0.4", "x"), "X": ("-1", "nan", "x"), "MS": ("0", "x"),
    "float": ("x",), "float range": ("0", "x"), "choice": ("no-such",),
}  # fmt: skip
"""Values that no option of a type takes."""


def wrong_values(kind):
    if isinstance(kind, OutputFile):
        return ("", ".", "nowhere/x.json", *(["x.of"] if kind.suffixes or kind.name == "PICTURE" else []))
    return ("",) if isinstance(kind, click.Path) else WRONG_VALUES.get(kind.name, ())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_value_of_any_option_is_one_line_that_names_it(name, refused):
    command = COMMANDS[name]
    words = shlex.split(command.examples[0])[1 + len(name.split()) :]
    for option in command.params:
        for value in wrong_values(option.type) if isinstance(option, click.Option) else ():
            line = judged(refused(*name.split(), *words, option.opts[0], value))
            assert option.opts[0] in line, (value, line)


PYTHON = {
    "predict": "predict",
    "simulate": "simulate",
    "features": "features",
    "plan model": "plan",
    "export": "export",
    "search": "search",
}


DEFAULTS = {"optimizer", "mode", "amp", "accumulation", "precision", "fusion", "effort", "lam", "seed"}
LIMITS = {"training_memory", "inference_memory", "training_latency", "inference_latency"}
ONLY_SHELL = {
    "predict": {"memory_limit", "confidence", "max_batch_size", "operator_us", "trace", "reduce_overhead"},
    "simulate": {"plot"},
    "features": set(),
    "search": {"image_sizes", "input_size", "round_to", "out", "resume", *LIMITS},
    "export": {"batch_size", "input_size", "seq_len", "weights", "lr"},
    "plan model": {"plot", "picture", "layers", "out", "write_instance", "strategy"},
}


@pytest.mark.parametrize("name", PYTHON)
def test_options_are_called_as_in_python(name):
    """What both have is called the same, and has the same default."""
    import torchedge

    function = dict(inspect.signature(getattr(torchedge, PYTHON[name])).parameters)
    if name == "export":  # of both, by --max-length
        function = dict(inspect.signature(torchedge.export_lm).parameters) | function
    if "step" in function:
        function |= inspect.signature(torchedge.TrainingStep).parameters
    options = {p.name: p for p in COMMANDS[name].params}
    only_shell = {"quiet", "verbose", "as_json", "models", "model", *ONLY_SHELL[name]}
    assert set(options) - only_shell <= set(function)
    for shared in DEFAULTS & set(options) & set(function):
        default = options[shared].get_default(click.Context(COMMANDS[name]))
        if isinstance(default, str | int | float):  # others are told in the help
            assert function[shared].default in (default, None)


def test_choices_are_those_of_the_library():
    from torchedge.cli import options
    from torchedge.graphs.training_steps import AMP_DTYPES, OPTIMIZERS

    assert (OPTIMIZERS, AMP_DTYPES) == (options.OPTIMIZERS, options.AMP)


def test_version(run):
    from torchedge import __version__

    assert run("--version") == f"torchedge {__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["devices"], ["predict", "--help"]])
def test_help_imports_nothing_heavy(words):
    code = (
        "import contextlib, io, sys\nfrom torchedge.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    main({words})\n"
        "print(*{'torch', 'numpy', 'sklearn', 'torchvision'} & set(sys.modules))"
    )
    assert python("-c", code).stdout.split() == []


def test_completion(run):
    for shell in ("bash", "zsh", "fish"):
        assert "_TORCHEDGE_COMPLETE" in run("completion", shell)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pred"], {"predict"}),
        (["predict", "--memory"], {"--memory-limit"}),
        (["predict", "-d", "jetson-t"], {"jetson-tx2"}),
    ],
)
def test_shells_complete(words, expected, run, monkeypatch):
    monkeypatch.setenv("_TORCHEDGE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["torchedge", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert {line.split(",")[1] for line in run().splitlines()} == expected


# the console ------------------------------------------------------------------------------------------------


def test_a_table_shortens_names_and_keeps_numbers(capsys):
    from torchedge.cli.console import print_table

    print_table(["name", "of", "MiB"], [["a" * 200, "b", "123,456"], ["c", "[x] :smile:", "1"]], left=2)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 80 and lines[1].endswith("123,456") and "…" in lines[1]
    assert "[x] :smile:" in lines[2], "markup is text"


def test_long_names_wrap_and_paths_stay_whole(capsys):
    from torchedge.cli.console import print_wrapped

    print_wrapped("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz " * 3)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    path = "/a" * 60
    print_wrapped(f"written to {path}")
    assert path in capsys.readouterr().out


class Terminal:
    """Stands in for stderr."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


@pytest.mark.parametrize("level", [-1, 0, 1])
def test_progress(level, monkeypatch, capsys):
    """A bar on terminals alone, nothing with -q, lines with -v."""
    from torchedge.cli.console import VERBOSITY, Progress, warn

    monkeypatch.setenv("TERM", "xterm")
    with click.Context(click.Command("x")) as context:
        context.meta[VERBOSITY] = level
        with Progress(2, "fitting") as progress:
            progress.doing("reading")
            progress.step()
        warn("beware")
        err = capsys.readouterr().err
        assert ("fitting: reading" in err, "beware" in err) == (level > 0, level >= 0)
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress(2, "fitting") as progress:
            progress.doing("reading")
            progress.step()
        assert ("fitting" in terminal.text) == (level >= 0)


def test_a_terminal_sets_the_width(monkeypatch):
    from torchedge.cli import console

    monkeypatch.setattr(sys, "stdout", Terminal())
    for columns, expected in ((40, 60), (100, 100), (300, 120)):
        monkeypatch.setattr(
            console.shutil, "get_terminal_size", lambda *_, c=columns, **__: os.terminal_size((c, 24))
        )
        assert console.width() == expected
