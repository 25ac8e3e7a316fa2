"""Plans of programs that share weights, run one at a time and many times: the methods of a bundle, training.

What stays from run to run is loaded once, so as much stays as the limit holds, the largest weights first:
beside a large one that is streamed its own memory would be kept free anyway. Every other weight is loaded
whole just before each group of near uses. The same weights stay for all programs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from torchedge.errors import CaptureError, LimitError
from torchedge.graphs.steps import Step
from torchedge.lowering.arenas import common_arena, total_bytes
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.programs import Program, residents
from torchedge.lowering.recomputing import Checkpoints, Recomputation
from torchedge.streaming.budgets import Budgeted, filled, loaded_whole, staging_for, too_small
from torchedge.streaming.capacities import CHUNK_BYTES
from torchedge.streaming.far_uses import divided, far_parts, whole_name
from torchedge.streaming.instances import Instance, Layer
from torchedge.streaming.rates import STAGING_BYTES
from torchedge.streaming.schedules import (
    LEAST_STAGING_BYTES,
    StreamingSchedule,
    make_schedule,
    weight_uses,
    weights_of,
    works_of,
)

Made = TypeVar("Made")

Latency = Callable[[Sequence[Budgeted]], float]
"""The predicted time of programs with their plans, in any unit."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Training programs within a limit, and their plans.

    recomputed: for each program what it computes again; None: nothing.
    """

    programs: tuple[Program, ...]
    plans: list[Budgeted]
    recomputed: tuple[Recomputation | None, ...]


@dataclass(frozen=True, slots=True)
class _Turns:
    """Programs that run one at a time; candidates: weights that may be streamed, large ones first."""

    programs: tuple[Program, ...]
    limit: int
    beside: int
    candidates: tuple[str, ...]

    def planned(self, kept: int, staging: int) -> list[Budgeted]:
        """Return the plans with so many of the candidates kept on the device."""
        streamed = {*self.candidates[kept:]}
        return [_least(program, streamed, staging) for program in self.programs]

    def most_kept(self, staging: int) -> list[Budgeted] | None:
        """Return the plans with as many weights kept as the limit holds; None where none are too many."""

        def exceeds(kept: int) -> bool:
            return memory_in_turn(self.planned(kept, staging)) + self.beside > self.limit

        fitting = bisect_left(range(len(self.candidates) + 1), True, key=exceeds)  # none kept, one, ...
        return self.planned(fitting - 1, staging) if fitting else None


def fit_in_turn(
    programs: Sequence[Program],
    memory_limit: int,
    *,
    beside: int = 0,
    constants: bool = True,
    latency: Latency | None = None,
) -> Fitted:
    """Plan training programs as `plan_in_turn` does, and let them compute activations again where they must.

    The first of these that keeps the limit is taken: everything is held; as little as possible is computed
    again, so that no weight is streamed; weights are streamed, and all is computed again that costs little;
    weights are streamed, and all is computed again. The last two are what `latency` finds faster, if both do.
    Raises LimitError as `plan_in_turn` does.
    """
    fitting = _Fitting([Checkpoints(program) for program in programs], memory_limit, beside, constants)
    held = fitting.held()
    if held is not None:
        return held
    little = fitting.streamed(max(each.cheap for each in fitting.checkpoints))
    if isinstance(little, Fitted) and latency is None:
        return little
    most = fitting.streamed(fitting.last)
    fits = [fitted for fitted in (little, most) if isinstance(fitted, Fitted)]
    if isinstance(most, LimitError) and not fits:
        raise most
    return fits[0] if latency is None else min(fits, key=lambda fitted: latency(fitted.plans))


def fewest_parts(
    samples: int, capture: Callable[[int], Step], attempt: Callable[[int], Made]
) -> tuple[int, Made]:
    """Return into how few equal parts a training batch is cut so that one fits, and what was made of one.

    capture: captures the step on one of so many parts. attempt: lowers and plans it, and raises LimitError
    where it does not fit; fewer parts never fit then.
    Raises the LimitError of single samples where none fits, and that of the whole batch where something is
    computed across samples. A part on which the model cannot be captured is none.
    """
    try:
        return 1, attempt(1)
    except LimitError as error:
        too_large = error
    choices = [parts for parts in range(2, samples + 1) if samples % parts == 0]
    while choices:
        with suppress(CaptureError):
            capture(choices[-1])
            break
        choices.pop()
    if not choices:
        raise too_large
    few = choices[-1] if len(choices) == 1 or samples > choices[-1] else choices[-2]
    across = capture(1).across_samples(capture(few), few)
    if across is not None:
        raise LimitError(
            f"{too_large}; the batch of {samples} is not cut into parts, as {across} is computed across it",
            works_bytes=too_large.works_bytes,
        )
    made = {choices[-1]: attempt(choices[-1])}

    def fits(parts: int) -> bool:
        with suppress(LimitError):
            made[parts] = made[parts] if parts in made else attempt(parts)
        return parts in made

    fewest = choices[bisect_left(choices, True, key=fits)]
    return fewest, made[fewest]


def in_parts(samples: int, parts: int) -> str:
    """Return what is said of a batch that a memory limit cuts into parts."""
    return (
        f"the batch of {samples} runs in {parts} parts of {samples // parts}, whose gradients are averaged, "
        "to stay within the memory limit: what is computed over a batch (batch norms, a mean over the "
        "labels that count) is computed over a part, and a loss that sums over it is divided by their number"
    )


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Training programs that are to run within a limit, and their choices: number 0 is to repeat nothing."""

    checkpoints: Sequence[Checkpoints]
    limit: int
    beside: int
    constants: bool

    @property
    def last(self) -> int:
        """The number of the choice that holds least."""
        return max(map(len, self.checkpoints))

    def chosen(self, number: int) -> tuple[tuple[Program, ...], tuple[Recomputation | None, ...]]:
        """Return the programs of a choice, and what each computes again."""
        again = [
            each.choice(own, ALIGNMENT) if own >= 0 else None
            for each, own in zip(self.checkpoints, self._numbers(number), strict=True)
        ]
        pairs = zip(self.checkpoints, again, strict=True)
        return tuple([each.program if own is None else own.program for each, own in pairs]), tuple(again)

    def held(self) -> Fitted | None:
        """Return the first choice with which all weights are held; None: there is none."""
        number = 0
        while number <= self.last:
            programs, again = self.chosen(number)
            plans = _Turns(programs, self.limit, self.beside, ()).planned(0, LEAST_STAGING_BYTES)
            excess = memory_in_turn(plans) + self.beside - self.limit
            if excess <= 0:
                return Fitted(programs, plans, again)
            number = self._next(number, excess)
        return None

    def streamed(self, number: int) -> Fitted | LimitError:
        """Return a choice with weights streamed, or the error where that exceeds the limit."""
        programs, again = self.chosen(number)
        try:
            plans = plan_in_turn(programs, self.limit, beside=self.beside, constants=self.constants)
        except LimitError as error:
            return error
        return Fitted(programs, plans, again)

    def _next(self, number: int, excess: int) -> int:
        """Return the next choice that holds so many bytes less, by those that are alive at once."""
        most = self._alive(number) - excess
        return bisect_left(range(self.last + 1), True, number + 1, key=lambda n: self._alive(n) <= most)

    def _alive(self, number: int) -> int:
        pairs = zip(self.checkpoints, self._numbers(number), strict=True)
        return max(each.live_bytes(own) for each, own in pairs)

    def _numbers(self, number: int) -> list[int]:
        """Return the choice of each program; -1: none."""
        return [min(number, len(each)) - 1 for each in self.checkpoints]


