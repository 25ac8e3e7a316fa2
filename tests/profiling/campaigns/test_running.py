"""A campaign ends with the same table however often it is killed, and says why where it cannot go on."""

import contextlib
import csv
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from oracles import fake_campaigns
from oracles.fake_campaigns import Silent, plan_of, prepare, run_fake

from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.profiling.campaigns.plans import parse_plan
from torchedge.profiling.campaigns.recording import CampaignJournal

KILLS = 20


def start(folder: Path, networks: int) -> "subprocess.Popen[bytes]":
    words = [sys.executable, fake_campaigns.__file__, str(folder), str(networks)]
    path = os.pathsep.join([str(Path(fake_campaigns.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "FAKE_SECONDS": "0.003", "PYTHONPATH": path}
    return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def follow(journal: Path, controller: "subprocess.Popen[bytes]", rows: int) -> None:
    """Return once the controller has written so many bytes of rows, or has ended."""
    before = journal.stat().st_size if journal.exists() else 0
    while controller.poll() is None and (not journal.exists() or journal.stat().st_size < before + 90 * rows):
        time.sleep(0.001)


def tables(folder: Path) -> dict[str, bytes]:
    names = ("measurements.csv", "networks.jsonl", "layers.jsonl", "environment.json")
    return {name: (folder / name).read_bytes() for name in names}


def rows_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(tmp_path):
    networks = 4
    plan = plan_of(networks=networks, batches=range(1, 26))
    for name in ("killed", "whole"):
        prepare(tmp_path / name, plan)
    run_fake(tmp_path / "whole", plan)
    moments = random.Random(20)
    for number in range(KILLS):
        with start(tmp_path / "killed", networks) as controller:
            if number % 4:
                follow(tmp_path / "killed" / "rows.jsonl", controller, rows=moments.randint(1, 20))
            with contextlib.suppress(subprocess.TimeoutExpired):
                controller.wait(timeout=moments.uniform(0, 0.01 if number % 4 else 0.4))
            controller.kill()
    with start(tmp_path / "killed", networks) as controller:
        _, said = controller.communicate()
    assert controller.returncode == 0, said.decode()
    assert tables(tmp_path / "killed") == tables(tmp_path / "whole")
    rows = rows_of(tmp_path / "killed")
    begun, done = ([r for r in rows if r["row"] == kind] for kind in ("start", "point"))
    assert len(done) == len(list(plan.items())) * 26  # none measured twice
    assert 0 < len(begun) - len(done) <= KILLS  # a kill loses the point under way and nothing else


def test_table_and_summary(tmp_path):
    plan = plan_of(networks=2, batches=(1, 13, 256))
    prepare(tmp_path, plan, skipped=("net1-random-50",))
    listener = Silent()
    summary = run_fake(tmp_path, plan, listener)
    assert (summary.points, summary.measured, summary.out_of_memory, summary.left) == (12, 6, 3, 0)
    assert summary.skipped == {"net1-random-50": "cannot be pruned"}
    assert set(summary.failed) == {f"{n} train 13" for n in ("net0-0", "net0-random-50", "net1-0")}
    assert listener.steps == 12 and listener.begun == [("measuring", 12, 0)]
    with (tmp_path / "measurements.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    expected = [
        (item.id, mode, str(batch))
        for item in plan.items()
        if item.id != "net1-random-50"
        for mode, batch in item.network.points
    ]
    assert [(r["id"], r["mode"], r["batch_size"]) for r in table] == expected
    assert [r["fits"] for r in table[:4]] == ["1", "1", "", "0"]
    assert table[3]["memory_mib"] == "" and table[3]["reason"] == "out of memory"
    assert [json.loads(x)["id"] for x in (tmp_path / "skipped.jsonl").read_text().splitlines()] == [
        "net1-random-50"
    ]
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["machine"] == "board"


def test_nothing_left_needs_no_device(tmp_path):
    plan = plan_of()
    prepare(tmp_path, plan)
    run_fake(tmp_path, plan)
    before = tables(tmp_path)
    listener = Silent()
    assert run_fake(tmp_path, plan, listener).left == 0
    assert listener.begun == [] and tables(tmp_path) == before


def test_point_that_takes_the_device_down_is_recorded_after_the_second_time(tmp_path, monkeypatch):
    plan = plan_of(networks=2)
    prepare(tmp_path, plan)
    monkeypatch.setenv("FAKE_DIES_AT", "net0-0 train 2")
    listener = Silent()
    summary = run_fake(tmp_path, plan, listener)
    assert list(summary.failed) == ["net0-0 train 2"] and summary.left == 0
    assert len(listener.notes) == 3 and "137" in listener.notes[1]
    assert [row["row"] for row in rows_of(tmp_path)].count("lost") == 2
    monkeypatch.delenv("FAKE_DIES_AT")
    assert list(run_fake(tmp_path, plan).failed) == ["net0-0 train 2"]
    assert not run_fake(tmp_path, plan, retry=("failed",)).failed


def test_unsteady_points_are_measured_again(tmp_path, monkeypatch):
    plan = plan_of(networks=1, batches=(1, 256))
    prepare(tmp_path, plan)
    monkeypatch.setenv("FAKE_SPREAD", "1.6")
    assert run_fake(tmp_path, plan).unsteady == 6
    monkeypatch.setenv("FAKE_SPREAD", "1.4")
    assert run_fake(tmp_path, plan).unsteady == 6
    summary = run_fake(tmp_path, plan, retry=("failed", "unsteady"))
    assert summary.unsteady == 0 and summary.measured == 4 and summary.left == 0


def test_another_machine_is_refused(tmp_path, monkeypatch):
    plan = plan_of(networks=2)
    prepare(tmp_path, plan)
    monkeypatch.setenv("FAKE_DIES_AT", "net0-0 train 2")
    with pytest.raises(DeviceError):
        run_fake(tmp_path, plan, pauses=(0.0,))
    monkeypatch.delenv("FAKE_DIES_AT")
    monkeypatch.setenv("FAKE_MACHINE", "other")
    with pytest.raises(DeviceError, match=r"device_name was board and is other.*--out"):
        run_fake(tmp_path, plan)
    monkeypatch.delenv("FAKE_MACHINE")
    assert run_fake(tmp_path, plan).left == 0


def test_another_plan_or_device_is_refused(tmp_path):
    prepare(tmp_path, plan_of(networks=2))
    run_fake(tmp_path, plan_of(networks=2))
    with pytest.raises(InputError, match=r"seed is 1, and .*plan\.toml has 0.*--out"):
        run_fake(tmp_path, parse_plan("other", "seed = 1\n" + plan_of(networks=2).text))
    with pytest.raises(InputError, match="measurements of board"):
        run_fake(tmp_path, plan_of(networks=2), device="other")


def test_a_larger_plan_keeps_what_was_measured(tmp_path):
    first, larger = plan_of(networks=2), plan_of(networks=3, batches=(1, 2, 4, 256))
    prepare(tmp_path, first)
    run_fake(tmp_path, first)
    before = rows_of(tmp_path)
    prepare(tmp_path, first.joined(larger))  # nobody has to build them
    listener = Silent()
    summary = run_fake(tmp_path, larger, listener)
    assert (summary.points, summary.left) == (len(larger.points(())), 0)
    assert listener.begun == [("measuring", summary.points, len(first.points(())))]
    assert rows_of(tmp_path)[: len(before)] == before
    assert run_fake(tmp_path, first).points == summary.points  # a smaller one takes nothing away


def test_two_controllers_at_once_are_refused(tmp_path):
    plan = plan_of(networks=1)
    prepare(tmp_path, plan)
    with CampaignJournal(tmp_path), pytest.raises(ProfileError, match="another torchedge is writing"):
        run_fake(tmp_path, plan)


def test_interrupted_is_not_the_points_fault(tmp_path, monkeypatch):
    plan = plan_of(networks=1)
    prepare(tmp_path, plan)

    class Impatient(Silent):
        def doing(self, what):
            if what.endswith("train 2"):
                raise KeyboardInterrupt

    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            run_fake(tmp_path, plan, Impatient())
    assert (tmp_path / "measurements.csv").exists()
    assert not run_fake(tmp_path, plan).failed


def test_probe_without_pytorch(tmp_path, monkeypatch):
    plan = plan_of(networks=1)
    prepare(tmp_path, plan)
    probe = tmp_path / "probe.py"
    probe.write_text("import torch_that_is_not_there\n")
    monkeypatch.setattr(fake_campaigns, "PROBE", probe)
    with pytest.raises(DeviceError, match=r"has no PyTorch.*--python"):
        run_fake(tmp_path, plan)


def test_full_disk_is_one_line(tmp_path, monkeypatch):
    plan = plan_of(networks=1)
    prepare(tmp_path, plan)
    kept = os.fsync

    def full(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match="No space left on device"):
        run_fake(tmp_path, plan)
    monkeypatch.setattr(os, "fsync", kept)
    assert run_fake(tmp_path, plan).left == 0
