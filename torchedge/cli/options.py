"""Commands and the options that several of them share; models named on the command line. Imports no torch.

Every command takes --json, -q, -v and -h. Parameters have Python's names: `--memory-limit` is `memory_limit`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from torchedge.cli.console import JSON, MIB, VERBOSITY, verbosity, warn
from torchedge.errors import CaptureError, InputError, TorchedgeWarning, check_path, did_you_mean
from torchedge.storage.amounts import bytes_of, is_ambiguous
from torchedge.storage.pictures import check_picture

DEBUG_VARIABLE = "TORCHEDGE_DEBUG"
"""If set to anything but 0, tracebacks and warnings of libraries are shown."""

OPTIMIZERS = (
    "none", "sgd", "sgd-momentum", "adam", "adamw", "adafactor", "adagrad", "adadelta", "adamax",
    "adamw-8bit", "asgd", "nadam", "radam", "rmsprop", "rprop",
)  # fmt: skip
AMP = ("bfloat16", "float16")
MODEL_HELP = """\
MODEL is a torchvision or timm name (resnet50, timm:convnext_tiny), file.py:factory (a function without
arguments that returns a module; the file is run), hf:CONFIG.json (a configuration file of transformers;
hf:CONFIG.json:BertForMaskedLM names the architecture), or an .onnx or .pt2 file."""


if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic in new releases of click alone

# types of values --------------------------------------------------------------------------------------------


class TextType(_Type):
    """A value that a function makes of text; the function raises InputError for other text."""

    def __init__(self, name: str, make: Callable[[str], Any]) -> None:
        self.name, self.make = name, make

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - text or a default
        """Return the value."""
        try:
            return self.make(value) if isinstance(value, str) else value
        except InputError as error:
            self.fail(f"{error}.", param, ctx)


def whole(low: int = 1, high: int = 2**31 - 1) -> TextType:
    """Return the type of whole numbers within bounds; errors distinguish text, too small and too large."""

    def make(text: str) -> int:
        text, bounds = text.strip(), f"a whole number from {low} to {high}"
        if not re.fullmatch(r"-?[0-9]+", text, re.ASCII):
            raise InputError(f"{text[:40]!r} is not {bounds}")
        number = int(text[:19])  # longer ones are beyond all bounds
        if not low <= number <= high:
            size = "small" if number < low else "large"
            raise InputError(f"{text[:40]} is too {size}; expected {bounds}")
        return number

    return TextType("N", make)


def number_from(low: float, high: float, *, name: str = "X", below: bool = False) -> TextType:
    """Return the type of numbers from `low` to `high`, or below `high`."""

    def make(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high or (below and number == high):
            bounds = f"from {low:g} to {'below ' * below}{high:g}"
            raise InputError(f"{text[:40]!r} is not a number {bounds}")
        return number

    return TextType(name, make)


def whole_numbers(name: str, separators: str, most: int, what: str, *, distinct: bool) -> TextType:
    """Return the type of whole numbers with separators between them, each once if they are to be distinct."""

    def make(text: str) -> tuple[int, ...]:
        parts = re.split(separators, text.strip().lower())
        if len(parts) > most:
            raise InputError(f"{text[:40]!r} has {len(parts)} numbers; expected at most {most}")
        try:
            numbers = [WHOLE.make(part) for part in parts]
        except InputError as error:
            raise InputError(f"{error}. Expected {what}") from None
        return tuple(dict.fromkeys(numbers) if distinct else numbers)

    return TextType(name, make)


def _memory_size(text: str) -> str:
    """Return an amount of memory in bytes, as text with its unit; print how 4G and 4GB are understood."""
    nbytes = bytes_of(text, "the amount of memory")
    if is_ambiguous(text):
        warn(f"{text.strip()} is read as {nbytes / MIB:,.1f} MiB", "note")
    return f"{nbytes}B"


def or_word(kind: TextType, word: str) -> TextType:
    """Return the type of values of another type, or one word (which stays text: click skips None)."""
    return TextType(f"{kind.name}|{word}", lambda text: word if text.lower() == word else kind.make(text))


class Choice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2 only
    """One of some words; an error names the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Return the word."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = did_you_mean(value, map(str, self.choices))
            return self.fail(f"{error.message.rstrip('.')}{near and f': {near}'}", param, ctx)


class _Device(_Type):
    """A device's name, alias or profile folder; completes names."""

    name = "DEVICE"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the devices whose names begin so."""
        from torchedge.devices import scan_profiles

        names = [device.name for device in scan_profiles().devices]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


WHOLE = whole()
SIZE = TextType("SIZE", _memory_size)
BATCH_SIZES = whole_numbers("N[,N...]", ",", 1024, "numbers such as 32,64,128", distinct=True)
SHAPE = whole_numbers("CxHxW", "[x×,]", 8, "the shape of one sample such as 3x224x224", distinct=False)
CONFIDENCE = number_from(0.5, 1.0, name="P", below=True)
DEVICE = _Device()


class _NamedPath(click.Path):
    """A path, refused where it can be none: Path("") would be the current folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:  # noqa: ANN401 - as click's
        try:
            return super().convert(check_path("the path", value), param, ctx)
        except InputError as error:
            self.fail(f"{error}.", param, ctx)