def plan_in_turn(
    programs: Sequence[Program], memory_limit: int, *, beside: int = 0, constants: bool = True
) -> list[Budgeted]:
    """Plan programs that share weights and states by name and run one at a time, in one arena.

    memory_limit: bytes of all that they allocate together, and of what will be `beside` them. constants:
    stream them, too. Returns a plan of each, with staging memory of one size, which they share.
    Raises LimitError: no plan stays within the limit; the message names the smallest that works.
    """
    candidates = _candidates(programs, constants=constants)
    turns = _Turns(tuple(programs), memory_limit, beside, candidates)
    whole = turns.planned(len(candidates), LEAST_STAGING_BYTES)
    if memory_in_turn(whole) + beside <= memory_limit:
        return whole
    sizes = {tensor.name: tensor.nbytes for program in programs for tensor in program.tensors}
    weights = sum(sizes[name] for name in candidates)
    staging = staging_for(programs, weights, memory_limit)
    plans = turns.most_kept(staging)
    if plans is None and staging > LEAST_STAGING_BYTES:
        plans = turns.most_kept(LEAST_STAGING_BYTES)
    if plans is None:
        least = turns.planned(0, LEAST_STAGING_BYTES)
        raise _too_small(least, memory_limit, beside)
    return filled(plans, memory_limit - beside - memory_in_turn(plans), STAGING_BYTES)


