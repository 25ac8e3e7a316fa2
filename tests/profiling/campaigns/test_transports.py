"""Each transport puts files, runs a command, streams it; addresses smuggle in no options or shell words."""

import json
import os
import re
import shlex
import sys

import pytest
from oracles.fake_campaigns import PROBE, Silent, plan_of, prepare, run_fake

from torchedge.errors import DeviceError, InputError
from torchedge.profiling.campaigns.running import Campaign, run_campaign
from torchedge.profiling.campaigns.transports import (
    LocalTransport,
    explain_end,
    open_transport,
    ssh_transport,
)
from torchedge.storage import data_folder

LEASH = data_folder("hooks") / "leash.py"


@pytest.fixture(params=["local", "ssh://me@board:2222", "adb", "adb:ABC123"])
def transport(request, programs, tmp_path):
    return open_transport(request.param, sys.executable, tmp_path / "device")


def write(path, text):
    path.write_text(text)
    return path


def test_puts_runs_and_streams(transport, tmp_path):
    script = write(
        tmp_path / "script.py",
        "import sys\nprint('one')\nprint(sys.argv[1:], open(sys.argv[1]).read())\n"
        "sys.stderr.write('a word\\n')\nsys.exit(3)",
    )
    note = write(tmp_path / "it's a note.txt", "Γ; rm -rf $HOME")
    transport.put([LEASH, script, note])
    with transport.start("script.py", [f"/{note.name}", "$(echo no); `no`"]) as run:
        lines = list(run.lines())
        assert run.wait() == 3
    assert lines[0] == "one\n" and "Γ; rm -rf $HOME" in lines[1] and "$(echo no); `no`" in lines[1]
    assert run.last_error == "a word"


