"""The journal of a search: every candidate that was worked out, so that a search that was killed goes on.

A search is a function of its settings and of what its candidates came out as. To continue it is therefore
run again from its beginning, with all that the journal knows looked up. One line of JSON a round; what a
crash can leave is a torn last line, which is cut off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError
from torchedge.searching.spaces import Genes
from torchedge.storage.documents import parse_json, read_bytes

SCHEMA = "torchedge-search-1"

FloatArray = npt.NDArray[np.float64]
Record = tuple[tuple[float, ...], float]
"""Figures (NaN: not worked out) and score (NaN: not valid, so never scored) of a candidate."""

_MOST_BYTES = 1 << 30


class Journal:
    """Records of candidates, on disk where a path is given. Use it as a context.

    records: what the file held when it was opened, by genes.
    Raises InputError for a file of another search and ProfileError for one that cannot be read.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = {"schema": SCHEMA, **header}
        self.records: dict[bytes, Record] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        if self.path is None:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab")
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written ({error.strerror}); choose another place for the journal"
            ) from error
        whole = self._load()
        self._file.truncate(whole)
        if not whole:
            self._append(self.header)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _load(self) -> int:
        """Read what is there; return how many bytes of it are whole lines."""
        assert self.path is not None
        data = read_bytes(self.path, max_bytes=_MOST_BYTES)
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines()):
            document = parse_json(f"{self.path} line {number + 1}", line)
            if number == 0:
                self._check_header(document)
            else:
                self._take(document, number + 1)
        return whole

    def _check_header(self, found: Mapping[str, Any]) -> None:
        expected = json.loads(json.dumps(self.header))
        for key in (*expected, *found):
            if found.get(key) != expected.get(key):
                raise InputError(
                    f"{self.path} is the journal of another search ({key} is {_short(found.get(key))}, "
                    f"here {_short(expected.get(key))}); continue that one, or choose another file"
                )

    def _take(self, document: Mapping[str, Any], number: int) -> None:
        columns = len(self.header["figures"])
        try:
            genes = np.array(document["genes"], dtype=np.int16)
            figures = np.array(document["figures"], dtype=np.float64)
            scores = np.array(document["scores"], dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{self.path} line {number}: holds no candidates; delete the file") from error
        count = len(scores)
        if genes.shape != (count, self.header["genes"]) or figures.shape != (count, columns):
            raise InputError(f"{self.path} line {number}: holds another number of genes; delete the file")
        for row, values, score in zip(genes, figures.tolist(), scores.tolist(), strict=True):
            self.records[row.tobytes()] = (tuple(values), score)

    def add(self, genes: Genes, figures: FloatArray, scores: FloatArray) -> None:
        """Write candidates (C, G) with figures (C, F) and scores (C,); they are on disk when this returns."""
        if self._file is not None and len(genes):
            document = {"genes": genes.tolist(), "figures": _plain(figures), "scores": _plain(scores)}
            self._append(document)

    def _append(self, document: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written ({error.strerror}); make room and run the search again"
            ) from error


def _plain(values: FloatArray) -> Sequence[Any]:
    """Return numbers as lists, None for NaN."""

    def entry(value: Any) -> Any:  # noqa: ANN401 - a number or a list
        if isinstance(value, list):
            return [entry(v) for v in value]
        return None if math.isnan(value) else value

    found: list[Any] = entry(values.tolist())
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
