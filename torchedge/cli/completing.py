"""`torchedge completion`: the script that makes a shell complete commands, options and devices."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from torchedge.cli.options import Choice

_EXAMPLES = """\
\b
Examples:
  eval "$(torchedge completion bash)"                                     # in ~/.bashrc
  eval "$(torchedge completion zsh)"                                      # in ~/.zshrc
  torchedge completion fish > ~/.config/fish/completions/torchedge.fish
"""


@click.command(epilog=_EXAMPLES)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, options and the names of devices.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root()
    click.echo(kind(root.command, {}, "torchedge", "_TORCHEDGE_COMPLETE").source())
