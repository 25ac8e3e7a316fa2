"""Streaming schedules: an overlap plan as copies beside the launches of a program, and the memory of a run.

One arena has the intermediates and the streamed weights. A weight has its memory from the launch beside which
its first bytes are copied to its last use; the order of launches fixes both, so the memory of a run is
constant and known before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Annotated

from msgspec import Meta

from torchedge.errors import PlanError
from torchedge.graphs import WEIGHT_ROLES
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.arenas import in_place_pairs, lifetimes_of, live_bytes, planned, total_bytes
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.placement import placed_for
from torchedge.lowering.programs import MAX_ITEMS, Arena, LoadClassName, Program, Size
from torchedge.opencl.platforms import ClDevice
from torchedge.streaming.far_uses import Part, divided, launches_using, parts_named, whole_name
from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.verification import verify_plan
from torchedge.textures.layouts import PAGE_BYTES

LEAST_STAGING_BYTES = 16 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Transfer:
    """The copy of bytes `start` to `stop` (exclusive) of a packed weight: whole rows of texels, or pages."""

    tensor: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of `nbytes` bytes at byte `at` of staging memory to a tensor of the program.

    after: launches of the run that have ended when it begins. place: the byte of a buffer, or (x, y, width,
    height) in texels of an image.
    """

    tensor: Size
    after: Size
    at: Size
    nbytes: Size
    place: Annotated[tuple[Size, ...], Meta(max_length=4)]


@dataclass(frozen=True, slots=True)
class FileRead:
    """A read of `nbytes` bytes at byte `offset` of the file into staging memory at byte `at`.

    Both places are multiples of 4,096. after: copies of the run that have ended when it begins. The memory
    belongs to the read up to the next multiple of 4,096, so that whole pages can be read. copies: of its
    bytes, in order.
    """

    offset: Size
    nbytes: Size
    at: Size
    after: Size
    copies: Annotated[tuple[Copy, ...], Meta(min_length=1, max_length=MAX_ITEMS)]


