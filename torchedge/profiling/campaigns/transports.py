"""Ways to a device: this machine, ssh, adb. Each puts files there and runs a command whose lines it streams.

The command runs under `hooks/leash.py`: when the controller or the connection is gone, so is the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from torchedge.errors import DeviceError, InputError
from torchedge.storage.documents import parse_json, writing

FORMS = "local, ssh://[user@]host[:port], adb or adb:SERIAL"
CONNECT_SECONDS, PUT_SECONDS = 15, 600
LONGEST_LINE = 1 << 24
_KEPT_LINES = 20
_HOST = re.compile(
    r"(?:([A-Za-z0-9_][A-Za-z0-9_.-]*)@)?([A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?"
)
_SERIAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")


class Run:
    """A command under way: iterate over its lines of output, then call `wait`. Leaving the block kills it."""

    def __init__(self, words: Sequence[str]) -> None:
        # Standard input stays open for as long as the command may run: it is the leash.
        self._process = subprocess.Popen(
            list(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line[:1000].decode("utf-8", "replace").strip()
            if text:
                self._errors.append(text)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def lines(self) -> Iterator[str]:
        """Yield the lines the command writes to standard output, until it ends; over-long ones are cut."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(LONGEST_LINE):
            yield line.decode("utf-8", "replace")

    def wait(self) -> int:
        """Return the command's exit status."""
        status = self._process.wait()
        self._reader.join(5)
        return status

    @property
    def last_error(self) -> str:
        """The last line on standard error, "" where there is none."""
        return self._errors[-1] if self._errors else ""

    def error_with(self, text: str) -> str:
        """The last line on standard error with a text, "" where none does."""
        return next((line for line in reversed(self._errors) if text in line), "")

    def kill(self) -> None:
        """End the command, first by closing its standard input."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def row_of(line: str, is_row: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Return a row of a probe; None for other output, of a login shell or a library.

    Raises ProfileError for a row with a figure that is not finite.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and is_row(row):
            return parse_json("a row of the probe", line.encode())
    return None


class Transport(ABC):
    """A way to a device; `python` is the interpreter there."""

    def __init__(self, python: str) -> None:
        self.python = python

    @abstractmethod
    def put(self, files: Sequence[Path]) -> None:
        """Copy files into the folder of torchedge on the device; DeviceError where that fails."""

    @abstractmethod
    def start(self, script: str, arguments: Sequence[str]) -> Run:
        """Run a Python script among the files put there; words with a "/" in front name files there."""

    def _command(self, folder: str, script: str, arguments: Sequence[str]) -> list[str]:
        def there(word: str) -> str:
            return str(PurePosixPath(folder) / word[1:]) if word.startswith("/") else word

        leash = [self.python, "-u", there("/leash.py"), there("/leash.lock")]
        return [*leash, self.python, "-u", there(f"/{script}"), *map(there, arguments)]


class LocalTransport(Transport):
    """This machine; files are copied to a folder of the campaign."""

    def __init__(self, python: str, folder: Path) -> None:
        super().__init__(python)
        self.folder = folder

    def put(self, files: Sequence[Path]) -> None:
        """Copy files into the campaign's folder for this machine."""
        with writing(self.folder, "choose another folder with --out", DeviceError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copyfile(file, self.folder / file.name)

    def start(self, script: str, arguments: Sequence[str]) -> Run:
        """Run a script with the interpreter given, this one by default."""
        try:
            return Run(self._command(str(self.folder.absolute()), script, arguments))
        except OSError as error:
            raise DeviceError(
                f"{self.python} cannot be run ({error.strerror}); expected a Python: correct --python"
            ) from error


class RemoteTransport(Transport):
    """A device behind a program whose command line ends in a line for the shell there.

    program: its name, and the next step without it. words: the command line up to that line. folder: of
    torchedge there.
    """

    def __init__(
        self, name: str, program: tuple[str, str], words: Sequence[str], folder: str, python: str
    ) -> None:
        super().__init__(python.removeprefix("~/"))  # shells there start in the home folder
        self.name, self.program, self.folder = name, program[0], folder
        self._words = (self.program, *words)
        if shutil.which(self.program) is None:
            raise DeviceError(f"{name}: {self.program} is not on PATH; {program[1]}")

    def words(self, line: str) -> list[str]:
        """Return the command that runs one shell line on the device."""
        return [*self._words, line]

    def put(self, files: Sequence[Path]) -> None:
        """Copy files over standard input of a shell there: no second program is needed."""
        folder = shlex.quote(self.folder)
        self._run(f"mkdir -p {folder} && echo ready", None)
        for file in files:
            target = f"{folder}/{shlex.quote(file.name)}"
            self._run(f"cat > {target}.part && mv {target}.part {target}", file)

    def _run(self, line: str, source: Path | None) -> None:
        try:
            with open(source or os.devnull, "rb") as file:
                done = subprocess.run(
                    self.words(line), stdin=file, capture_output=True, timeout=PUT_SECONDS, check=False
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(
                f"{self.name}: {self.program} failed ({error}); check the connection"
            ) from error
        if done.returncode:
            raise DeviceError(f"{self.name}: {explain(done.stderr.decode('utf-8', 'replace'))}")

    def start(self, script: str, arguments: Sequence[str]) -> Run:
        """Run a script there; the connection is its leash."""
        return Run(self.words(shlex.join(self._command(self.folder, script, arguments))))


def ssh_transport(address: str, python: str) -> RemoteTransport:
    """Return the way to a machine that ssh reaches without a password; a lost connection is noticed."""
    match = _HOST.fullmatch(address)
    if match is None or int(match[3] or 1) not in range(1, 65536):
        raise InputError(f"ssh://{address[:80]} is no address; expected ssh://[user@]host[:port]")
    user, host, port = match.groups()
    words = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    words += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", *(["-p", port] if port else ())]
    words += ["--", f"{user}@{host.strip('[]')}" if user else host.strip("[]")]
    return RemoteTransport(
        f"ssh://{address}", ("ssh", "install an OpenSSH client"), words, ".torchedge", python
    )


def adb_transport(serial: str, python: str) -> RemoteTransport:
    """Return the way to a device that adb lists, with a Python its shell may run."""
    if serial and not _SERIAL.fullmatch(serial):
        raise InputError(f"adb:{serial[:80]} is no serial; expected adb, or adb:SERIAL from `adb devices`")
    words = [*(["-s", serial] if serial else ()), "shell", "-T"]
    program = "adb", "install Android's platform tools"
    name = f"adb:{serial}" if serial else "adb"
    return RemoteTransport(name, program, words, "/data/local/tmp/torchedge", python)


def open_transport(over: str, python: str | None, folder: Path) -> Transport:
    """Return the way to a device that `--over` names; `folder` is the campaign's own, for this machine.

    Raises InputError for another form and DeviceError where ssh or adb is not installed.
    """
    if over == "local":
        return LocalTransport(python or sys.executable, folder)
    if over.startswith("ssh://"):
        return ssh_transport(over[len("ssh://") :].rstrip("/"), python or "python3")
    if over == "adb" or over.startswith("adb:"):
        return adb_transport(over[len("adb:") :], python or "python3")
    raise InputError(f"--over is {over!r}; expected {FORMS}")


def explain(errors: str) -> str:
    """Return the last line a program wrote, and the next step."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no message"]
    hints = {
        "Permission denied": "allow this machine's key there (ssh-copy-id), since no password can be asked",
        "Host key verification": "connect once by hand and accept the host's key",
        "Could not resolve": "check the host's name",
        "Connection refused": "check that the device runs an ssh server, and its port",
        "timed out": "check that the device is on and reachable",
        "No route to host": "check that the device is on and reachable",
        "no devices": "connect the device, switch on USB debugging and accept this computer on it",
        "unauthorized": "accept this computer on the device's screen",
        "more than one device": "name one with --over adb:SERIAL (`adb devices` lists them)",
        "not found": "check `adb devices`, or the path given by --python",
        "another run is measuring": "wait for it to end",
        "cannot start cuda": "use --processor cpu, or a PyTorch with CUDA there",
        "No space left": "make room on the device",
    }
    hint = next((step for word, step in hints.items() if word in errors), "try the same by hand")
    return f"{lines[-1][:200]}; {hint}"
