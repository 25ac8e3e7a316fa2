"""Ways to a device: this machine, ssh, adb. Each puts files there and runs a command whose lines it streams.

A command ends when the controller or the connection is gone: a Python script by `hooks/leash.py`, a program,
on a device without Python, by the shell that starts it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from torchedge.errors import DeviceError, InputError
from torchedge.storage.documents import file_sha256, parse_json, writing

FORMS = "local, ssh://[user@]host[:port], adb or adb:SERIAL"
CONNECT_SECONDS, PUT_SECONDS = 15, 600
LONGEST_LINE = 1 << 24
MAX_FILE_BYTES = 1 << 40
_KEPT_LINES = 20
_SMALL_BYTES = 1 << 18
KILLED = (137, -9)
SIGNALS = (*range(129, 255), *range(-64, 0))
"""Exit statuses of a program that a signal ended; 255 is that of a lost connection."""

_SHA256 = "digest() { if command -v sha256sum > /dev/null; then sha256sum; else shasum -a 256; fi; }; "
_HASHES = 'while IFS= read -r f; do if [ -f "$f" ]; then digest < "$f"; else echo none; fi; done'
_LEASHED = (  # background commands of a shell get no standard input: it is kept as descriptor 3
    "exec 3<&0; {} < /dev/null 3<&- & child=$!; "
    "(cat; kill -9 $child) <&3 > /dev/null 2>&1 & leash=$!; "
    "wait $child; status=$?; kill -9 $leash; exit $status"
)
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
    """A way to a device; `python` is the interpreter there, `folder` that of torchedge."""

    def __init__(self, name: str, program: str, folder: str, python: str) -> None:
        self.name, self.program, self.folder, self.python = name, program, folder, python

    @abstractmethod
    def words(self, line: str) -> list[str]:
        """Return the command that runs one line of a shell on the device."""

    @abstractmethod
    def put(self, files: Sequence[Path]) -> None:
        """Copy files into the folder of torchedge on the device; DeviceError where that fails."""

    @abstractmethod
    def start(self, script: str, arguments: Sequence[str]) -> Run:
        """Run a Python script among the files put there; words with a "/" in front name files there."""

    def place(self, name: str) -> str:
        """Return the path on the device of a name in the folder of torchedge."""
        return str(PurePosixPath(self.folder) / name)

    def push(self, files: Mapping[str, Path]) -> list[str]:
        """Copy files to names in the folder on the device; return those whose SHA-256 differed there.

        A file gets its name after the device computed its SHA-256: a connection that breaks leaves no part of
        a file under its name.

        Raises:
            InputError: a name has a line break.
            DeviceError: the device cannot be reached, or has no room.
        """
        if broken := [name for name in files if not name.isprintable()]:
            raise InputError(f"{broken[0]!r} cannot be copied to a device; rename it, without line breaks")
        own = shlex.quote(self.folder)
        listing = "".join(f"{name}\n" for name in files).encode()
        hashes = self._run(f"{_SHA256} mkdir -p {own} && cd {own} && {_HASHES}", listing)
        there = hashes.decode("ascii", "replace").splitlines()
        if len(there) != len(files):
            raise DeviceError(f"{self.name}: gave {len(there)} hashes of {len(files)} files; try again")
        digests = {name: file_sha256(source, max_bytes=MAX_FILE_BYTES) for name, source in files.items()}
        pushed = [
            name for name, line in zip(files, there, strict=True) if line.split()[:1] != [digests[name]]
        ]
        small = [name for name in pushed if files[name].stat().st_size <= _SMALL_BYTES]
        if len(small) > 1:  # a start of adb takes longer than to copy a kernel
            self._push_small({name: files[name] for name in small}, digests)
        for name in pushed:
            if len(small) < 2 or name not in small:
                self._push_one(PurePosixPath(self.place(name)), files[name], digests[name])
        return pushed

    def _push_small(self, files: Mapping[str, Path], digests: Mapping[str, str]) -> None:
        """Copy small files together."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name, source in files.items():
                data = source.read_bytes()
                entry = tarfile.TarInfo(f"{name}.part")
                entry.size, entry.mode = len(data), 0o700
                tar.addfile(entry, io.BytesIO(data))
        own = shlex.quote(self.folder)
        self._run(f"cd {own} && tar -xf -", archive.getvalue())
        listing = "".join(f"{digests[name]} {name}\n" for name in files).encode()
        self._run(
            f'{_SHA256} cd {own} && while read -r d f; do case $(digest < "$f.part") in '
            '"$d"*) mv -f "$f.part" "$f";; *) echo "the copy of $f is damaged" >&2; exit 9;; esac; done',
            listing,
        )

    def _push_one(self, path: PurePosixPath, source: Path, digest: str) -> None:
        folder, target, part = (shlex.quote(text) for text in (str(path.parent), str(path), f"{path}.part"))
        self._run(
            f"{_SHA256} mkdir -p {folder} && cat > {part} && "
            f"case $(digest < {part}) in {digest}*) chmod 700 {part} && mv -f {part} {target};; "
            f"*) echo 'the copy is damaged' >&2; false;; esac || {{ rm -f {part}; exit 9; }}",
            source,
        )

    def pull(self, name: str, target: Path) -> None:
        """Copy a file in the folder on the device to this machine, whole or not at all."""
        there, part = shlex.quote(self.place(name)), target.with_name(f"{target.name}.part")
        digest = self._run(f"{_SHA256} digest < {there}").decode("ascii", "replace").split()[:1]
        try:
            with writing(part, "choose another folder"), open(part, "wb") as file:
                self._run(f"cat {there}", output=file)
            if digest != [file_sha256(part, max_bytes=MAX_FILE_BYTES)]:
                raise DeviceError(f"{self.name}: the copy of {name} is damaged; run the command again")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    def ask(self, line: str) -> str:
        """Return what a line of a shell there prints; DeviceError where it fails."""
        return self._run(line).decode("utf-8", "replace")

    def remove(self, name: str) -> None:
        """Remove a folder within that of torchedge on the device."""
        self._run(f"rm -rf {shlex.quote(self.place(name))}")

    def start_program(self, name: str, arguments: Sequence[str]) -> Run:
        """Run a program that was pushed; it ends when the connection or this process does."""
        line = shlex.join([self.place(name), *arguments])
        return Run(self.words(_LEASHED.replace("{}", line)))

    def _run(
        self, line: str, source: Path | bytes | None = None, output: IO[bytes] | int = subprocess.PIPE
    ) -> bytes:
        """Run a line of a shell there, fed with a file or bytes; return its standard output."""
        given = source if isinstance(source, bytes) else None
        try:
            with open(source if isinstance(source, Path) else os.devnull, "rb") as file:
                done = subprocess.run(
                    self.words(line),
                    stdin=file if given is None else None, input=given,
                    stdout=output, stderr=subprocess.PIPE, timeout=PUT_SECONDS, check=False,
                )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(
                f"{self.name}: {self.program} failed ({error}); check the connection"
            ) from error
        if done.returncode:
            raise DeviceError(f"{self.name}: {explain(done.stderr.decode('utf-8', 'replace'))}")
        return bytes(done.stdout or b"")

    def _command(self, folder: str, script: str, arguments: Sequence[str]) -> list[str]:
        def there(word: str) -> str:
            return str(PurePosixPath(folder) / word[1:]) if word.startswith("/") else word

        leash = [self.python, "-u", there("/leash.py"), there("/leash.lock")]
        return [*leash, self.python, "-u", there(f"/{script}"), *map(there, arguments)]