Reads = Annotated[tuple[FileRead, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class Loads:
    """What is loaded: `preload` before the first run, `run` in each run.

    waits: for each launch, the copies of the run that have ended when it begins.
    """

    preload: Reads
    run: Reads
    waits: Annotated[tuple[Size, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Bytes that a streaming run allocates.

    ports: inputs, outputs and states. preloaded: weights that stay from run to run. arena: intermediates and
    streamed weights. staging: the pool between the file and the device.
    """

    ports_bytes: int
    preloaded_bytes: int
    arena_bytes: int
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all together, constant during a run."""
        return self.ports_bytes + self.preloaded_bytes + self.arena_bytes + self.staging_bytes


@dataclass(frozen=True, eq=False)
class StreamingSchedule:
    """The copies of a streaming run.

    program: its arena has places for the streamed weights. preload: weights that are loaded once. transfers:
    for each launch, copies that begin when that launch begins, in order; a weight is complete before its
    first use. loads: the reads and copies of it where the places of its weights in a file are known
    (`commands.resolve`).
    """

    program: Program
    preload: tuple[int, ...]
    transfers: tuple[tuple[Transfer, ...], ...]
    staging_bytes: int
    loads: Loads | None = None

    @property
    def memory(self) -> RunMemory:
        """What a run allocates, to the byte."""
        arena = total_bytes(self.program.arena)
        return _memory(self.program, self.preload, arena, self.staging_bytes)

    @property
    def streamed(self) -> dict[int, int]:
        """The first launch beside which each streamed weight is loaded."""
        first: dict[int, int] = {}
        for position, transfers in enumerate(self.transfers):
            for transfer in transfers:
                first.setdefault(transfer.tensor, position)
        return first


def weight_uses(program: Program) -> dict[int, tuple[int, int]]:
    """Return the first and the last launch that use each weight; weights without a use are omitted."""
    return {index: (launches[0], launches[-1]) for index, launches in launches_using(program).items()}


def fixed_tensors(program: Program) -> set[int]:
    """Return the tensors that a launch writes or the program returns: none of them can be streamed."""
    fixed = set(program.outputs)
    for launch in program.launches:
        access = program.kernels[launch.kernel].access
        fixed |= {index for index, how in zip(launch.tensors, access, strict=True) if how != "read"}
    return fixed


def parts_of(program: Program, instance: Instance) -> tuple[Part, ...]:
    """Return the parts of a program's weights that are weights of an instance."""
    return parts_named(program, {weight.name: weight.first_use - 1 for weight in instance.weights})


def make_schedule(
    program: Program, instance: Instance, plan: OverlapPlan, staging_bytes: int
) -> StreamingSchedule:
    """Return the schedule of a plan whose layer l is launch l - 1 of the program.

    Weights of the instance are tensors of the program by name, or parts of them (`far_uses`), all of which
    are streamed; other weights are preloaded. The plan may exceed capacities and memory limits of the
    instance, as those of `STRATEGIES` do. staging_bytes: size of the pool, a multiple of 4,096.
    Raises PlanError: the instance or the plan is of another program, the plan breaks its rules, or the pool
    is too small.
    """
    _check_staging(staging_bytes)
    program, preload, transfers = _transfers(program, instance, plan)
    lifetimes = _lifetimes(program, transfers)
    return StreamingSchedule(planned(program, ALIGNMENT, lifetimes), preload, transfers, staging_bytes)


def restore_schedule(
    program: Program, instance: Instance, plan: OverlapPlan, staging_bytes: int, arena: Arena
) -> StreamingSchedule:
    """Return the schedule of a plan with an arena that was planned before, as in a file; it is checked.

    Raises PlanError: as `make_schedule` does, or the arena does not hold the run.
    """
    _check_staging(staging_bytes)
    program, preload, transfers = _transfers(program, instance, plan)
    schedule = StreamingSchedule(replace(program, arena=arena), preload, transfers, staging_bytes)
    check_arena(schedule.program, 1, schedule.streamed)
    return schedule


def schedule_for(schedule: StreamingSchedule, device: ClDevice) -> StreamingSchedule:
    """Return a schedule whose allocations an OpenCL device takes (`placed_for`)."""
    lifetimes = _lifetimes(schedule.program, schedule.transfers)
    program = placed_for(schedule.program, device, ALIGNMENT, lifetimes)
    staging = min(schedule.staging_bytes, device.allocation_bytes // PAGE_BYTES * PAGE_BYTES)
    loads = schedule.loads if staging == schedule.staging_bytes else None
    return replace(schedule, program=program, staging_bytes=staging, loads=loads)


def least_memory(program: Program, instance: Instance, plan: OverlapPlan, staging_bytes: int) -> RunMemory:
    """Return a lower bound of the memory of a plan's schedule, without placing its arena.

    `arena_bytes` is the most that is alive at once. Raises what `make_schedule` raises of the plan.
    """
    program, preload, transfers = _transfers(program, instance, plan)
    return _memory(program, preload, live_bytes(program, _lifetimes(program, transfers)), staging_bytes)


def _check_staging(staging_bytes: int) -> None:
    if staging_bytes < LEAST_STAGING_BYTES or staging_bytes % PAGE_BYTES:
        raise PlanError(
            f"the staging pool has {staging_bytes} bytes; expected a multiple of {PAGE_BYTES} from "
            f"{LEAST_STAGING_BYTES}"
        )


def _memory(program: Program, preload: tuple[int, ...], arena: int, staging: int) -> RunMemory:
    ports = sum(t.nbytes for t in program.tensors if t.role in ("input", "output", "state"))
    return RunMemory(ports, sum(program.tensors[index].nbytes for index in preload), arena, staging)


def _lifetimes(program: Program, transfers: tuple[tuple[Transfer, ...], ...]) -> dict[int, tuple[int, int]]:
    """Return (first transfer's launch, last use + 1) of each streamed weight."""
    uses = weight_uses(program)
    lives: dict[int, tuple[int, int]] = {}
    for position, beside in enumerate(transfers):
        for transfer in beside:
            lives.setdefault(transfer.tensor, (position, uses[transfer.tensor][1] + 1))
    return lives


def _transfers(
    program: Program, instance: Instance, plan: OverlapPlan
) -> tuple[Program, tuple[int, ...], tuple[tuple[Transfer, ...], ...]]:
    """Return the program in parts, its preloaded weights, and the copies beside each launch, by first use."""
    if plan.program not in ("", program.digest):
        raise PlanError(
            f"the plan is of program {plan.program[:12]}, with other kernels, shapes or precision than "
            f"{program.name}, program {program.digest[:12]}; plan this program itself"
        )
    program = divided(program, parts_of(program, instance))
    uses = weight_uses(program)
    number = _numbers(program, instance, uses)
    verified = verify_plan(instance, plan, limits=False)
    if plan.status == "INFEASIBLE" or not verified.ok:
        reason = verified.problems[0] if verified.problems else plan.solver.get("reason", "it is INFEASIBLE")
        raise PlanError(f"the plan for {instance.name} cannot run: {reason}; plan {program.name} again")
    chunks = {weight.name: weight.chunks for weight in instance.weights}
    beside: list[list[Transfer]] = [[] for _ in program.launches]
    streamed: set[int] = set()
    for load in plan.loads:
        index = number[load.weight]
        tensor = program.tensors[index]
        first, stop = load.first_chunk, load.first_chunk + load.chunks
        start, end = tensor.layout.chunk_bytes(tensor.shape, tensor.dtype, first, stop, chunks[load.weight])
        if end > start:  # a row of texels may be larger than a chunk
            beside[load.layer - 1].append(Transfer(index, start, end))
            streamed.add(index)
    _check_read_only(program, streamed)
    _check_whole(program, streamed)
    for transfers in beside:
        transfers.sort(key=lambda t: (uses[t.tensor][0], t.tensor, t.start))
    weights = [i for i, t in enumerate(program.tensors) if t.role in WEIGHT_ROLES and i not in streamed]
    weights.sort(key=lambda index: uses.get(index, (len(program.launches), 0))[0])
    return program, tuple(weights), tuple([tuple(transfers) for transfers in beside])


def _numbers(program: Program, instance: Instance, uses: Mapping[int, tuple[int, int]]) -> dict[str, int]:
    """Return the tensor of each weight of the instance; raise PlanError where both do not agree."""
    wrong = f"the instance {instance.name} is not of the program {program.name}"
    advice = "plan this program itself"
    if len(instance.layers) != len(program.launches):
        raise PlanError(f"{wrong}: {len(instance.layers)} layers, {len(program.launches)} launches; {advice}")
    number = {tensor.name: i for i, tensor in enumerate(program.tensors) if tensor.role in WEIGHT_ROLES}
    for weight in instance.weights:
        if weight.name not in number:
            raise PlanError(f"{wrong}, which has no weight {weight.name!r}; {advice}")
        index = number[weight.name]
        nbytes, place = program.tensors[index].nbytes, uses.get(index)
        planned_use = (weight.first_use - 1, weight.last_use - 1)
        if (weight.nbytes, planned_use) != (nbytes, place):
            raise PlanError(
                f"{wrong}: weight {weight.name!r} has {weight.nbytes} bytes and its first and last use in "
                f"launches {planned_use}; the program has {nbytes} bytes and {place}; {advice}"
            )
    return number


def _check_read_only(program: Program, streamed: Set[int]) -> None:
    """Raise PlanError for a streamed weight that a launch writes or the program returns."""
    for index in sorted(streamed & fixed_tensors(program)):
        raise PlanError(
            f"weight {program.tensors[index].name!r} is written or returned by {program.name} and cannot be "
            "streamed; omit it from the instance"
        )


def _check_whole(program: Program, streamed: Set[int]) -> None:
    """Raise PlanError for a part of a weight that is preloaded: the others would be loaded in vain."""
    number = {tensor.name: index for index, tensor in enumerate(program.tensors)}
    for index, tensor in enumerate(program.tensors):
        whole = number.get(whole_name(tensor.name), index)
        if whole != index and not {whole, index} <= streamed:
            raise PlanError(
                f"a part of weight {program.tensors[whole].name!r} is preloaded, and others are streamed; "
                "expected all of them streamed: plan again, or preload it whole"
            )


# launches as layers of the overlap problem, and the weights that they use -----------------------------------


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """The amounts of one launch: FLOPs, bytes, work-items in all and in a work-group (None: the driver's).

    `input_bytes` and `output_bytes` count each tensor once, with the padding of its layout; a tensor that is
    updated in place counts as both. `name` is the scope in the model and the kernel.
    """

    name: str
    load_class: LoadClassName
    flops: int
    input_bytes: int
    output_bytes: int
    work_items: int
    group_items: int | None

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.input_bytes + self.output_bytes


def works_of(program: Program) -> tuple[LaunchWork, ...]:
    """Return the amounts of each launch, in order."""
    sizes = [tensor.nbytes for tensor in program.tensors]
    works = []
    for launch in program.launches:
        kernel = program.kernels[launch.kernel]
        reads, writes = set(), set()
        for tensor, access in zip(launch.tensors, kernel.access, strict=True):
            if access != "write":
                reads.add(tensor)
            if access != "read":
                writes.add(tensor)
        works.append(
            LaunchWork(
                f"{launch.scope} {kernel.name}".strip(),
                kernel.load_class,
                launch.flops,
                sum(sizes[t] for t in reads),
                sum(sizes[t] for t in writes),
                prod(launch.global_size),
                prod(launch.local_size) if launch.local_size else None,
            )
        )
    return tuple(works)


SMALL_BYTES = 2**16
"""A smaller weight takes longer to hand over than to copy."""

SMALL_SHARE = 0.01
"""Of the bytes of all weights: small ones that are not streamed take at most so many."""


def weights_of(program: Program, chunk_bytes: int, *, small: bool = False) -> tuple[Weight, ...]:
    """Return the weights that are worth streaming, by first use: those that launches read and none writes.

    The smallest ones, such as biases, are left out: each would cost a transfer and save next to no memory.
    small: they are not.
    """
    fixed = fixed_tensors(program)
    weights = []
    for index, (first, last) in weight_uses(program).items():
        tensor = program.tensors[index]
        if index not in fixed and tensor.nbytes:
            chunks = -(-tensor.nbytes // chunk_bytes)
            weights.append(Weight(tensor.name, tensor.nbytes, chunks, first + 1, last + 1))
    left = -1 if small else int(SMALL_SHARE * sum(weight.nbytes for weight in weights))
    left_out = set()
    for weight in sorted(weights, key=lambda weight: weight.nbytes):
        left -= weight.nbytes
        if left < 0 or weight.nbytes > SMALL_BYTES:
            break
        left_out.add(weight.name)
    return tuple([weight for weight in weights if weight.name not in left_out])


def activations_of(program: Program) -> tuple[int, ...]:
    """Return the bytes of inputs, outputs, states and intermediates in use while each launch runs.

    A result that takes the memory of an intermediate, as the arena is planned, is counted with it once.
    """
    tensors, offset = program.tensors, program.arena.offset
    change = [0] * (len(program.launches) + 1)
    change[0] = sum(t.nbytes for t in tensors if t.role in ("input", "output", "state"))
    lifetimes = lifetimes_of(program)
    for index, (start, stop) in lifetimes.items():
        change[start] += tensors[index].nbytes
        change[stop] -= tensors[index].nbytes
    for before, after in in_place_pairs(program, lifetimes):
        if before in offset and offset[before] == offset[after]:
            meet = lifetimes[after][0]
            change[meet] -= tensors[before].nbytes
            change[meet + 1] += tensors[before].nbytes
    return tuple(accumulate(change[:-1]))
