"""What the benchmarks share: the way to the tests' oracles, options, processes of their own, rows, tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT)]


def options_of(description: str | None, **sizes: int) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's description as it is written.

    sizes: options that are whole numbers, by name, with their defaults.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser


def apart(
    work: Callable[..., Any], *arguments: object, seconds: float | None = None, method: str = "spawn"
) -> Any:  # noqa: ANN401 - what the work returns
    """Return what `work` returns in a process of its own; a text says why it returned nothing."""
    worker = Worker(_send, work, arguments, method=method)
    try:
        return worker.answer(seconds)
    except EOFError:
        return "ended without a result"
    except TimeoutError:
        return f"took over {seconds:g} s"
    finally:
        worker.process.join()


def _send(pipe: Connection, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        pipe.send(work(*arguments))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _work(work: Callable[..., None], pipe: Connection, arguments: tuple[object, ...]) -> None:
    with contextlib.suppress(EOFError):  # nobody asks any more
        work(pipe, *arguments)


class Worker:
    """A process of its own that runs `work(pipe, *arguments)`, and answers through the pipe."""

    def __init__(self, work: Callable[..., None], *arguments: object, method: str = "spawn") -> None:
        context = multiprocessing.get_context(method)
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(work, other, arguments), daemon=True)
        self.process.start()
        other.close()  # so that a process that ends is no endless wait

    def answer(self, seconds: float | None, *question: object) -> Any:  # noqa: ANN401 - what it sends
        """Return its next answer; a question, where there is one, is sent before.

        Raises EOFError where it has ended, and TimeoutError where it takes longer and is killed.
        """
        try:
            if question:
                self._pipe.send(*question)
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise EOFError from None
        self.process.kill()
        self.process.join()
        raise TimeoutError


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none where it is not there yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def print_rows(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table; it appears row by row. A row of no titles goes on with the table before."""
    if titles:
        print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def timed_steps(step: Callable[[], Any]) -> Callable[[int], tuple[list[float], list[Any]]]:
    """Return a function that makes so many steps and returns the seconds and the result of each."""

    def run(count: int) -> tuple[list[float], list[Any]]:
        seconds, results = [], []
        for _ in range(count):
            began = time.perf_counter()
            results.append(step())
            seconds.append(time.perf_counter() - began)
        return seconds, results

    return run


def taken_ms(call: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of so many calls."""
    return [1e3 * seconds for seconds in timed_steps(call)(count)[0]]
