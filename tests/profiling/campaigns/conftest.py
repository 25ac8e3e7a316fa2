"""Programs that stand for ssh and adb."""

import os
import shlex
import stat
import sys

import pytest
from oracles import fake_adb

SSH = f"""#!{sys.executable}
import json, os, subprocess, sys
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
refusal = os.environ.get("FAKE_REFUSAL")
if refusal:
    sys.exit(sys.stderr.write(refusal + "\\n") and 255)
os.makedirs(os.environ["FAKE_HOME"], exist_ok=True)
os.chdir(os.environ["FAKE_HOME"])
sys.exit(subprocess.call(["/bin/sh", "-c", sys.argv[-1]]))
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder on PATH with ssh and adb that run their line here, and a log of how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    adb = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(fake_adb.__file__)} "$@"\n'
    for name, text in (("ssh", SSH), ("adb", adb)):
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_HOME", str(tmp_path / "home of the device"))
    return tmp_path / "log"
