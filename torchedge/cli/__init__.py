"""The `torchedge` command: a table of commands that load when they run, and one place for their errors.

Exit status: 0 done; 1 unforeseen error; 2 input that cannot be used (the line on stderr says what to do);
3 the answer is "does not fit"; 4 `doctor` found something broken; 130 interrupted; 141 the reader of the
output has gone; 143 ended by SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from torchedge import __version__
from torchedge.cli.console import BAD_INPUT, DOES_NOT_FIT, WORDS, PrintableStream
from torchedge.cli.options import DEBUG_VARIABLE, Group, debugging, verbosity_options
from torchedge.errors import NAMED_FILE, DeviceMemoryError, LimitError, TorchedgeError
from torchedge.texts import printable

UNFORESEEN, INTERRUPTED, NO_READER = 1, 130, 141

COMPLETION_VARIABLE = "_TORCHEDGE_COMPLETE"

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Predict": {
        "predict": ("predicting:predict", "Predict memory and latency of a training step or an inference."),
        "advise": ("predicting:advise", "Find settings under which a training step fits a device."),
        "simulate": ("predicting:simulate", "Show when a step's memory peaks, and which tensors fill it."),
        "report": ("predicting:report", "Write a prediction as one HTML page."),
        "features": ("predicting:features", "Print the prediction features of a model."),
        "search": ("searching:search", "Search a space of networks for the best one within limits."),
    },
    "Run": {
        "plan": ("planning:plan", "Plan inference of models that are larger than the memory."),
        "export": ("exporting:export", "Write a model as OpenCL kernels and weights for a device."),
        "run": ("running:run", "Run an exported bundle through OpenCL, or several in turn."),
        "verify": ("verifying:verify", "Lower a bundle's source again, and compare its kernels."),
    },
    "Devices": {
        "devices": ("listing:devices", "List devices, or one with the source of every figure."),
        "profile": (
            "measuring:profile",
            "Measure this machine's processor, or an OpenCL device for streaming or for its kernels.",
        ),
        "campaign": ("measuring:campaign", "Measure a device, point by point, until its plan is done."),
        "fit": ("fitting:fit", "Fit a device's profile to measurements."),
        "accuracy": ("scoring:accuracy", "Compare predictions with the measurements of a dataset."),
        "explain-kernel": (
            "benchmarking:explain_kernel",
            "Explain which schedule a kernel gets, and which term of its cost decides.",
        ),
        "bench": ("benchmarking:bench", "Measure how good the library's own choices are on a device."),
    },
    "Shell": {
        "doctor": ("doctoring:doctor", "Check this machine, and print the command that mends each gap."),
        "completion": ("completing:completion", "Print the completion script of a shell."),
    },
}
"""Section of the help -> command -> where it is defined, and its summary."""

_EPILOG = """\
Exit status:
  0 done; 1 unforeseen error; 2 unusable input; 3 the answer is "does not fit";
  4 doctor: something is broken; 130 interrupted
Environment:
  TORCHEDGE_DEVICE   the default device, in place of this machine
  TORCHEDGE_HOME     folder of your own profiles and config.toml
  TORCHEDGE_DEBUG=1  show tracebacks and warnings
Example:
  torchedge predict resnet50 --batch-size 32 --device jetson-tx2
"""


class _Root(Group):
    """The group of all commands: imports the module of a command when it runs or prints its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for section in SECTIONS.values():
            if cmd_name in section:
                module, _, attribute = section[cmd_name][0].partition(":")
                loaded = getattr(importlib.import_module(f"torchedge.cli.{module}"), attribute)
                assert isinstance(loaded, click.Command)
                return loaded
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(10), summary) for name, (_, summary) in section.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{_EPILOG}")


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, message="torchedge %(version)s")
def _root() -> None:
    """Predict what training a PyTorch model takes on an edge device, and run it there."""


_root.params += verbosity_options()


class _Ended(KeyboardInterrupt):
    """The system asks the command to end: raised like Ctrl-C, so that it leaves nothing half-written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise _Ended for SIGTERM and SIGHUP inside, where they would end the process (`nohup` ignores one)."""

    def end(number: int, _: object) -> None:
        raise _Ended(number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - in place of streams that the shell closed (2>&-)
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr] # Γ on a terminal without it
    try:
        with _ended_by_signals():
            status = _run(sys.argv[1:] if argv is None else list(argv))
        PrintableStream(sys.stdout).flush()
    except BrokenPipeError:
        _close_stdout()
        return NO_READER
    except _Ended as ended:
        return _report(f"ended by {signal.Signals(ended.number).name}", 128 + ended.number)
    except (KeyboardInterrupt, click.Abort):
        return _report("interrupted", INTERRUPTED)
    except (LimitError, DeviceMemoryError) as error:
        return _report(f"error: {error}", DOES_NOT_FIT, error)
    except TorchedgeError as error:
        return _report(f"error: {error}", BAD_INPUT, error)
    except click.ClickException as error:
        return _report(f"error: {_usage(error)}", BAD_INPUT, error)
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            step = "expected a path that can be used: check it, its permissions and the free space"
            return _report(f"error: {error.filename}: {error.strerror}; {step}", BAD_INPUT, error)
        told, step = f"{type(error).__name__}: {error}", f"run with {DEBUG_VARIABLE}=1 for the traceback"
        if (place := _place_in_named_file(error)) is not None:
            return _report(f"error: {place}: {told}; correct the file", BAD_INPUT, error)
        return _report(f"error: {told}; {step}", UNFORESEEN, error)
    return status


def _place_in_named_file(error: BaseException) -> str | None:
    """Return the innermost line of an error in a file that the command line names, as a score's."""
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(NAMED_FILE)
    ]
    return lines[-1] if lines else None


def _run(words: list[str]) -> int:
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(_root, {}, "torchedge", COMPLETION_VARIABLE, instruction)
    try:
        with (
            contextlib.redirect_stdout(PrintableStream(sys.stdout)),
            _root.make_context("torchedge", words) as context,
        ):
            context.meta[WORDS] = words
            status: Any = _root.invoke(context)
    except click.exceptions.Exit as end:  # after --help and --version
        return end.exit_code
    return status if isinstance(status, int) else 0


def _usage(error: click.ClickException) -> str:
    """Return a usage error with the next step."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    words = context.meta.get(WORDS, []) if context else []
    script = next((word for word in words if word.endswith(".py")), None)
    if isinstance(error, click.NoSuchOption) and words[:1] == ["predict"] and script:
        own = f"torchedge predict {script} -- {error.option_name}"
        return f"{message}; pass options of the script behind --: {own}"
    step = f"un `{context.command_path if context else 'torchedge'} --help` for what it takes"
    return f"{message} R{step}" if message.endswith("?") else f"{message}; r{step}"


def _report(message: str, status: int, error: BaseException | None = None) -> int:
    """Write one line to stderr (after the traceback, with TORCHEDGE_DEBUG=1) and return the status."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _close_stdout()
    with contextlib.suppress(OSError, ValueError):
        if error is not None and debugging():
            traceback.print_exception(error)
        print("torchedge:", printable(" ".join(message.split())), file=sys.stderr, flush=True)
    return status


def _close_stdout() -> None:
    """Point stdout to nowhere, so that Python's own flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
