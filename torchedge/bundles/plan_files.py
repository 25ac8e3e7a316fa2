"""The file of a bundle's streaming plan, and plans that a process of their own makes.

Planning loads PyTorch and a solver, which a process that only runs bundles does not need: made there, they
would stay in its memory, and a tighter limit would take more of the host's. The child process gets a folder
with the program, and leaves the plan in it, or why there is none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from torchedge import errors
from torchedge.bundles.manifests import MAX_PLAN_BYTES
from torchedge.devices import Device, find_device
from torchedge.errors import InputError, LimitError, PlanError, TorchedgeError
from torchedge.lowering.program_files import MAX_FILE_BYTES, parse_program, program_document
from torchedge.lowering.programs import MAX_ITEMS, Arena, Program, Size
from torchedge.storage import read_json, write_json
from torchedge.storage.amounts import with_unit
from torchedge.storage.codecs import Codec
from torchedge.storage.processes import child_environment
from torchedge.streaming.commands import resolve
from torchedge.streaming.far_uses import Part
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.schedules import Loads, StreamingSchedule, parts_of, restore_schedule

if TYPE_CHECKING:
    from torchedge.streaming.budgets import Budgeted
    from torchedge.streaming.planning import StreamingPlan

_PROGRAM, _PLACES, _PLAN, _ERROR = "program.json", "places.json", "plan.json", "error.json"


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The streaming plan of a bundle's program, and what a run of it does.

    staging_bytes: memory between the file and the device. arena: places of intermediates and of streamed
    weights. loads: reads of the weights' file, copies, and what waits for what. parts: of streamed weights,
    tensors behind those of the program.
    """

    plan: OverlapPlan
    instance: Instance
    staging_bytes: Size
    arena: Arena
    loads: Loads
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_ITEMS)] = ()


PLAN_FILES = Codec(
    PlanFile,
    "Streaming plan of a bundle",
    schema="torchedge-streaming-plan-2",
    remedy="export the model again",
    max_bytes=MAX_PLAN_BYTES,
)


def plan_file(plan: Budgeted, program: Program, places: Mapping[str, tuple[int, int]]) -> PlanFile:
    """Return the file of a program's plan; its packed weights lie at `places`, (offset, bytes) by name."""
    schedule = plan.schedule
    rest = schedule.staging_bytes, schedule.program.arena, resolve(schedule, places)
    return PlanFile(plan.plan, plan.instance, *rest, parts_of(program, plan.instance))


def read_schedule(
    path: Path, document: Mapping[str, object], program: Program, places: Mapping[str, tuple[int, int]]
) -> tuple[PlanFile, StreamingSchedule]:
    """Return a plan file and its schedule of a program, verified: rules of the plan, loads and arena.

    places: of the packed weights in their file, (offset, bytes) by name.
    Raises InputError: an entry is out of range, the plan is of another program or breaks a rule, or the loads
    or the arena do not fit the plan.
    """
    file = PLAN_FILES.parse(path, document)
    if not file.plan.program:
        raise InputError(
            f"{path}: names no program; expected the digest of {program.name}: export the model again"
        )
    try:
        schedule = restore_schedule(program, file.instance, file.plan, file.staging_bytes, file.arena)
        if resolve(schedule, places) != file.loads:
            raise PlanError("its reads and copies are not those of its plan")
        if parts_of(program, file.instance) != file.parts:
            raise PlanError("its parts of weights are not those of its instance")
    except PlanError as error:
        raise InputError(f"{path}: {error}; export the model again") from error
    return file, replace(schedule, loads=file.loads)


def schedule_apart(
    program: Program, device: Device, limit: int, places: Mapping[str, tuple[int, int]]
) -> StreamingSchedule:
    """Return the schedule of a program within a limit in bytes, planned in a process without a trace here.

    places: as `read_schedule` takes them. A process that has PyTorch already plans by itself. Raises what
    `plan_program` raises.
    """
    if "torch" in sys.modules:
        return _planned(program, device, limit).schedule
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / _PROGRAM, program_document(program))
        write_json(folder / _PLACES, {name: list(place) for name, place in places.items()})
        ended = subprocess.run(
            [sys.executable, "-m", __name__, name, str(device.folder), str(limit)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if (folder / _ERROR).is_file():
            raise _error(read_json(folder / _ERROR))
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise PlanError(f"planning ended with status {ended.returncode}: {said[-1]}; run it again")
        document = read_json(folder / _PLAN, max_bytes=MAX_PLAN_BYTES)
        return read_schedule(folder / _PLAN, document, program, places)[1]


def _planned(program: Program, device: Device, limit: int) -> StreamingPlan:
    from torchedge.streaming.planning import plan_program

    return plan_program(program, device, memory_limit=with_unit(limit))


def _error(document: Mapping[str, Any]) -> TorchedgeError:
    """Return the error that the child process ended with."""
    kind, message, works = document["kind"], document["message"], document["works_bytes"]
    if kind == LimitError.__name__:
        return LimitError(message, works_bytes=works)
    error: TorchedgeError = getattr(errors, kind)(message)
    return error


def main() -> int:
    """Plan the program in the folder named first for a profile's folder, within a limit in bytes."""
    folder, device, limit = Path(sys.argv[1]), find_device(Path(sys.argv[2])), int(sys.argv[3])
    program = parse_program(folder / _PROGRAM, read_json(folder / _PROGRAM, max_bytes=MAX_FILE_BYTES))
    written: dict[str, Any] = read_json(folder / _PLACES, max_bytes=MAX_FILE_BYTES)
    places = {name: (offset, nbytes) for name, (offset, nbytes) in written.items()}
    try:
        write_json(
            folder / _PLAN, PLAN_FILES.document(plan_file(_planned(program, device, limit), program, places))
        )
    except TorchedgeError as error:
        works = getattr(error, "works_bytes", None)
        document = {"kind": type(error).__name__, "message": str(error), "works_bytes": works}
        write_json(folder / _ERROR, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
