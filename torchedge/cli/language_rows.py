"""The table of a language model's settings in torchedge's own runtime, of `plan lm` and of `advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchedge.cli.console import MIB, print_notes, print_table, print_wrapped
from torchedge.storage.amounts import bytes_of
from torchedge.texts import number

if TYPE_CHECKING:
    from torchedge.bundles.language_plans import LanguageRow


def print_language_rows(device: str, tables: Mapping[str, Sequence[LanguageRow]], more: str = "") -> None:
    """Print the plan of one setting, or a table of several with the reasons of those without a plan.

    tables: rows by the name of their model. more: what stands behind the names.
    """
    rows = [row for table in tables.values() for row in table]
    plans = [row.plan for row in rows if row.plan is not None]
    if len(rows) == 1 and plans:
        print(plans[0])
    else:
        provenance = plans[0].provenance if plans else "nothing fits"
        print_wrapped(f"{', '.join(tables)} on {device} ({provenance}){more}")
        head = ["weights", "tokens", "LoRA", "limit MiB", "memory MiB", "streamed", "again", "first ms"]
        head += ["token ms", "tokens/s", "step ms"]
        named = len(tables) > 1
        body = [[*([name] * named), *_cells(row)] for name, table in tables.items() for row in table]
        print_table([*(["model"] * named), *head], body, left=1 + named)
        if any(plan.recomputed for plan in plans):
            print_wrapped("again: arithmetic that a training step repeats to hold fewer activations")
        for row in rows:
            if row.plan is not None and row.plan.parts > 1:
                parts = f"a step takes {row.settings.batch} texts in {row.plan.parts} equal parts"
                print_wrapped(f"{row.settings.quantize or row.settings.precision}: {parts}")
        for reason in dict.fromkeys(row.reason for row in rows if row.reason):
            print_wrapped(reason, first="not planned: ", rest="  ")
    print_notes(*(plan.notes for plan in plans))


def _cells(row: LanguageRow) -> list[str]:
    from torchedge.bundles.language_plans import LanguagePlan

    own, plan = row.settings, row.plan
    limit = "" if own.memory_limit is None else number(bytes_of(own.memory_limit) / MIB)
    cells = [own.quantize or own.precision, str(own.max_length), str(own.lora or ""), limit]
    if plan is None:
        return [*cells, "-", *[""] * 6]
    times = (
        [plan.first_token.value, plan.token.value, plan.tokens_per_s]
        if isinstance(plan, LanguagePlan)
        else []
    )
    return [
        *cells,
        number(plan.total_bytes / MIB),
        number(plan.streamed_bytes / MIB) if plan.streamed_bytes else "",
        f"{100 * plan.recomputed.operations:.0f} %" if plan.recomputed else "",
        *(map(number, times) if times else [""] * 3),
        "" if plan.step is None else number(plan.step.value),
    ]
