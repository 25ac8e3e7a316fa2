"""Run PyTorch's own operator samples (op_db) through OpenCL, forward and gradient; tell how many pass.

    python benchmarks/lowering_operators.py                       # everything: hours on two cores
    python benchmarks/lowering_operators.py --samples 6 --jobs 2  # six samples an entry
    python benchmarks/lowering_operators.py add softmax nn.functional.conv2d

Samples are float32; each is captured with its gradient as one graph of ATen operators, lowered, run on the
default OpenCL device and held against PyTorch in float64: within 1e-4 of an element and 1e-5, or as near as
PyTorch in float32 is (tests/oracles/operator_samples.py says it exactly). Entries that bear the name of a
rule count with all their samples; others with those whose operators all have a rule. A sample that is
refused counts as not passed. Entries run in processes of their own, so that a crash costs one entry. Needs
expecttest. The exit status is 1 where less than 95 % pass.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from harness import options_of
from oracles.operator_samples import (
    Outcome,
    Tally,
    all_entries,
    check_entry,
    is_named,
    title_of,
)

from torchedge.storage import write_json

ASKED = 0.95
PATIENCE = 1_800.0
"""Seconds after which an entry is given up."""


def work(pipe: Connection, samples: int | None) -> None:
    """Check entries by number until the other end closes."""
    import torch

    torch.set_num_threads(1)
    entries = all_entries()
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        pipe.send(check_entry(entries[number], samples))


class Worker:
    """A process that checks entries, started anew when it dies."""

    def __init__(self, samples: int | None) -> None:
        self.samples = samples
        self.process: multiprocessing.context.SpawnProcess | None = None

    def check(self, number: int) -> Tally | str:
        """Return an entry's tally, or why there is none."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, self.samples), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send(number)
        try:
            if self.pipe.poll(PATIENCE):
                found: Tally = self.pipe.recv()
                return found
            reason = f"not done after {PATIENCE:g} s"
        except EOFError:
            reason = "the process died"
        self.process.kill()
        self.process.join()
        self.process = None
        return reason


def check_all(numbers: list[int], samples: int | None, jobs: int) -> Iterator[tuple[int, Tally | str]]:
    """Yield tallies by entry as they come."""
    waiting: SimpleQueue[int] = SimpleQueue()
    done: SimpleQueue[tuple[int, Tally | str]] = SimpleQueue()
    for number in numbers:
        waiting.put(number)

    def drain() -> None:
        worker = Worker(samples)
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            done.put((number, worker.check(number)))

    for _ in range(jobs):
        threading.Thread(target=drain, daemon=True).start()
    for _ in numbers:
        yield done.get()


def row(tally: Tally) -> str:
    """Return a line of the table."""
    numbers = [tally.counted, *(tally.count(v) for v in ("passed", "failed", "refused"))]
    rest = [tally.count(v) for v in ("foreign", "random", "none")]
    return (
        f"| {tally.title} | {'yes' if tally.named else ''} | "
        + " | ".join(str(n or "") for n in [*numbers, *rest])
        + " |"
    )


def print_reasons(tallies: list[Tally]) -> None:
    """List what did not pass, and which operators lack a rule."""
    print("\nNot passed\n")
    for tally in tallies:
        reasons = Counter(
            f"{o.verdict}: {o.reason}" for o in tally.outcomes if o.verdict in ("failed", "refused")
        )
        for reason, count in reasons.most_common():
            print(f"- {tally.title}, {count} of {tally.counted}: {reason}")
    foreign = Counter(o.reason for tally in tallies for o in tally.outcomes if o.verdict == "foreign")
    print("\nNot counted, as no rule bears the entry's name\n")
    for reason, count in foreign.most_common(60):
        print(f"- {count}: {reason}")


def print_totals(tallies: list[Tally]) -> bool:
    """Print sums; return whether enough pass."""
    counted = sum(tally.counted for tally in tallies)
    passed = sum(tally.count("passed") for tally in tallies)
    share = passed / max(1, counted)
    named = [tally for tally in tallies if tally.named]
    print(f"\n- entries: {len(tallies)}, of which {len(named)} bear the name of a rule")
    print(f"- entries with a supported sample: {sum(tally.counted > 0 for tally in tallies)}")
    print(f"- samples of supported operators: {counted:,}; passed: {passed:,}")
    verdict = "met" if share >= ASKED else "MISSED"
    print(f"- passed: {share:.1%}; asked for: at least {ASKED:.0%}: {verdict}")
    return share >= ASKED


def main() -> None:
    """Check the entries asked for."""
    parser = options_of(__doc__)
    parser.add_argument("names", nargs="*", help="entries of op_db (default: all with float32 samples)")
    parser.add_argument("--samples", type=int, help="of an entry, spread over all of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--named", action="store_true", help="only entries that bear a rule's name")
    parser.add_argument("--json", metavar="PATH", help="write every outcome")
    given = parser.parse_args()
    entries = all_entries()
    numbers = [
        k
        for k, entry in enumerate(entries)
        if (not given.names or entry.name in given.names or title_of(entry) in given.names)
        and (not given.named or is_named(entry))
    ]
    tallies = []
    print("| entry | a rule's name | counted | passed | failed | refused | no rule | random | no reference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for place, (number, found) in enumerate(check_all(numbers, given.samples, given.jobs), 1):
        entry = entries[number]
        if isinstance(found, str):
            found = Tally(title_of(entry), is_named(entry), [Outcome("failed", found)])
        tallies.append(found)
        print(f"{place} of {len(numbers)}", end="   \r", file=sys.stderr)
        if found.counted:
            print(row(found), flush=True)
    print_reasons(tallies)
    if given.json:
        outcomes = {t.title: [[o.verdict, o.reason] for o in t.outcomes] for t in tallies}
        write_json(Path(given.json), outcomes)
    sys.exit(0 if print_totals(tallies) else 1)


if __name__ == "__main__":
    main()
