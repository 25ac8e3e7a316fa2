"""Runs in a child process, and what reaches the terminal."""

import io
import sys

import pytest

from torchedge.cli import main, running
from torchedge.cli.console import PrintableStream
from torchedge.errors import OpenCLError
from torchedge.texts import printable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts of a POSIX shell")


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Make a shell script the interpreter of child processes."""

    def call(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(running.sys, "executable", str(path))

    return call


@pytest.mark.parametrize(("name", "number"), [("SEGV", 11), ("ABRT", 6), ("ILL", 4)])
def test_a_signal_is_one_error_that_names_it_and_the_cache(python, monkeypatch, name, number):
    monkeypatch.setenv("POCL_CACHE_DIR", "/caches/pocl")
    python(f"kill -{name} $$")
    with pytest.raises(OpenCLError, match=rf"signal {number} \(.*\) ended the run.*/caches/pocl"):
        running.run_isolated(["run", "b"], 60)


def test_what_does_not_end_is_ended_with_its_children(python, tmp_path):
    python(f"(sleep 1000; touch {tmp_path}/late) & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(OpenCLError, match=r"longer than 0\.5 s and was ended"):
        running.run_isolated(["run", "b"], 0.5)


def test_the_child_gets_the_words_and_gives_its_status(python, tmp_path, capfd):
    python('echo "$@"; exit 3')
    assert main(["run", "b", "--isolated", "--random", "--time-limit", "20"]) == 3
    assert capfd.readouterr().out.split() == ["-m", "torchedge", "run", "b", "--random"]


def test_an_isolated_error_is_told_once(tmp_path, capfd):
    assert main(["run", str(tmp_path), "--isolated"]) == 2
    assert capfd.readouterr().err.count("is no bundle") == 1


def test_a_time_limit_is_a_number_of_seconds_and_a_path_is_not_empty(tmp_path, refused):
    for limit in ("0", "-1", "inf", "nan"):
        line = refused("run", str(tmp_path), "--isolated", "--time-limit", limit)
        assert "expected a number of seconds above 0" in line
    assert "the path is empty; expected a path" in refused("export", "net", "--out", "")


CODES = [
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x9b2J",
    "\r",
    "\b",
    "\x00",
    "\u202e",
    "\u2066",
    "\x7f",
    "\ufeff",
    "\x1bc",
]


@pytest.mark.parametrize("code", CODES)
def test_control_codes_reach_no_terminal(code, capsys):
    stream = io.StringIO()
    print(f"a{code}b\tΓ\n\x1b[1mbold\x1b[0m", file=PrintableStream(stream))
    shown = stream.getvalue()
    assert code not in shown and printable(shown) == shown
    assert shown.startswith("a\\") and shown.endswith("b\tΓ\n\x1b[1mbold\x1b[0m\n")
    assert main(["run", f"no{code.replace(chr(0), '')}thing"]) == 2
    captured = capsys.readouterr()
    assert not code.strip("\0") or code not in captured.err + captured.out
