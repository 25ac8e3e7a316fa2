"""The journal of a search: all evaluated candidates, with which a killed search continues.

The settings and the figures of candidates determine a search. To continue, it starts again and looks up
the candidates in the journal. The first row is a header with the settings; each other row is one round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError
from torchedge.searching.spaces import Genes
from torchedge.storage.codecs import shortened
from torchedge.storage.documents import writing
from torchedge.storage.journals import Journal
from torchedge.storage.replacing import make_folder

SCHEMA = "torchedge-search-1"

FloatArray = npt.NDArray[np.float64]
Record = tuple[tuple[float, ...], float]
"""Figures (NaN: not computed) and score (NaN: above a constraint, so never scored) of a candidate."""


class _Candidates(msgspec.Struct):
    """A row of candidates: genes (C, G), figures (C, F) and scores (C,); None: not computed."""

    genes: tuple[tuple[Annotated[int, msgspec.Meta(ge=-(2**15), lt=2**15)], ...], ...]
    figures: tuple[tuple[float | None, ...], ...]
    scores: tuple[float | None, ...]


class SearchJournal:
    """Records of candidates, on disk where a path is given. Use it as a context.

    records: by genes, the candidates in the file when it was opened.
    Raises InputError for a file of another search and ProfileError for one that cannot be read.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = {"schema": SCHEMA, **header}
        self.records: dict[bytes, Record] = {}
        self._stack = ExitStack()
        self._file: Journal | None = None

    def __enter__(self) -> SearchJournal:
        if self.path is None:
            return self
        with writing(self.path, "choose another place for the journal", InputError):
            make_folder(self.path.parent)
        with self._stack:
            self._file = self._stack.enter_context(Journal(self.path, error=InputError))
            count = 0
            for count, (_, row) in enumerate(self._file.rows(), start=1):
                if count == 1:
                    self._check_header(row)
                else:
                    self._record(row, count)
            if not count:
                self._file.append(self.header)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, genes: Genes, figures: FloatArray, scores: FloatArray) -> None:
        """Write candidates (C, G) with figures (C, F) and scores (C,); they are on disk when this returns."""
        if self._file is not None and len(genes):
            row = {
                "genes": genes.tolist(),
                "figures": [_without_nan(values) for values in figures.tolist()],
                "scores": _without_nan(scores.tolist()),
            }
            self._file.append(row)

    def _check_header(self, row: Mapping[str, Any]) -> None:
        expected = json.loads(json.dumps(self.header))
        for key in (*expected, *row):
            if row.get(key) != expected.get(key):
                raise InputError(
                    f"{self.path} is the journal of another search ({key} is {shortened(row.get(key))}, "
                    f"here {shortened(expected.get(key))}); continue that one, or choose another file"
                )

    def _record(self, row: Mapping[str, Any], number: int) -> None:
        columns = len(self.header["figures"])
        try:
            candidates = msgspec.convert(row, _Candidates)
            genes = np.array(candidates.genes, dtype=np.int16)
            figures = np.array(candidates.figures, dtype=np.float64)
        except (msgspec.ValidationError, ValueError) as error:
            raise InputError(f"{self.path} line {number}: holds no candidates; delete the file") from error
        scores = np.array(candidates.scores, dtype=np.float64)
        count = len(scores)
        if genes.shape != (count, self.header["genes"]) or figures.shape != (count, columns):
            raise InputError(f"{self.path} line {number}: holds another number of genes; delete the file")
        for key, values, score in zip(genes, figures.tolist(), scores.tolist(), strict=True):
            self.records[key.tobytes()] = (tuple(values), score)


def _without_nan(values: list[float]) -> list[float | None]:
    """Return numbers with None in place of NaN, which JSON lacks."""
    return [None if math.isnan(value) else value for value in values]
