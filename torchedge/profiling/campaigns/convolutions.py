"""Single convolutions measured beside a campaign's networks: what the device's library takes for workspaces.

FOLDER/convolutions.jsonl gets a row a convolution of FOLDER/shapes.jsonl, in its order; what is there stays.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.profiling.campaigns.convolution_shapes import SHAPES
from torchedge.profiling.campaigns.transports import Transport, explain
from torchedge.storage.documents import read_bytes

__all__ = ["CONVOLUTIONS", "LEAST", "PROBE", "measure_convolutions"]

PROBE, CONVOLUTIONS, LEFT = "convolution_probe.py", "convolutions.jsonl", "convolutions-left.jsonl"
LEAST, MOST = 1000, 200_000
"""So many convolutions are worth fitting, and so many are enough."""

MOST_BYTES, SHARE = 3.2e9, 1 / 8
"""A convolution's tensors take at most that, and at most that share of the device's memory."""

_MOST_FILE = 512 * 2**20
_FIELDS = ("inputs", "outputs", "groups", "kernel", "stride", "padding", "dilation", "size", "batch")


class Listener(Protocol):
    """Hears how it goes on, as that of a campaign."""

    def measuring(self, total: int, done: int) -> None:
        """Convolutions are being measured."""

    def doing(self, what: str) -> None:
        """Name what is under way."""

    def step(self) -> None:
        """One more is done."""


def measure_convolutions(
    folder: Path,
    count: int,
    seed: int,
    environment: Mapping[str, Any],
    transport: Transport,
    hooks: Sequence[Path],
    listener: Listener,
) -> None:
    """Measure what is left of so many convolutions near those of the folder's networks.

    hooks: the leash and the probe. A convolution at which the probe goes down gets a row with the reason, and
    is not tried again. Raises DeviceError where nothing can be measured, InputError for networks without
    convolutions, ProfileError where the folder cannot be used.
    """
    shapes = _shapes(folder, count, seed, environment)
    path = folder / CONVOLUTIONS
    known = _known(path)
    left = [shape for shape in shapes if _key(shape) not in known]
    if not left:
        return
    listener.measuring(len(shapes), len(shapes) - len(left))
    listener.doing("convolutions")
    try:
        with path.open("a") as out:
            while left:
                left = left[_attempt(left, out, folder, transport, hooks, listener) :]
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written ({error.strerror}); check the disk") from error


def _attempt(
    left: Sequence[Mapping[str, Any]],
    out: Any,  # noqa: ANN401 - a text file
    folder: Path,
    transport: Transport,
    hooks: Sequence[Path],
    listener: Listener,
) -> int:
    """Run the probe once; return how many of the convolutions have a row now."""
    (folder / LEFT).write_text("".join(json.dumps(shape) + "\n" for shape in left))
    transport.put([*hooks, folder / LEFT])
    done = 0
    with transport.start(PROBE, [f"/{LEFT}", "--repeats", "0"]) as run:
        for line in run.lines():
            row = _row_of(line)
            if row is not None and done < len(left) and _key(row) == _key(left[done]):
                done += 1
                _write(out, row)
                listener.step()
        status = run.wait()
    if done < len(left):  # not again: it may be what took the probe down
        _write(out, {**left[done], "reason": f"the probe ended here with status {status}"})
        listener.step()
        if not done:
            raise DeviceError(f"convolutions: the probe ended with status {status}: {explain(run.said)}")
    return done + 1


def _write(out: Any, row: Mapping[str, Any]) -> None:  # noqa: ANN401 - a text file
    out.write(json.dumps(row) + "\n")
    out.flush()


def _shapes(folder: Path, count: int, seed: int, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the convolutions to measure, drawn by a process of its own where the folder has too few."""
    path = folder / SHAPES
    if not path.exists() or read_bytes(path, max_bytes=_MOST_FILE).count(b"\n") < count:
        total = environment.get("memory_total_mib")
        room = total * 2**20 * SHARE if isinstance(total, (int, float)) else MOST_BYTES
        module = "torchedge.profiling.campaigns.convolution_shapes"
        arguments = [str(folder), str(count), str(seed), str(min(room, MOST_BYTES))]
        words = [sys.executable, "-m", module, *arguments]
        run = subprocess.run(words, capture_output=True, text=True, check=False)
        if '{"error": ' in run.stdout:
            told = json.loads(run.stdout[run.stdout.index('{"error": ') :])
            raise (InputError if told["input"] else ProfileError)(told["error"])
        if run.returncode:
            raise ProfileError(f"{path}: drawing it failed ({explain(run.stderr)})")
    lines = read_bytes(path, max_bytes=_MOST_FILE).decode("utf-8", "replace").splitlines()
    try:
        shapes: list[dict[str, Any]] = [json.loads(line) for line in lines[:count]]
        for shape in shapes:
            _key(shape)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProfileError(f"{path}: is damaged ({error}); delete it and run again") from error
    return shapes


def _known(path: Path) -> set[str]:
    """Return which convolutions have a row; a torn last line is cut off."""
    if not path.exists():
        return set()
    data = read_bytes(path, max_bytes=_MOST_FILE)
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    rows = [_row_of(line) for line in whole.decode("utf-8", "replace").splitlines()]
    return {_key(row) for row in rows if row is not None}


def _key(shape: Mapping[str, Any]) -> str:
    return json.dumps([shape[name] for name in _FIELDS])


def _row_of(line: str) -> dict[str, Any] | None:
    """Return a row the probe wrote; None for whatever else a login shell or a library printed."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        row: dict[str, Any] = json.loads(line)
        _key(row)
        if "reason" in row or "forward_workspace_mib" in row:
            return row
    return None
