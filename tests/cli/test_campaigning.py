"""`torchedge campaign run`: what it prints, what it refuses, and that it continues where it was."""

import json
import sys

import pytest
from oracles.fake_campaigns import PROBE, prepare

from torchedge.cli import BAD_INPUT, main
from torchedge.profiling.campaigns import running
from torchedge.profiling.campaigns.plans import read_plan

PLAN = 'levels = [0]\ntrain_batch_sizes = [1, 13, 256]\nnetworks = ["net"]\n'


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """A plan file, a folder whose job lines are there, and the fake probe in place of the real one."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    real = running.data_folder("hooks")
    (hooks / running.LEASH).write_bytes((real / running.LEASH).read_bytes())
    (hooks / running.PROBE).write_bytes(PROBE.read_bytes())
    monkeypatch.setattr(running, "data_folder", lambda _: hooks)
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    prepare(tmp_path / "out", read_plan(plan))
    return ["campaign", "run", "my-board", "--plan", str(plan), "--out", str(tmp_path / "out")]


def test_runs_and_says_what_comes_next(campaign, tmp_path, capsys):
    assert main(["-v", *campaign]) == 0
    out, err = capsys.readouterr()
    assert "my-board: board, torch 2.0; memory by rss" in out
    assert "3 points: 1 measured, 1 out of memory, 1 failed, 0 left" in out
    assert "failed: net-0 train 13: ValueError: unlucky" in out and "--retry-failed" in out
    assert "too few points for a fit" in out and "next: " not in out and "measuring: done" in err
    assert (tmp_path / "out" / "device.toml").exists()
    from torchedge.devices import find_device

    assert find_device(str(tmp_path / "out")).name == "my-board"


def test_json_and_going_on(campaign, capsys):
    assert main([*campaign, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["points"], first["measured"], first["left"]) == (3, 1, 0)
    assert main([*campaign, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == first and not err


def test_tables_only_measures_nothing(campaign, capsys):
    assert main([*campaign, "--tables-only"]) == 0
    out, _ = capsys.readouterr()
    assert "3 points: 0 measured" in out and "3 left" in out


def test_interrupted_says_how_to_go_on(campaign, capsys, monkeypatch):
    def interrupt(self, row):
        raise KeyboardInterrupt

    monkeypatch.setattr(running._Session, "_take", interrupt)
    assert main(campaign) == 130
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.undo()


def test_show_plan(capsys):
    assert main(["campaign", "show", "quick"]) == 0
    out = capsys.readouterr().out
    assert "networks = [" in out and out.rstrip().endswith("# 8 networks, 40 points")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["campaign", "run"], "Missing argument 'NAME'"),
        (["campaign", "run", "x"], "Missing option '--plan'"),
        (["campaign", "run", "--plan", "quick"], "Missing argument 'NAME'"),
        (["campaign", "run", "My Board", "--plan", "quick"], "expected lower case letters"),
        (["campaign", "run", "x", "y", "--plan", "quick"], "unexpected extra argument (y)"),
        (["campaign", "run", "x", "--plan", "nothing"], "is no file; expected standard, small, quick"),
        (["campaign", "show", "nothing"], "is no file; expected standard, small, quick"),
        (["campaign", "run", "x", "--plan", "quick", "--over", "usb"], "--over is 'usb'; expected local"),
        (["campaign", "run", "x", "--plan", "quick", "--processor", "tpu"], "'tpu' is not one of"),
        (["campaign", "run", "x", "--plan", "quick", "--convolutions", "5"], "5 is not 0 or from 1000"),
        (["profile", "my-board"], "torchedge campaign run NAME --plan PLAN"),
    ],
)
def test_what_is_wrong_is_one_line(words, said, refused):
    assert said in refused(*words)


def test_out_that_is_a_file(campaign, tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert "--out" in refused(*campaign[:-1], str(tmp_path / "file"))


def test_python_that_is_not_there(campaign, capsys):
    assert main([*campaign, "--python", "/nowhere/python"]) == BAD_INPUT
    assert "/nowhere/python" in capsys.readouterr().err
    assert main([*campaign, "--python", sys.executable]) == 0
