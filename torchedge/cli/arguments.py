"""The parser: subcommands, the options several of them share, and what their words mean. Imports no torch."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from torchedge.errors import InputError

__all__ = ["Parser", "add_json", "add_model", "add_step", "build_parser", "positive_mib", "sizes", "whole"]

LARGEST_BATCH = 2**31 - 1
MOST_BATCHES = 1024
_AMP = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}

MODEL_HELP = """\
MODEL is a torchvision or timm name (resnet50, timm:convnext_tiny),
file.py:factory (a function without arguments that returns a module; the file
is run), or an .onnx or .pt2 file."""

_EPILOG = """\
exit status:
  0 done; 2 unusable input; 3 a run does not fit (predict --limit), nothing
  is within the limits (search, plan); 1 unforeseen error; 130 interrupted
environment:
  TORCHEDGE_DEVICE   the default device, in place of this machine
  TORCHEDGE_HOME     folder of your own profiles and config.toml
  TORCHEDGE_DEBUG=1  show tracebacks and warnings"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors: one line, and where to read on."""

    def error(self, message: str) -> NoReturn:
        """Raise the message with the next step."""
        raise InputError(f"{message}; run `{self.prog} --help` for what it takes")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=80)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each command's module is light to import."""
    from torchedge import __version__
    from torchedge.cli import (
        fitting,
        scoring,
    )

    parser = Parser(
        "torchedge",
        description="Know what training a PyTorch model takes on an edge device before running it.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"torchedge {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    modules = (
        fitting,
        scoring,
    )
    for module in modules:
        command = commands.add_parser(
            module.NAME,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


# shared options ---------------------------------------------------------------------------------------------


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what a model is captured with: input size and mode."""
    parser.add_argument(
        "--input-size",
        type=shape,
        metavar="CxHxW",
        help="shape of one sample, such as 3x224x224 (default: the model's own)",
    )
    parser.add_argument("--mode", default="train", help="train (default) or infer")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add how a training step is run."""
    parser.add_argument(
        "--optimizer",
        default="sgd-momentum",
        metavar="NAME",
        help="none, sgd, sgd-momentum (default), adam or adamw",
    )
    parser.add_argument(
        "--amp", type=amp, metavar="DTYPE", help="autocast to bfloat16 (bf16) or float16 (fp16)"
    )
    parser.add_argument(
        "--accumulation",
        type=whole,
        default=1,
        metavar="N",
        help="micro-batches gradients are accumulated over (default 1)",
    )


# what words mean --------------------------------------------------------------------------------------------


def whole(text: str) -> int:
    """Return a whole number from 1 on."""
    number = int(text) if re.fullmatch(r"[0-9]{1,10}", text.strip()) else 0
    if not 1 <= number <= LARGEST_BATCH:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return number


def sizes(text: str) -> tuple[int, ...]:
    """Return batch sizes: 32, or 32,64,128."""
    parts = text.split(",")
    if len(parts) > MOST_BATCHES:
        raise argparse.ArgumentTypeError(
            f"{len(parts)} batch sizes are given, expected at most {MOST_BATCHES}"
        )
    return tuple(dict.fromkeys(whole(part) for part in parts))


def shape(text: str) -> tuple[int, ...]:
    """Return the shape of a sample: 3x224x224."""
    parts = re.split(r"[x×,]", text.strip().lower())
    if len(parts) > 8:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} has {len(parts)} dimensions, expected at most 8")
    try:
        return tuple(whole(part) for part in parts)
    except argparse.ArgumentTypeError:
        message = f"{text[:40]!r} is not a shape of one sample such as 3x224x224"
        raise argparse.ArgumentTypeError(message) from None


def amp(text: str) -> str:
    """Return the dtype of autocast by its full name."""
    return _AMP.get(text.lower(), text.lower())


def positive_mib(text: str) -> float:
    """Return a positive number of MiB."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of MiB")
    return number


def confidence(text: str) -> float:
    """Return a one-sided confidence."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.5 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.5 up to, but not including, 1")
    return number
