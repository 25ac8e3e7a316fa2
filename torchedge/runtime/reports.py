"""What a program on a device consists of, holds and takes, to be read by people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchedge.runtime.executors import Executor

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What the launches of one kernel took together in the last run."""

    kernel: str
    launches: int
    ms: float
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program: kernels and launches, bytes of its arena and of what stays, and times where measured.

    arena_bytes: what intermediates share. resident_bytes: all other memory of the program, which another one
    may share. times: of the last run, the longest first; empty unless profiled.
    """

    name: str
    device: str
    kernels: int
    launches: int
    arena_bytes: int
    resident_bytes: int
    times: tuple[KernelTime, ...] = ()

    @property
    def ms(self) -> float:
        """What the launches of the last run took on the device; 0 unless profiled."""
        return sum(time.ms for time in self.times)

    def __str__(self) -> str:
        head = (
            f"{self.name} on {self.device}: {self.kernels} kernels, {self.launches} launches, arena "
            f"{self.arena_bytes / _MIB:.1f} MiB, resident {self.resident_bytes / _MIB:.1f} MiB"
        )
        if not self.times:
            return head
        lines = [f"{head}, {self.ms:.2f} ms in the last run"]
        for time in self.times[:12]:
            where = ", ".join(time.scopes[:2]) + (", ..." if len(time.scopes) > 2 else "")
            lines.append(f"  {time.ms:9.3f} ms  {time.launches:4d} x {time.kernel}  {where}".rstrip())
        if len(self.times) > 12:
            rest = sum(time.ms for time in self.times[12:])
            lines.append(f"  {rest:9.3f} ms  in {len(self.times) - 12} other kernels")
        return "\n".join(lines)


def report_on(executor: Executor, *, profiled: bool) -> ProgramReport:
    """Return the report of an executor; `profiled`: it was made with profile=True and has run."""
    program = executor.program
    return ProgramReport(
        program.name,
        executor.context.device.name,
        len(program.kernels),
        len(program.launches),
        executor.arena_bytes,
        executor.resident_bytes,
        _times(executor) if profiled else (),
    )


def _times(executor: Executor) -> tuple[KernelTime, ...]:
    spent: dict[str, float] = {}
    counts: dict[str, int] = {}
    scopes: dict[str, dict[str, None]] = {}
    for time in executor.timings():
        spent[time.kernel] = spent.get(time.kernel, 0.0) + time.ns / 1e6
        counts[time.kernel] = counts.get(time.kernel, 0) + 1
        scopes.setdefault(time.kernel, {}).update(dict.fromkeys([time.scope] if time.scope else []))
    longest: Sequence[str] = sorted(spent, key=lambda name: -spent[name])
    return tuple([KernelTime(name, counts[name], spent[name], tuple(scopes[name])) for name in longest])
