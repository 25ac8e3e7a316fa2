"""Rows of CSV tables, converted to declared types."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from torchedge.errors import ProfileError


def parse_table(source: object, data: bytes, columns: Mapping[str, Any], what: str) -> Iterator[Any]:
    """Yield the values of some columns of each row of a CSV table with a head; an empty cell is None.

    columns: names with the types of their values. what: the kind of row; errors name it and `source`.

    Raises:
        ProfileError: the data is no such table; the message names the line.
    """
    row_type: Any = tuple.__class_getitem__(tuple(columns.values()))
    expected = ", ".join(columns)
    try:
        reader = csv.DictReader(data.decode("utf-8").splitlines(), restval="(cut off)")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{source}: not UTF-8 text ({error}); expected a CSV table") from error
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(f"{source}: column {missing[0]!r} is missing; expected {expected}")
        for row in reader:
            yield msgspec.convert([row[name] or None for name in columns], row_type, strict=False)
    except (msgspec.ValidationError, csv.Error) as error:
        reason = re.sub(r"\$\[(\d+)\]", lambda match: list(columns)[int(match[1])], str(error))
        raise ProfileError(
            f"{source} line {reader.line_num}: not {what} ({reason}); expected {expected}"
        ) from error
