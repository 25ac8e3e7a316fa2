"""A phone behind the native runner: its profile and campaigns over the program that stands for adb."""

import csv
import json

import pytest
from profiling.campaigns.conftest import programs  # noqa: F401 - a fixture
from profiling.test_kernel_measuring import few

from torchedge.cli import main
from torchedge.devices import find_device
from torchedge.profiling import kernel_measuring, remote_loads
from torchedge.profiling.campaigns import exported
from torchedge.profiling.kernel_fitting import read_kernels
from torchedge.profiling.load_measuring import LoadedOperator

pytest.importorskip("pyopencl")

NETWORK = (
    '{name = "mobilenet_v2", label = "small", '
    "kwargs = {num_classes = 4, width_mult = 0.25, inverted_residual_setting = [[1, 8, 1, 1]]}}"
)
PLAN = "levels = [0]\ninfer_batch_sizes = [1, 2]\ninput_size = [3, 16, 16]\nnetworks = [" + NETWORK + "]\n"


@pytest.fixture
def home(native, programs, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path / "cache"))
    for name, value in native.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.setattr(exported, "MOST_STEPS", 5)
    return tmp_path


@pytest.fixture
def campaign(native, home, capsys):
    """Run a campaign on the phone; return its document, or the line of its error."""

    def call(*words, status=0, way="adb", runner=native.program):
        plan, out = home / "plan.toml", home / "data"
        own = ("--runner", str(runner), "--opencl", native.device, "--out", str(out), "--json")
        got = main(["campaign", "run", "phone", "--plan", str(plan), "--over", way, *own, *words])
        said, err = capsys.readouterr()
        assert got == status, err
        return json.loads(said) if not status else err.strip().splitlines()[-1]

    return call


@pytest.mark.slow
def test_points_run_as_bundles_and_a_second_start_has_nothing_left(campaign, home):
    document = campaign()
    assert (document["measured"], document["left"], document["failed"]) == (2, 0, {})
    rows = list(csv.DictReader((home / "data" / "measurements.csv").open()))
    assert [(row["mode"], row["batch_size"], row["fits"]) for row in rows] == [
        ("infer", "1", "1"),
        ("infer", "2", "1"),
    ]
    assert all(float(row["memory_mib"]) > float(row["allocated_mib"]) > 0 for row in rows)
    points = [json.loads(line) for line in (home / "data" / "launches.jsonl").read_text().splitlines()]
    assert all(launch[-1] > 0 for point in points for launch in point["launches"]["launches"])
    assert find_device(home / "data").figures["max_work_group_size"].value > 0
    before = (home / "data" / "rows.jsonl").read_text()
    assert campaign()["measured"] == 2
    assert (home / "data" / "rows.jsonl").read_text() == before
    runs = home / "home of the device" / "torchedge" / "runs"
    assert not list(runs.iterdir())


@pytest.mark.slow
def test_a_phone_that_is_unplugged_is_measured_further(campaign, home, monkeypatch):
    measured, lost = exported._measured, []

    def unplugged(*arguments):
        if not lost:
            lost.append(monkeypatch.setenv("FAKE_PHONES", "{}"))
        return measured(*arguments)

    def plugged(_):
        monkeypatch.delenv("FAKE_PHONES", raising=False)

    monkeypatch.setattr(exported, "_measured", unplugged)
    monkeypatch.setattr("torchedge.profiling.campaigns.running.time.sleep", plugged)
    assert campaign()["measured"] == 2
    kinds = [json.loads(line)["row"] for line in (home / "data" / "rows.jsonl").read_text().splitlines()]
    assert kinds.count("lost") == 1 and kinds.count("environment") == 2


