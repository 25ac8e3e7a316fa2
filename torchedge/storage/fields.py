"""Entries of a document read from disk: each taken out once, checked for type and range, the rest refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchedge.errors import InputError

__all__ = ["MAX_TEXT", "Fields"]

MAX_TEXT = 1000
"""Characters of a text, unless told otherwise."""


class Fields:
    """One object of a JSON document; `where` is named in errors, which are InputErrors.

    Every method takes the entry of a key; `done` then refuses keys that nothing has asked for.
    """

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is {_short(value)}; expected an object")
        self.where = where
        self._values = dict(value)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        """Yield the keys that nothing has asked for yet, each printable and no longer than a text."""
        for key in list(self._values):
            if not _text(key, MAX_TEXT):
                raise InputError(f"{self.where} has the key {_short(key)}; expected printable text")
            yield key

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number from `low` to `high`."""
        value = self._take(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(key, value, f"a whole number from {low} to {high}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a number, whole where it is written so."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(
        self, key: str, default: str | None = None, *, longest: int = MAX_TEXT, empty: bool = False
    ) -> str:
        """Return printable text."""
        value = self._take(key, default)
        if not isinstance(value, str) or not (_text(value, longest) or (empty and not value)):
            raise self._wrong(key, value, f"printable text of {0 if empty else 1} to {longest} characters")
        return value

    def word(self, key: str, words: Sequence[str], default: str | None = None) -> str:
        """Return one of `words`."""
        value = self._take(key, default)
        if not isinstance(value, str) or value not in words:
            raise self._wrong(key, value, f"one of {', '.join(words)}")
        return value

    def numbers(
        self, key: str, low: int, high: int, *, most: int, default: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return a list of at most `most` whole numbers, each from `low` to `high`."""
        value = self._take(key, default)
        good = isinstance(value, (list, tuple)) and len(value) <= most
        if not good or any(type(item) is not int or not low <= item <= high for item in value):  # type: ignore[attr-defined]
            raise self._wrong(key, value, f"a list of up to {most} whole numbers from {low} to {high}")
        return tuple(value)  # type: ignore[arg-type]

    def entries(self, key: str, *, most: int, default: Sequence[object] | None = None) -> list[object]:
        """Return a list of at most `most` items of any kind."""
        value = self._take(key, default)
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise self._wrong(key, value, f"a list of up to {most}")
        return list(value)

    def below(self, key: str, default: Mapping[str, object] | None = None) -> Fields:
        """Return the object of a key as Fields of its own."""
        return Fields(f"{self.where}: {key}", self._take(key, default))

    def raw(self, key: str) -> object:
        """Return what stands at a key, for a reader of its own."""
        return self._take(key, None)

    def done(self) -> None:
        """Raise InputError for the first key that nothing asked for."""
        for key in self:
            raise InputError(
                f"{self.where} has the unknown key {_short(key)}; expected only {', '.join(self._known)}"
            )

    def _take(self, key: str, default: object) -> object:
        self._known.append(key)
        if key in self._values:
            return self._values.pop(key)
        if default is None:
            raise InputError(f"{self.where} has no {key!r}; expected {', '.join(self._known)}")
        return default

    def _wrong(self, key: str, value: object, expected: str) -> InputError:
        return InputError(f"{self.where}: {key} is {_short(value)}; expected {expected}")


def _text(value: object, longest: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"a list of {len(value)} ({_short(list(value[:4]))[1:-1]}, ...)"
    if isinstance(value, Mapping) and len(value) > 4:
        return f"an object of {len(value)} keys"
    shown = repr(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 64 else shown[:60] + "..."
