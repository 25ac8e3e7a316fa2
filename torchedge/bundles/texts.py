"""Text of language models: tokens of words and back, by a tokenizer file of the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchedge.errors import InputError, check_path, first_line, needed


class Tokenizer:
    """What a tokenizer.json describes. Raises InputError for another file."""

    def __init__(self, path: str | Path) -> None:
        with needed("tokenizers", purpose="reading a tokenizer"):
            import tokenizers
        self._file = check_path("tokenizer", path)
        if not self._file.is_file():
            raise InputError(f"{self._file}: there is no such file; expected a tokenizer.json")
        try:
            self._made = tokenizers.Tokenizer.from_file(str(self._file))
        except Exception as error:
            raise InputError(
                f"{self._file}: is no tokenizer ({first_line(error)}); expected a tokenizer.json, as "
                "save_pretrained of a fast tokenizer of transformers writes it"
            ) from error

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts at its ends."""
        tokens: list[int] = self._made.encode(text).ids
        if not tokens:
            raise InputError("the text has no token; expected some")
        return tokens

    def numbers(self, tokens: Iterable[int | str]) -> list[int]:
        """Return tokens, given by number or name, as numbers."""
        numbers = []
        for token in [tokens] if isinstance(tokens, str) else tokens:
            number = self._made.token_to_id(token) if isinstance(token, str) else token
            if number is None:
                raise InputError(
                    f"{token!r} is no token of {self._file.name}; expected one, as a name or a number"
                )
            numbers.append(number)
        return numbers

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._made.decode(list(tokens))
        return text

    def pieces(self, stream: Callable[[str], object]) -> Callable[[int], None]:
        """Return a function of each token of a text, which calls `stream` with what is whole by then."""
        from tokenizers.decoders import DecodeStream

        decoding: Any = DecodeStream(skip_special_tokens=True)

        def take(token: int) -> None:
            piece = decoding.step(self._made, token)
            if piece:
                stream(piece)

        return take
