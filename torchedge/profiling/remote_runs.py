"""Bundles run by the native runner on a device without Python, over a transport."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchedge.bundles.manifests import MANIFEST
from torchedge.errors import DeviceError, InputError
from torchedge.profiling.campaigns.transports import MAX_FILE_BYTES, Transport, explain_end
from torchedge.storage.documents import parse_json
from torchedge.storage.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from torchedge.bundles.bundle import Bundle

RUNNER = "torchedge-run"
CACHE = "kernels"


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
    if not runner.is_file():
        raise InputError(
            f"{runner}: is no file; expected torchedge-run, built for the device (docs/runner.md)"
        )
    place = f"bundles/{bundle.path.name}"
    names = (MANIFEST, *bundle.manifest.files)
    pushed = transport.push({RUNNER: runner, **{f"{place}/{name}": bundle.path / name for name in names}})
    words = [transport.place(place), "--steps", str(steps), "--sha256", bundle.manifest.sha256, "--figures"]
    words += ["--cache", transport.place(CACHE), *(("--device", device) if device else ())]
    words += ["--memory-limit", str(memory_limit)] if memory_limit is not None else []
    for name, value in (settings or {}).items():
        words += ["--set", f"{name}={value!r}"]
    with tempfile.TemporaryDirectory() as own, _folder(transport) as there:
        inputs, outputs, state = (
            Path(own) / f"{kind}.safetensors" for kind in ("inputs", "outputs", "state")
        )
        write_tensors(inputs, {port.name: a for port, a in zip(bundle.inputs, arrays, strict=True)})
        transport.push({f"{there}/{inputs.name}": inputs})
        words += ["--inputs", transport.place(f"{there}/{inputs.name}")]
        words += ["--outputs", transport.place(f"{there}/{outputs.name}")]
        words += ["--save", transport.place(f"{there}/{state.name}")] if save is not None else []
        losses, figures = _run(transport, words, heard)
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
        return RemoteRun(tuple(np.array(array) for array in last), tuple(losses), figures, tuple(pushed))


@contextlib.contextmanager
def _folder(transport: Transport) -> Iterator[str]:
    """Yield a name of a folder there for one run; it is removed at the end, if the device can be reached."""
    name = f"runs/{secrets.token_hex(8)}"
    try:
        yield name
    finally:
        with contextlib.suppress(DeviceError):
            transport.remove(name)


def _run(
    transport: Transport, words: Sequence[str], heard: Callable[[float], None]
) -> tuple[list[float], dict[str, Any]]:
    """Run the runner there to its end; return losses and figures."""
    losses: list[float] = []
    document: list[str] = []
    with transport.start_program(RUNNER, words) as run:
        for line in run.lines():
            match line.split():
                case ["step", _, "loss", value]:
                    with contextlib.suppress(ValueError):
                        losses.append(float(value))
                        heard(losses[-1])
                case _ if document or line.startswith("{"):
                    document.append(line)
        status = run.wait()
        if status:
            raise DeviceError(f"{transport.name}: {explain_end(status, run.last_error)}")
    return losses, dict(parse_json(f"figures of {transport.name}", "".join(document).encode()))