class OutputFile(_NamedPath):
    """A file to write, in a folder that exists; its name ends in one of the suffixes, where there are any."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path)
        self.suffixes = suffixes

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:  # noqa: ANN401 - as click's
        """Return the path; raises InputError where no such file can be written."""
        path = super().convert(value, param, ctx)
        if ctx is None or not ctx.resilient_parsing:  # completion parses what is not written yet
            self.check(f"--{param.name}".replace("_", "-") if param else "the file", path)
        return path

    def check(self, option: str, path: Path) -> None:
        """Raise InputError for a file that cannot be written."""
        if self.suffixes and not path.name.lower().endswith(self.suffixes):
            raise InputError(f"{option} is {path}; expected a file that ends in {' or '.join(self.suffixes)}")
        if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
            raise InputError(f"{option} is {path}; expected a file in a folder that exists; correct the path")


class _Picture(OutputFile):
    """A picture to write; matplotlib has to be there."""

    def check(self, option: str, path: Path) -> None:
        """Raise InputError or MissingExtraError for a picture that cannot be drawn."""
        check_picture(option, path)


PATH = _NamedPath(path_type=Path)
PICTURE = _Picture()

# shared options ---------------------------------------------------------------------------------------------

_DEVICE_HELP = "Name, alias or profile folder of the device; `torchedge devices` lists them."
device = click.option("--device", "-d", type=DEVICE, help=f"{_DEVICE_HELP} [default: this machine]")
operator_us = click.option(
    "--operator-us",
    type=click.FloatRange(min=0, min_open=True),
    help="Microseconds of your host for one launch of eager PyTorch (`torchedge.measure_operator_us()`). "
    "[default: the median of the hosts that were met]",
)
batch_sizes = click.option(
    "--batch-size", "-b", type=BATCH_SIZES, default="1", help="Samples in a batch; several give a row each."
)
batch_size = click.option("--batch-size", "-b", type=WHOLE, default=1, help="Samples in a batch.")
input_size = click.option(
    "--input-size",
    type=SHAPE,
    metavar="CxHxW",
    help="Shape of one sample, such as 3x224x224. [default: the model's own]",
)
mode = click.option(
    "--mode", type=Choice(["train", "infer"]), default="train", help="Training step or inference."
)
optimizer = click.option(
    "--optimizer",
    type=Choice(OPTIMIZERS),
    default="sgd-momentum",
    metavar="NAME",
    help=f"Optimizer of the step: {', '.join(OPTIMIZERS)}.",
)


class _Autocast(Choice):
    """A dtype of autocast; "bf16" and "fp16" are understood too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Return the dtype's name."""
        from torchedge.graphs.training_steps import dtype_named

        return super().convert(dtype_named(value), param, ctx)


amp = click.option("--amp", type=_Autocast(AMP), help="Data type of autocast. [default: no autocast]")
accumulation = click.option(
    "--accumulation", type=WHOLE, default=1, help="Micro-batches that gradients accumulate over."
)
seq_len = click.option("--seq-len", type=WHOLE, help="Length of the sequences of a model that reads any.")
precision = click.option(
    "--precision",
    type=Choice(["float32", "float16"]),
    default="float32",
    help="Of stored weights and large intermediates; kernels compute in float32.",
)
opencl_device = click.option("--device", "-d", help="OpenCL device: its number, type or a part of its name.")


