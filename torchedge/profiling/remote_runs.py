"""Bundles run by the native runner on a device without Python, over a transport."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchedge.bundles.launch_bundles import write_launches
from torchedge.bundles.manifests import MANIFEST, Manifest
from torchedge.errors import DeviceError, InputError
from torchedge.lowering.programs import Program
from torchedge.profiling.campaigns.transports import KILLED, MAX_FILE_BYTES, SIGNALS, Transport, explain_end
from torchedge.storage.documents import parse_json
from torchedge.storage.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from torchedge.bundles.bundle import Bundle

RUNNER = "torchedge-run"
CACHE = "kernels"


class RunError(DeviceError):
    """A run ended on the device, which is still there; killed: by the system, for its memory."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """What came back from a device.

    outputs: of the last step, in the bundle's order. losses: of each step of a training. figures: as
    `torchedge-run --figures` prints them. pushed: names of the files that were copied.
    """

    outputs: tuple[npt.NDArray[Any], ...]
    losses: tuple[float, ...]
    figures: Mapping[str, Any]
    pushed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """What the runner printed: the loss of each step of a training, and its JSON document."""

    losses: tuple[float, ...]
    document: Mapping[str, Any]


@dataclass(frozen=True)
class RemoteRunner:
    """`torchedge-run`, built for a device, behind the way to it.

    device: a part of "PLATFORM DEVICE VENDOR" there; "": the first GPU, else the first device.
    Raises InputError: `program` is no file.
    """

    transport: Transport
    program: Path
    device: str = ""
    own: str = field(default_factory=lambda: f"runs/{secrets.token_hex(8)}")

    def __post_init__(self) -> None:
        if not self.program.is_file():
            raise InputError(
                f"{self.program}: is no file; expected torchedge-run, built for the device (docs/runner.md)"
            )

    def push(self, place: str, folder: Path, names: Iterable[str]) -> list[str]:
        """Copy the runner, and files of a bundle to a place there; return the names that differed."""
        files = {f"{place}/{name}": folder / name for name in names}
        return self.transport.push({RUNNER: self.program, **files})

    def run(
        self,
        place: str,
        manifest: Manifest,
        words: Sequence[str] = (),
        heard: Callable[[float], None] = lambda _: None,
    ) -> RunReport:
        """Run a bundle that lies at a place there to its end; `words`: more options.

        Raises:
            RunError: the runner refused, failed or was killed.
            DeviceError: the device cannot be reached, or does not start the runner.
        """
        command = [self.transport.place(place), "--sha256", manifest.sha256]
        command += ["--cache", self.transport.place(CACHE)]
        command += [*(("--device", self.device) if self.device else ()), *words]
        losses: list[float] = []
        document: list[str] = []
        with self.transport.start_program(RUNNER, command) as run:
            for line in run.lines():
                match line.split():
                    case ["step", _, "loss", value]:
                        with contextlib.suppress(ValueError):
                            losses.append(float(value))
                            heard(losses[-1])
                    case _ if document or line.startswith("{"):
                        document.append(line)
            status, error = run.wait(), run.last_error
        if status:
            message = f"{self.transport.name}: {explain_end(status, error)}"
            if (status == 2 and error.startswith("error: ")) or status in SIGNALS:
                raise RunError(message, killed=status in KILLED)
            raise DeviceError(message)
        return RunReport(
            tuple(losses), parse_json(f"figures of {self.transport.name}", "".join(document).encode())
        )

    def measure(
        self, folder: Path, manifest: Manifest, words: Sequence[str], *, inputs: Path | None = None
    ) -> Mapping[str, Any]:
        """Copy a bundle into this runner's own folder there, run it, and return its figures.

        A bundle replaces the one before: only files that differ are copied.
        """
        place = f"{self.own}/bundle"
        self.push(place, folder, (MANIFEST, *manifest.files))
        if inputs is not None:
            self.transport.push({f"{self.own}/{inputs.name}": inputs})
            words = [*words, "--inputs", self.transport.place(f"{self.own}/{inputs.name}")]
        return self.run(place, manifest, words).document

    def measure_program(
        self, program: Program, words: Sequence[str] = (), data: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> Mapping[str, Any]:
        """Run launches that belong to no model as a bundle of their own; return what the runner prints."""
        with scratch_bundle() as folder:
            return self.measure(folder, write_launches(folder, program, data), words)

    def close(self) -> None:
        """Remove this runner's own folder there, if the device can be reached."""
        with contextlib.suppress(DeviceError):
            self.transport.remove(self.own)

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_there(
    transport: Transport,
    runner: Path,
    bundle: Bundle,
    arrays: Sequence[npt.NDArray[Any]],
    *,
    steps: int = 1,
    settings: Mapping[str, float] | None = None,
    device: str = "",
    memory_limit: int | None = None,
    save: Path | None = None,
    heard: Callable[[float], None] = lambda _: None,
) -> RemoteRun:
    """Push the runner and a bundle, run steps on the same inputs, and pull outputs, figures and state.

    runner: `torchedge-run`, built for the device. device: a part of "PLATFORM DEVICE VENDOR" there.
    memory_limit: bytes; the runner refuses to allocate more. save: where the whole state is written, with
    which a training goes on there. heard: called with the loss of each step of a training.

    Raises:
        InputError: the runner is no file, or a file's name has a line break.
        DeviceError: the device cannot be reached, or the run failed there.
    """
    place, manifest = f"bundles/{bundle.path.name}", bundle.manifest
    remote = RemoteRunner(transport, runner, device)
    pushed = remote.push(place, bundle.path, (MANIFEST, *manifest.files))
    words = ["--steps", str(steps), "--figures"]
    words += ["--memory-limit", str(memory_limit)] if memory_limit is not None else []
    for name, value in (settings or {}).items():
        words += ["--set", f"{name}={value!r}"]
    with tempfile.TemporaryDirectory() as own, remote:
        there = remote.own
        inputs, outputs, state = (
            Path(own) / f"{kind}.safetensors" for kind in ("inputs", "outputs", "state")
        )
        write_tensors(inputs, {port.name: a for port, a in zip(bundle.inputs, arrays, strict=True)})
        transport.push({f"{there}/{inputs.name}": inputs})
        words += ["--inputs", transport.place(f"{there}/{inputs.name}")]
        words += ["--outputs", transport.place(f"{there}/{outputs.name}")]
        words += ["--save", transport.place(f"{there}/{state.name}")] if save is not None else []
        report = remote.run(place, manifest, words, heard)
        transport.pull(f"{there}/{outputs.name}", outputs)
        if save is not None:
            transport.pull(f"{there}/{state.name}", save)
        results, _ = read_tensors(outputs, max_bytes=MAX_FILE_BYTES, finite=False)
        last = [results.get(f"{steps - 1}.{port.name}") for port in bundle.outputs]
        for port, array in zip(bundle.outputs, last, strict=True):
            if array is None or array.shape != tuple(port.shape) or array.dtype != np.dtype(port.dtype):
                raise DeviceError(
                    f"{transport.name}: gave no output {port.name} of its shape; build this version's runner"
                )
        arrays_back = tuple(np.array(array) for array in last)
        return RemoteRun(arrays_back, report.losses, report.document, tuple(pushed))


@contextlib.contextmanager
def scratch_bundle() -> Iterator[Path]:
    """Yield a path for a bundle that is made for one run."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "bundle"
