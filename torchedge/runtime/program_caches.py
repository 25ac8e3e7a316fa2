"""Lowered programs on disk, so that a model is lowered once for all processes.

The log says at level DEBUG why a program was not read: for which key, and of what the key consists.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchedge import __version__
from torchedge.errors import TorchedgeError
from torchedge.graphs.graph import canonical_text
from torchedge.graphs.steps import Step
from torchedge.lowering.assembly import lower
from torchedge.lowering.program_files import parse_program, program_document
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import Target
from torchedge.notices import stage
from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.build_processes import start_ahead
from torchedge.opencl.platforms import ClDevice
from torchedge.runtime.kernel_times import CachedTimes
from torchedge.storage import cache_folder, data_folder
from torchedge.storage.documents import parse_json
from torchedge.textures.layouts import Layout

_ROOMS = ("expressions", "graphs", "lowering", "textures")
"""Rooms whose code decides about programs."""
_CAPTURING = ("tracing", "runtime", "ops")
"""Rooms whose code decides about captures besides."""
_LOG = logging.getLogger(__name__)


def lowered(
    step: Step,
    target: Target,
    layouts: Mapping[str, Layout],
    folder: Path | None = None,
    timer: CachedTimes | None = None,
    device: ClDevice | None = None,
) -> tuple[Program, bool]:
    """Return the program of a step, and whether it was cached; a damaged entry counts as absent.

    layouts, timer: as in `lower`. folder: of the cache, by default within the user's cache folder. device:
    for which the program will be built next: processes start for that while it is lowered.
    Raises LoweringError: operators without a rule, or a request that no kernel supports.
    """
    cache = BinaryCache(cache_folder() / "programs" if folder is None else folder)
    key = key_of(step, target, layouts, "" if timer is None else timer.device)
    known = _read_program(cache, key)
    if known is not None:
        return known, True
    if device is not None:
        start_ahead(device, len(step.ops))
    stage(f"lowering {len(step.ops):,} operators")
    program = lower(step, target, layouts, timer=timer)
    cache.write(key, json.dumps(program_document(program), allow_nan=False).encode())
    return program, False


def _read_program(cache: BinaryCache, key: str) -> Program | None:
    """Return a cached program; None without one, or where the entry is damaged."""
    entry = cache.read(key)
    if entry is None:
        _LOG.debug("no program %.12s in %s", key, cache.folder)
        return None
    try:
        return parse_program(f"cached program {key[:12]}", parse_json(key, entry))
    except TorchedgeError as error:
        _LOG.warning("a cached program is made again, as it cannot be read: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class CaptureCache:
    """Which programs a capture led to, so that it need not be repeated: by what decides about it, as text.

    identity: of model, batch, loss, optimizer and settings (`tracing.python_state`). target, measured_on: as
    in `key_of`.
    """

    identity: str
    target: Target
    measured_on: str = ""

    def read(self) -> list[Program] | None:
        """Return the programs of an earlier process, or None."""
        entry = self._folder("captures").read(self._key())
        if entry is None:
            parts = (self.identity, self.target, self.measured_on)
            hashes = [hashlib.sha256(f"{part}".encode()).hexdigest()[:12] for part in parts]
            _LOG.debug("no capture of model %s for target %s, timed by %s", *hashes)
            return None
        programs = [_read_program(self._folder("programs"), key) for key in entry.decode().split()]
        known = [program for program in programs if program is not None]
        return known if len(known) == len(programs) else None

    def write(self, steps: Sequence[tuple[Step, Mapping[str, Layout]]]) -> None:
        """Remember the programs of steps, each lowered with its layouts."""
        keys = [key_of(step, self.target, layouts, self.measured_on) for step, layouts in steps]
        self._folder("captures").write(self._key(), "\n".join(keys).encode())

    def _key(self) -> str:
        state = hashlib.sha256(code_digest().encode() + code_digest(_CAPTURING).encode())
        state.update(f"{self.identity}{self.target}{self.measured_on}".encode())
        return state.hexdigest()

    @staticmethod
    def _folder(name: str) -> BinaryCache:
        return BinaryCache(cache_folder() / name)


def key_of(step: Step, target: Target, layouts: Mapping[str, Layout], measured_on: str = "") -> str:
    """Return a hash (sha256) of step, target, layouts, the device of a timer and the code that lowers."""
    state = hashlib.sha256(code_digest().encode())
    for value in step.values:
        state.update(f"{value.name}\n{canonical_text(value.shape)}{value.dtype}{value.role}\n".encode())
    for op in step.ops:
        state.update(f"{op.kind}{op.inputs}{op.outputs}{canonical_text(op.attrs)}{op.scope}\n".encode())
    tail = (step.name, step.inputs, step.outputs, step.updates)
    settings = (dict(step.hyperparameters), dict(step.initial), target, dict(layouts), measured_on)
    state.update(f"{tail}{settings}".encode())
    return state.hexdigest()


@cache
def code_digest(rooms: tuple[str, ...] = _ROOMS) -> str:
    """Return a hash of the version and of the code that lowers, or of other rooms."""
    state = hashlib.sha256(__version__.encode())
    package = Path(__file__).parents[1]
    files = [file for room in rooms for file in sorted((package / room).rglob("*.py"))]
    for file in [*files, *sorted((data_folder("export") / "kernels").glob("*.*"))]:
        state.update(file.name.encode() + file.read_bytes())
    return state.hexdigest()