def all_of(*options: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds several options, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


fit = all_of(
    click.option(
        "--memory-limit", type=SIZE, help="Memory to fit into: MiB, or 4GiB. [default: the device's]"
    ),
    click.option("--confidence", type=CONFIDENCE, default=0.95, help="Confidence required of 'fits'."),
)
step = all_of(mode, input_size, seq_len, optimizer, amp, accumulation)


def _flag(*names: str, key: str, value: int, text: str) -> click.Option:
    """Return a flag that the context keeps under a key: commands do not take it, `console` reads it."""

    def keep(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            context.meta[key] = value

    return click.Option(names, is_flag=True, expose_value=False, callback=keep, help=text)


def verbosity_options() -> list[click.Parameter]:
    """Return -q and -v."""
    quiet, verbose = "Print no progress and no warnings.", "Print stages and the warnings of libraries."
    return [
        _flag("--quiet", "-q", key=VERBOSITY, value=-1, text=quiet),
        _flag("--verbose", "-v", key=VERBOSITY, value=1, text=verbose),
    ]


# commands ---------------------------------------------------------------------------------------------------


_PYTHON_ALONE = {
    "watch": "`torchedge predict train.py` predicts the step of a script, torchedge.watch one in Python",
    "train": "torchedge.Trainer trains in Python, `torchedge run BUNDLE` a bundle of --mode train",
    "capture": "torchedge.capture makes graphs in Python, `torchedge features` prints what is in one",
    "quantize": "torchedge.quantize is for Python, `torchedge plan lm` compares formats of weights",
}
"""What to run where a word is no command, but a function of the library."""


class Group(click.Group):
    """A group of commands that prints its help when it is called bare, with whole summaries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(*args, **kwargs)
        self.no_args_is_help, self.invoke_without_command = False, True

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - an exit status or None
        """Run the command that is named; without one print the help."""
        status = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
        return status

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named; without it suggest another one."""
        word, names = args[0][:40], self.list_commands(ctx)
        if self.get_command(ctx, args[0]) is None and not word.startswith("-"):
            near = difflib.get_close_matches(word, names, n=1)
            if word in _PYTHON_ALONE and ctx.parent is None:
                ctx.fail(f"No such command {word!r}: {_PYTHON_ALONE[word]}")
            if near or ctx.parent is None:
                ctx.fail(f"No such command {word!r}." + "".join(f" Did you mean {name!r}?" for name in near))
            choices, last = ", ".join(self.commands), args[1] if len(args) > 1 else "-"
            last = word if last.startswith("-") else last
            example = f"{ctx.command_path} {next(iter(self.commands))} {last}"
            ctx.fail(
                f"No such command {word!r} of {ctx.command_path}; expected one of {choices}, for example "
                f"`{example}`"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each command's help."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (command.help or "").split("\n")[0]) for name, command in self.commands.items()]
            )


class Command(click.Command):
    """A command with examples in its help, --json, -q and -v; libraries' warnings are hidden while it runs.

    Its function returns an exit status, None standing for 0. `notes` end the help's text.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), notes: str = "", **kwargs: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(*args, **kwargs)
        self.help = f"{inspect.cleandoc(self.help or '')}\n\n{notes}".rstrip()
        self.examples = tuple(examples)
        text = "Print JSON in place of tables."
        self.params += [_flag("--json", "as_json", key=JSON, value=1, text=text), *verbosity_options()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; errors of the parser name this command's help."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - an exit status or None
        """Run the command; a call of sys.exit in the model's own code is an error."""
        with _silence():
            try:
                return super().invoke(ctx)
            except SystemExit as end:
                if isinstance(end.__context__, BrokenPipeError):  # rich ends the program there
                    raise end.__context__ from None
                raise InputError(
                    f"the model's own code ended the program (exit {end.code}); remove that call"
                ) from end


def command(
    name: str, *, examples: Sequence[str], notes: str = ""
) -> Callable[[Callable[..., object]], Command]:
    """Return a decorator that makes a function a command."""
    return click.command(name, cls=Command, examples=examples, notes=notes)


def debugging() -> bool:
    """Return whether TORCHEDGE_DEBUG is set."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide warnings of torch and torchvision, about code that is not the user's; print each of ours once."""
    if debugging() or verbosity() > 0:
        yield
        return
    before = logging.root.manager.disable
    once = cache(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=TorchedgeWarning)
        warnings.showwarning = lambda message, *_, **__: once(str(message))
        logging.disable(logging.ERROR)  # torch logs tracebacks of what is then raised
        try:
            yield
        finally:
            logging.disable(before)


# models -----------------------------------------------------------------------------------------------------


def refuse_given(names: Collection[str], reason: str) -> None:
    """Raise InputError for the first of some parameters that stands on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise InputError(f"{parameter.opts[0]} is given {reason}")


def load_named(text: str, *, weights: bool = False) -> tuple[Any, str]:
    """Return the model that a word names and its label; output of the model's own code goes to stderr.

    weights: give it weights, as its own code draws or loads them.
    """
    from torchedge.tracing.sources import load_model

    with contextlib.redirect_stdout(sys.stderr):
        return load_model(text, weights=weights)


@contextlib.contextmanager
def unsuitable_size(input_size: tuple[int, ...] | None) -> Iterator[None]:
    """Capture a model: its output goes to stderr; a CaptureError names `--input-size`, if given."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except CaptureError as error:
        if input_size is None:
            raise
        option = f"--input-size {'x'.join(map(str, input_size))}"
        text = str(error).replace(f"input_size={input_size}", option)
        if " raised " in text and option not in text and not text.endswith("correct the model"):
            text = f"{text.rstrip('.')}. Check that {option} is the shape of one sample, without the batch"
        raise CaptureError(text) from error
