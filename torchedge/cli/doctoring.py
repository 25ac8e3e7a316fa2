"""`torchedge doctor`: what works on this machine, and how to mend what does not."""

from __future__ import annotations

from torchedge.cli.console import answer, print_wrapped
from torchedge.cli.options import command

BROKEN = 4
"""Exit status: something is installed and cannot be used."""


@command("doctor", examples=["torchedge doctor", "torchedge doctor --json"])
def doctor() -> int:
    """Check this machine, and print the command that mends each gap.

    Python, PyTorch, torchvision, GPUs and their driver, OpenCL devices, profiles, folders and optional
    packages are looked at. The exit status is 4 if something is broken, 0 if at most optional parts
    are missing.
    """
    from torchedge.profiling.doctoring import examine

    findings = examine()
    broken = any(finding.verdict == "broken" for finding in findings)

    def show() -> None:
        for finding in findings:
            print_wrapped(finding.detail, first=f"{finding.verdict:<8}{finding.subject:<16}", rest=" " * 24)
            if finding.command:
                print(f"{'':<24}mend: {finding.command}")
        print()
        print("something is broken: run the commands above" if broken else "all that is needed works")

    answer({"works": not broken, "findings": findings}, show)
    return BROKEN if broken else 0