@pytest.mark.sampled(1)
def test_leaving_kills_what_runs_there(transport, tmp_path):
    beat = tmp_path / "beat"
    script = write(
        tmp_path / "script.py",
        f"import os, subprocess, sys, time\nprint(os.getpid(), flush=True)\n"
        f"subprocess.Popen(['sleep', '300'])\nopen({str(beat)!r}, 'w').close()\ntime.sleep(300)",
    )
    transport.put([LEASH, script])
    with transport.start("script.py", []) as run:
        process = int(next(run.lines()))
        os.kill(process, 0)
    # The leash ends only when its command is dead: a second run takes the lock at once.
    transport.put([LEASH, write(tmp_path / "next.py", "print('next')")])
    with transport.start("next.py", []) as run:
        assert list(run.lines()) == ["next\n"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", ["ssh://board", "adb"])
def test_a_campaign_over_it(over, programs, tmp_path):
    plan = plan_of(networks=2)
    prepare(tmp_path / "over", plan)
    campaign = Campaign(tmp_path / "over", plan, "board", over, "cpu", probe=PROBE)
    transport = open_transport(over, sys.executable, tmp_path)
    summary = run_campaign(campaign, transport, Silent())
    assert summary.left == 0 and summary.environment["arguments"] == ["--device", "cpu"]
    prepare(tmp_path / "here", plan)
    run_fake(tmp_path / "here", plan)
    assert (tmp_path / "over" / "measurements.csv").read_bytes() == (
        tmp_path / "here" / "measurements.csv"
    ).read_bytes()


def test_ssh_asks_no_questions_and_quotes(programs, tmp_path):
    transport = ssh_transport("me@board:2222", "~/my env/bin/python")
    words = transport.words(shlex.join(transport._command("folder", "script.py", ["/a b"])))
    assert words[:2] == ["ssh", "-T"] and words[-3:-1] == ["--", "me@board"]
    assert {"BatchMode=yes", "ServerAliveInterval=15"} <= set(words) and words[
        words.index("-p") + 1
    ] == "2222"
    assert "'my env/bin/python'" in words[-1] and "'folder/a b'" in words[-1]


def test_adb_names_its_device(programs, tmp_path):
    open_transport("adb:ABC123", sys.executable, tmp_path).put([])
    assert json.loads(programs.read_text())[:3] == ["-s", "ABC123", "shell"]


@pytest.mark.parametrize(
    "over",
    [
        "ssh://", "ssh://-oProxyCommand=x", "ssh://a@-b", "ssh://host:0", "ssh://host:99999", "ssh://a b",
        "ssh://host;reboot", "ssh://a@b@c", "adb:-x", "adb:a b", "adb:$(x)", "usb", "", "LOCAL", "ssh:host",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(over, programs, tmp_path):
    with pytest.raises(InputError, match="expected") as caught:
        open_transport(over, None, tmp_path)
    assert "\n" not in str(caught.value) and not programs.exists()


@pytest.mark.parametrize("address", ["board", "a.b-c_d@10.0.0.7", "me@[fe80::1]:22"])
def test_addresses(address, programs):
    assert ssh_transport(address, "python3").words("true")[-1] == "true"


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("me@board: Permission denied (publickey).", "ssh-copy-id"),
        ("ssh: connect to host board port 22: Connection refused", "runs an ssh server"),
        ("ssh: Could not resolve hostname board", "host's name"),
        ("Host key verification failed.", "accept the host's key"),
        ("adb: no devices/emulators found", "USB debugging"),
        ("adb: more than one device/emulator", "adb:SERIAL"),
        ("cat: write error: No space left on device", "make room"),
        ("adb: device offline", "adb reconnect"),
        ("something new", "by hand"),
    ],
)
def test_what_fails_says_what_to_do(said, step, programs, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_REFUSAL", said)
    with pytest.raises(DeviceError, match=step) as caught:
        open_transport("ssh://board", None, tmp_path).put([LEASH])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_missing_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="adb is not on PATH; install"):
        open_transport("adb", None, tmp_path)


ODD = ("-rf", 'it\'s $(touch here); `no` & "x"', "Γ and  blanks ", "*?")


@pytest.mark.sampled(1)
def test_pushes_what_changed_and_pulls(transport, tmp_path):
    files = {
        f"bundles/{name}/{k}": write(tmp_path / str(k), f"{name}\n" * 1000) for k, name in enumerate(ODD)
    }
    assert transport.push(files) == list(files)
    write(tmp_path / "2", "other")
    assert transport.push(files) == [f"bundles/{ODD[2]}/2"]
    for name, source in files.items():
        transport.pull(name, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("here"))
    with pytest.raises(InputError, match="rename it"):
        transport.push({"a\nb": tmp_path / "0"})
    transport.remove("bundles")
    with pytest.raises(DeviceError):
        transport.pull(f"bundles/{ODD[0]}/0", tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def program(path, text):
    write(path, f"#!/bin/sh\n{text}\n").chmod(0o700)
    return path


@pytest.mark.sampled(2)
def test_a_program_gets_its_words_and_ends_with_the_controller(transport, tmp_path):
    transport.push({"show": program(tmp_path / "show", 'printf "%s\\n" "$@"; echo a word >&2; exit 3')})
    with transport.start_program("show", ODD) as run:
        assert [line.rstrip("\n") for line in run.lines()] == list(ODD)
        assert run.wait() == 3 and run.last_error == "a word"
    transport.push({"hang": program(tmp_path / "hang", "echo $$; exec sleep 300")})
    with transport.start_program("hang", []) as run:
        process = int(next(run.lines()))
        os.kill(process, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("phones", "over", "step"),
    [
        ({}, "adb", "USB debugging"),
        ({"A": "device", "B": "device"}, "adb", "--over adb:SERIAL"),
        ({"A": "device"}, "adb:B", "`adb devices`"),
        ({"A": "unauthorized"}, "adb", "accept this computer on the device's screen"),
        ({"A": "offline", "B": "device"}, "adb:A", "adb reconnect"),
    ],
)
def test_phones_that_cannot_be_used(phones, over, step, programs, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PHONES", json.dumps(phones))
    with pytest.raises(DeviceError, match=step):
        open_transport(over, None, tmp_path).push({"leash.py": LEASH})


@pytest.mark.parametrize(("fault", "step"), [("cut", "the connection was lost"), ("full", "make room")])
def test_nothing_half_copied_counts(fault, step, programs, tmp_path, monkeypatch):
    transport = open_transport("adb", None, tmp_path)
    monkeypatch.setenv("FAKE_FAULT", fault)
    with pytest.raises(DeviceError, match=step):
        transport.push({"leash.py": LEASH})
    assert not [path for path in (tmp_path / "home of the device").rglob("*") if path.is_file()]
    monkeypatch.delenv("FAKE_FAULT")
    assert transport.push({"leash.py": LEASH}) == ["leash.py"] and transport.push({"leash.py": LEASH}) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kill -9 $$", "low-memory killer"),
        ("kill -11 $$", "signal 11"),
        ("echo 'error: no device; install a driver' >&2; exit 2", "^no device; install a driver$"),
    ],
)
def test_how_a_program_ends(text, why, programs, tmp_path):
    transport = open_transport("adb", None, tmp_path)
    transport.push({"run": program(tmp_path / "run", text)})
    with transport.start_program("run", []) as run:
        assert re.search(why, explain_end(run.wait(), run.last_error))


def test_a_program_of_another_processor(programs, tmp_path):
    transport = open_transport("adb", None, tmp_path)
    file = tmp_path / "run"
    file.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(64))
    transport.push({"run": file})
    with transport.start_program("run", []) as run:
        assert "correct --runner" in explain_end(run.wait(), run.last_error)


@pytest.mark.parametrize("over", ["local", "ssh://board"])
def test_missing_python(over, programs, tmp_path):
    plan = plan_of(networks=1)
    prepare(tmp_path / "campaign", plan)
    campaign = Campaign(tmp_path / "campaign", plan, "board", over, probe=PROBE)
    transport = open_transport(over, "/nowhere/python", tmp_path / "device")
    with pytest.raises(DeviceError, match="--python"):
        run_campaign(campaign, transport, Silent())


def test_unwritable_folder(tmp_path):
    write(tmp_path / "file", "")
    with pytest.raises(DeviceError, match="--out"):
        LocalTransport(sys.executable, tmp_path / "file").put([LEASH])
