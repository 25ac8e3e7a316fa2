"""Python that tests run in a process of its own, which finds torchedge and what tests have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDERS = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
PATH = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])


def python(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with words and variables of its environment; it must end well."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": PATH, **variables},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
