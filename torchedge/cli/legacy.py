"""Commands that argparse still reads."""

from __future__ import annotations

import argparse
from typing import Any

import click

from torchedge.cli.arguments import build_parser
from torchedge.errors import InputError


def _legacy(name: str) -> click.Command:
    @click.command(
        name,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        add_help_option=False,
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def call(words: tuple[str, ...]) -> int:
        try:
            arguments = build_parser().parse_args([name, *words])
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        try:
            status: Any = arguments.run(arguments)
        except argparse.ArgumentTypeError as error:
            raise InputError(str(error)) from error
        except SystemExit as end:
            raise InputError(
                f"the model's own code ended the program (exit {end.code}); remove that call"
            ) from end
        return int(status)

    return call


fit, accuracy = _legacy("fit"), _legacy("accuracy")
