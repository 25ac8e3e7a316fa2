"""`torchedge verify`: what a bundle holds is what its source is lowered to."""

from __future__ import annotations

from pathlib import Path

import click

from torchedge.cli.console import answer, print_wrapped
from torchedge.cli.options import PATH, command


@command("verify", examples=["torchedge verify squeezenet", "torchedge verify squeezenet --json"])
@click.argument("bundle", type=PATH)
def verify(bundle: Path) -> int:
    """Lower a bundle's source again, and compare its kernels.

    Launches and tensors are compared like kernels, and all files are hashed and checked. Nothing runs, and no
    device is needed. `torchedge run` does the same once for each bundle and version, and keeps a note in the
    cache folder; this command reads no note.
    The exit status is 2 if anything differs.
    """
    from torchedge.bundles.bundle import load_bundle

    opened = load_bundle(bundle, prove=True)
    programs = [*opened.programs.values()]
    document = {
        "bundle": str(bundle),
        "verified": True,
        "files": len(opened.manifest.files),
        "programs": len(programs),
        "kernels": len({kernel.digest for program in programs for kernel in program.kernels}),
        "launches": sum(len(program.launches) for program in programs),
        "tensors": sum(len(program.tensors) for program in programs),
    }

    def show() -> None:
        counts = ", ".join(f"{document[name]:,} {name}" for name in ("kernels", "launches", "tensors"))
        print_wrapped(f"{bundle}: {counts} are those that this version lowers its source to")
        print_wrapped(f"{document['files']} files have the hashes of the manifest")

    answer(document, show)
    return 0