def least_held(program: Program) -> Program:
    """Return the program that computes as much again as it can; itself if it cannot."""
    checkpoints = Checkpoints(program)
    return checkpoints.choice(len(checkpoints) - 1, ALIGNMENT).program if len(checkpoints) else program


def plan_beside(program: Program, first: StreamingSchedule) -> Budgeted:
    """Plan a program that runs in turn with one that is planned: what is streamed there is streamed here."""
    names = {whole_name(first.program.tensors[index].name) for index in first.streamed}
    return _least(program, names & {*_candidates([program])}, first.staging_bytes)


def memory_in_turn(plans: Sequence[Budgeted]) -> int:
    """Return the bytes of programs with their plans, together."""
    programs = [plan.schedule.program for plan in plans]
    arena = total_bytes(common_arena([program.arena for program in programs]))
    return sum(t.nbytes for t in residents(programs)) + arena + plans[0].schedule.staging_bytes


def _candidates(programs: Sequence[Program], *, constants: bool = True) -> tuple[str, ...]:
    """Return the weights that every program that has them can stream, the largest first."""
    sizes: dict[str, int] = {}
    fixed: set[str] = set()
    for program in programs:
        streamable = {weight.name: weight for weight in weights_of(program, CHUNK_BYTES)}
        for index, tensor in enumerate(program.tensors):
            weight = streamable.get(tensor.name)
            if weight is not None and weight.first_use > 1 and (constants or tensor.role != "constant"):
                sizes.setdefault(tensor.name, tensor.nbytes)
            elif index in weight_uses(program):
                fixed.add(tensor.name)
    return tuple(sorted(sizes.keys() - fixed, key=lambda name: (-sizes[name], [*sizes].index(name))))


def _least(program: Program, streamed: set[str], staging: int) -> Budgeted:
    """Return the plan that loads some weights whole by the launch before each group of near uses.

    Those that the first launch uses stay.
    """
    uses = weight_uses(program)
    indices = [i for i, t in enumerate(program.tensors) if t.name in streamed and uses.get(i, (0,))[0]]
    own = {program.tensors[index].name for index in indices}
    parted = divided(program, far_parts(program, indices))
    chosen = own | {tensor.name for tensor in parted.tensors[len(program.tensors) :]}
    weights = tuple(
        [weight for weight in weights_of(parted, CHUNK_BYTES, small=True) if weight.name in chosen]
    )
    works = works_of(program)
    layers = tuple([Layer(work.name, 0, 0.0, work.load_class) for work in works])
    instance, plan = loaded_whole(
        Instance(CHUNK_BYTES, layers, weights, residency="weights", name=program.name)
    )
    plan = replace(plan, program=program.digest)
    return Budgeted(instance, plan, make_schedule(program, instance, plan, staging))


def _too_small(least: Sequence[Budgeted], limit: int, beside: int) -> LimitError:
    """Name the smallest limit: the memory of the plans that take the least."""
    names = " and ".join(dict.fromkeys(plan.instance.name for plan in least))
    arena = total_bytes(common_arena([plan.schedule.program.arena for plan in least]))
    staging = least[0].schedule.staging_bytes
    parts = {
        "inputs, outputs, states and weights that stay": memory_in_turn(least) + beside - arena - staging,
        "intermediates and streamed weights": arena,
        "staging buffers": staging,
    }
    return too_small(names, limit, parts)
