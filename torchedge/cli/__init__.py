"""The `torchedge` command: one module a subcommand, and one place where every error becomes one line.

Exit status: 0 done; 2 what was given cannot be used (the line on stderr says what to do); 3 `predict --limit`
where a run does not fit, `search` and `plan` where nothing does; 1 an error nobody foresaw; 130 interrupted;
141 whoever read the output has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from torchedge.errors import InputError, TorchedgeError

__all__ = ["BAD_INPUT", "DOES_NOT_FIT", "main"]

UNFORESEEN, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED, NO_READER = 1, 2, 3, 130, 141

DEBUG_VARIABLE = "TORCHEDGE_DEBUG"
"""Set to anything but 0: tracebacks and warnings are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; nothing but the command's own work is imported."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr] # Γ on a terminal without it
    try:
        with _quiet():
            status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()
        return NO_READER
    except KeyboardInterrupt:
        return _told("interrupted", INTERRUPTED)
    except TorchedgeError as error:
        return _told(f"error: {error}", BAD_INPUT, error)
    except Exception as error:
        step = f"run with {DEBUG_VARIABLE}=1 for the traceback"
        return _told(f"error: {type(error).__name__}: {error}; {step}", UNFORESEEN, error)
    return status


def _run(words: Sequence[str]) -> int:
    from torchedge.cli.arguments import build_parser

    try:
        arguments = build_parser().parse_args(words)
    except SystemExit as end:  # after --help and --version
        return end.code if isinstance(end.code, int) else 0
    try:
        status: int = arguments.run(arguments)
    except argparse.ArgumentTypeError as error:
        raise InputError(str(error)) from error
    except SystemExit as end:
        raise InputError(
            f"the model's own code ended the program (exit {end.code}); remove that call"
        ) from end
    return status


def _debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of torch and torchvision: they are about code that is not the user's."""
    if _debugging():
        yield
        return
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _told(message: str, status: int, error: BaseException | None = None) -> int:
    """Write one line to stderr (after the traceback, where it is asked for) and return the status."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        if error is not None and _debugging():
            import traceback

            traceback.print_exception(error)
        print("torchedge:", " ".join(message.split()), file=sys.stderr, flush=True)
    return status


def _give_up_stdout() -> None:
    """Point stdout to nowhere, so that Python's own flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