@pytest.mark.parametrize(
    ("phones", "why"),
    [
        ({}, "no devices/emulators found; connect the device"),
        ({"a": "device", "b": "device"}, "more than one device/emulator; name one with --over adb:SERIAL"),
        ({"a": "unauthorized"}, "accept this computer on the device's screen"),
        ({"a": "offline"}, "device offline; unplug the device"),
    ],
)
def test_a_phone_that_does_not_answer_is_one_line(campaign, home, monkeypatch, phones, why):
    monkeypatch.setenv("FAKE_PHONES", json.dumps(phones))
    assert why in campaign(status=2)


@pytest.mark.slow
def test_a_runner_for_another_processor_is_one_line(campaign, home):
    other = home / "other-runner"
    other.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(100))
    line = campaign(runner=other, status=2)
    assert "expected one built for it: correct --runner" in line


@pytest.mark.slow
def test_a_full_phone_is_one_line(campaign, monkeypatch):
    monkeypatch.setenv("FAKE_FAULT", "full")
    assert "No space left on device; make room on the device" in campaign(status=2)


@pytest.mark.slow
def test_the_profile_of_a_phone_in_one_command(native, home, monkeypatch, capsys):
    def brief(traits, quick=False):
        return (case for case in few(traits) if case.benchmark != "waves")

    monkeypatch.setattr(kernel_measuring, "cases", brief)
    monkeypatch.setattr(kernel_measuring, "_LAUNCHES", 5)
    monkeypatch.setattr("torchedge.profiling.kernel_cases.cases", brief)
    words = ["profile", "phone", "--over", "adb", "--runner", str(native.program), "--device", native.device]
    assert main([*words, "--kernels", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "campaign run phone" in document["next"]
    table = read_kernels(home / "home" / "kernels" / "phone.jsonl")
    assert len(table.passes[1]) == len(table.passes[2]) == len(list(brief(table.traits)))
    profile = find_device("phone")
    assert profile.figures["peak_fp32_gflops"].value > 0 and "kernels" in profile.profile


@pytest.mark.slow
def test_loads_and_the_disk_of_a_phone(native, home, monkeypatch):
    from torch import nn

    from torchedge.profiling.campaigns.transports import open_transport
    from torchedge.profiling.load_measuring import loads_measured
    from torchedge.profiling.remote_devices import ask_device, describe_there
    from torchedge.profiling.remote_loads import RemoteLoads
    from torchedge.profiling.remote_runs import RemoteRunner

    case = LoadedOperator("gelu", (8, 1024), nn.GELU, ((8, 1024),))
    monkeypatch.setattr(remote_loads.load_measuring, "cases", lambda quick: [case])
    monkeypatch.setattr(remote_loads, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(remote_loads, "_COPIES", (1 << 16,))
    out = home / "loads.jsonl"
    with RemoteRunner(open_transport("adb", None, home), native.program, native.device) as remote:
        there = ask_device(remote)
        device = describe_there(home / "phone", "phone", there, "command")
        loads = RemoteLoads(remote, there, device, 1 << 20)
        for new in (4, 0):
            assert loads_measured(out, loads.environment("command", True), loads.tasks(True), str) == new
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("row") or row["kernel"] for row in rows] == [
        "environment",
        "gelu",
        "copy",
        "disk",
        "launch",
    ]
    assert rows[1]["class"] == "elemental" and rows[1]["loads"][0][0] == 0 and len(rows[1]["loads"]) > 1
    assert rows[3]["bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["phone", "--over", "adb"], "--runner is missing"),
        (["phone", "--runner", "x"], "--over is missing"),
        (["--over", "adb", "--runner", "x"], "expected a name of its own"),
        (
            ["phone", "--over", "adb", "--runner", "x", "--out", "y"],
            "without one of --kernels and --streaming",
        ),
        (["phone", "--over", "adb", "--runner", "nowhere"], "nowhere: is no file"),
    ],
)
def test_options_that_do_not_go_together(programs, monkeypatch, tmp_path, capsys, words, why):  # noqa: F811
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))
    assert main(["profile", *words]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("torchedge: error") == 1
