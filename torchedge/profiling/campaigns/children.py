"""Work in a child process, so that its memory is freed at its end; progress of a campaign.

The parent needs no torch.

The child prints one JSON object a line: its progress, or {"error": message, "input": whether the user's
input is at fault}. `main` of a child's module calls `report_errors`, the parent `run_child`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchedge.errors import InputError, ProfileError, TorchedgeError


class Listener(Protocol):
    """Receives the progress of a campaign; a progress bar, for one."""

    def begin(self, label: str, total: int, done: int) -> None:
        """Networks are written as job lines, or points or convolutions are measured."""

    def doing(self, what: str) -> None:
        """Name the current network or point."""

    def step(self) -> None:
        """One more network or point is done."""

    def note(self, text: str) -> None:
        """Show a line to the user."""


def run_child(module: str, arguments: Sequence[str], listen: Callable[[dict[str, Any]], object]) -> None:
    """Run `python -m module arguments`; call `listen` with each object that it prints.

    Raises the child's error as InputError or ProfileError, and ProfileError where the child is killed.
    """
    words = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stdout:
                row = json.loads(line)
                if "error" in row:
                    raise (InputError if row["input"] else ProfileError)(row["error"])
                listen(row)
            errors = process.stderr.read().strip().splitlines()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ProfileError(
            f"preparing the campaign ended with status {process.returncode} "
            f"({errors[-1][:200] if errors else 'killed'}); run the same command again"
        )


def report_errors(work: Callable[[], object], folder: str) -> int:
    """Do a child's work; print an error as JSON. Returns the exit status 0."""
    try:
        work()
    except (TorchedgeError, OSError) as error:
        message = f"{folder}: {error.strerror}; check the disk" if isinstance(error, OSError) else str(error)
        print(json.dumps({"error": message, "input": isinstance(error, InputError)}), flush=True)
    return 0
