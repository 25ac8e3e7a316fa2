"""What the benchmarks share: the way to the tests' oracles, options, processes of their own, rows, tables."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT)]


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def apart(
    work: Callable[..., Any], *arguments: object, seconds: float | None = None, method: str = "spawn"
) -> Any:  # noqa: ANN401 - what the work returns
    """Return what `work` returns in a process of its own; a text says why it returned nothing."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context(method).Process(target=_send, args=(sender, work, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else f"took over {seconds:g} s"
    except EOFError:
        return "ended without a result"
    finally:
        if seconds is not None and process.is_alive():
            process.join(1)
            process.kill()
        process.join()


def _send(sender: Any, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:  # noqa: ANN401
    try:
        sender.send(work(*arguments))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


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