class LocalTransport(Transport):
    """This machine; files are copied to a folder of the campaign."""

    def __init__(self, python: str, folder: Path) -> None:
        super().__init__("local", "sh", str(folder.absolute()), python)

    def words(self, line: str) -> list[str]:
        """Return the command that runs one line of a shell."""
        return ["sh", "-c", line]

    def put(self, files: Sequence[Path]) -> None:
        """Copy files into the campaign's folder for this machine."""
        with writing(self.folder, "choose another folder with --out", DeviceError):
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copyfile(file, self.place(file.name))

    def start(self, script: str, arguments: Sequence[str]) -> Run:
        """Run a script with the interpreter given, this one by default."""
        try:
            return Run(self._command(self.folder, script, arguments))
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
        super().__init__(name, program[0], folder, python.removeprefix("~/"))  # shells there start at home
        self._words = (self.program, *words)
        if shutil.which(self.program) is None:
            raise DeviceError(f"{name}: {self.program} is not on PATH; {program[1]}")

    def words(self, line: str) -> list[str]:
        """Return the command that runs one shell line on the device."""
        return [*self._words, line]

    def put(self, files: Sequence[Path]) -> None:
        """Copy files over standard input of a shell there: no second program is needed."""
        self.push({file.name: file for file in files})

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


def explain_end(status: int, error: str) -> str:
    """Return why a program on a device ended with an exit status, and the next step.

    error: its last line on standard error, which speaks for the connection where that failed.
    """
    if status == 2 and error.startswith("error: "):
        return error.removeprefix("error: ")
    if status in KILLED:
        return (
            "the system killed the program (exit status 137), as Android's low-memory killer does; close "
            "other apps, or export with a smaller --memory-limit or batch size"
        )
    if status in (126, 127):
        return f"the program cannot be run there ({error[:120]}); expected one built for it: correct --runner"
    if status in SIGNALS:
        number = -status if status < 0 else status - 128
        return f"signal {number} ended the program ({error[:120] or 'no message'}); try another --device"
    return explain(error)


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
        "device offline": "unplug the device and connect it again, or restart it (`adb reconnect`)",
        "insufficient permissions": "let this user open USB devices (udev rules), then `adb kill-server`",
        "cannot connect to daemon": "run `adb kill-server`, then `adb start-server`",
        "error: closed": "the connection was lost: connect the device again, then repeat the command",
        "is damaged": "repeat the command: what was copied whole stays",
        "not found": "check `adb devices`, or the path given by --python",
        "another run is measuring": "wait for it to end",
        "cannot start cuda": "use --processor cpu, or a PyTorch with CUDA there",
        "No space left": "make room on the device",
    }
    hint = next((step for word, step in hints.items() if word in errors), "try the same by hand")
    return f"{lines[-1][:200]}; {hint}"
