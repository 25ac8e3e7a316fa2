"""streaming_plan.json of a bundle: overlap plan and instance, and the copies and arena a runner follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from torchedge.bundles.manifests import MAX_PLAN_BYTES
from torchedge.errors import InputError, PlanError
from torchedge.lowering.programs import MAX_ITEMS, Arena, Program, Size
from torchedge.storage.codecs import Codec
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.schedules import StreamingSchedule, Transfer, restore_schedule

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


def plan_file(plan: OverlapPlan, instance: Instance, schedule: StreamingSchedule) -> PlanFile:
    """Return the file of a plan with its schedule."""
    return PlanFile(plan, instance, schedule.staging_bytes, schedule.transfers, schedule.program.arena)


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
