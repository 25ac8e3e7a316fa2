"""Commands in a process of their own, whose end by a signal or a hang is one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchedge.errors import OpenCLError
from torchedge.opencl.foreign_caches import pocl_cache


def run_isolated(words: Sequence[str], seconds: float) -> int:
    """Run the `torchedge` command with these arguments in a child process, and return its exit status.

    Raises:
        OpenCLError: a signal ended the child, or it ran for longer than `seconds` and was ended.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sys.stdout.flush()
    child = subprocess.Popen(
        [sys.executable, "-m", "torchedge", *words], env=environment, start_new_session=True
    )
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        raise OpenCLError(
            f"the run took longer than {seconds:g} s and was ended: a kernel or the driver did not return; "
            "pass a larger --time-limit if it only needs more time"
        ) from None
    finally:
        _end(child)
    if status < 0:
        raise OpenCLError(
            f"signal {-status} ({signal.strsignal(-status)}) ended the run: the OpenCL driver or a kernel "
            f"failed; if other bundles fail, too, empty the driver's cache (PoCL's is {pocl_cache()})"
        )
    return status


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child with all its processes."""
    if child.poll() is None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
        child.wait()
