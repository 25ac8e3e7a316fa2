"""Journals of measurements of a device, which a second start of the same command continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torchedge.errors import InputError, ProfileError
from torchedge.storage.journals import Journal

Row = dict[str, Any]
_Key = TypeVar("_Key")


@contextmanager
def continued(
    out: Path, environment: Row, fixed: Sequence[str], key_of: Callable[[Row], _Key]
) -> Iterator[tuple[Journal, dict[_Key, Row]]]:
    """Open a journal that begins with its environment; yield it with its rows by key.

    fixed: entries of the environment that must be those of the journal. key_of: raises KeyError, TypeError or
    ValueError for what is no row. Raises InputError for another environment, ProfileError for another file.
    """
    done: dict[_Key, Row] = {}
    with Journal(out) as journal:
        empty = True
        for number, (_, row) in enumerate(journal.rows(), start=1):
            known, empty = dict(row), False
            if known.get("row") == "environment":
                for name in fixed:
                    if known.get(name) != environment[name]:
                        raise InputError(
                            f"{out}: was measured with {name} {str(known.get(name))[:60]}, now "
                            f"{environment[name]}; choose another --out"
                        )
                continue
            try:
                done[key_of(known)] = known
            except (KeyError, TypeError, ValueError) as error:
                command = " ".join(environment["command"].split()[:3])
                raise ProfileError(
                    f"{out} line {number}: is no row of `{command}`; choose another --out"
                ) from error
        if empty:
            journal.append(environment)
        yield journal, done
