"""The file of a bundle's streaming plan, and plans that a process of their own makes.

Planning loads PyTorch and a solver, which a process that only runs bundles does not need: made there, they
would stay in its memory, and a tighter limit would take more of the host's. The child process gets a folder
with the program, and leaves the plan in it, or why there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

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
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.schedules import StreamingSchedule, Transfer, restore_schedule

_PROGRAM, _PLAN, _ERROR = "program.json", "plan.json", "error.json"

Copies = Annotated[tuple[Transfer, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The streaming plan of a bundle's program.

    transfers: for each launch, the copies that begin when it begins. arena: places of intermediates and of
    streamed weights. staging_bytes: of the pool between the file and the device.
    """

    plan: OverlapPlan
    instance: Instance
    staging_bytes: Size
    transfers: Annotated[tuple[Copies, ...], Meta(max_length=MAX_ITEMS)]
    arena: Arena


PLAN_FILES = Codec(
    PlanFile,
    "Streaming plan of a bundle",
    schema="torchedge-streaming-plan-1",
    remedy="export the model again",
    max_bytes=MAX_PLAN_BYTES,
)


def read_schedule(
    path: Path, document: Mapping[str, object], program: Program
) -> tuple[PlanFile, StreamingSchedule]:
    """Return a plan file and its schedule of a program, verified: rules of the plan, copies and arena.

    Raises:
        InputError: an entry is out of range, the plan is of another program or breaks a rule, or the copies
            or the arena do not fit the plan.
    """
    file = PLAN_FILES.parse(path, document)
    if not file.plan.program:
        raise InputError(
            f"{path}: names no program; expected the digest of {program.name}: export the model again"
        )
    try:
        schedule = restore_schedule(program, file.instance, file.plan, file.staging_bytes, file.arena)
        if schedule.transfers != file.transfers:
            raise PlanError("its copies are not those of its plan")
    except PlanError as error:
        raise InputError(f"{path}: {error}; export the model again") from error
    return file, schedule


def schedule_apart(program: Program, device: Device, limit: int) -> StreamingSchedule:
    """Return the schedule of a program within a limit in bytes, planned in a process without a trace here.

    A process that has PyTorch already plans by itself. Raises what `plan_program` raises.
    """
    if "torch" in sys.modules:
        return _planned(program, device, limit)[1]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / _PROGRAM, program_document(program))
        ended = subprocess.run(
            [sys.executable, "-m", __name__, name, str(device.folder), str(limit)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if (folder / _ERROR).is_file():
            raise _error(read_json(folder / _ERROR))
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise PlanError(f"planning ended with status {ended.returncode}: {said[-1]}; run it again")
        return read_schedule(folder / _PLAN, read_json(folder / _PLAN, max_bytes=MAX_PLAN_BYTES), program)[1]


def _planned(program: Program, device: Device, limit: int) -> tuple[PlanFile, StreamingSchedule]:
    from torchedge.streaming.planning import plan_program

    plan = plan_program(program, device, memory_limit=with_unit(limit))
    schedule = plan.schedule
    parts = schedule.staging_bytes, schedule.transfers, schedule.program.arena
    return PlanFile(plan.plan, plan.instance, *parts), schedule


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
    try:
        write_json(folder / _PLAN, PLAN_FILES.document(_planned(program, device, limit)[0]))
    except TorchedgeError as error:
        works = getattr(error, "works_bytes", None)
        document = {"kind": type(error).__name__, "message": str(error), "works_bytes": works}
        write_json(folder / _ERROR, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
