"""What tokens say, by a tokenizer of the tokenizers library, read from a file: nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gristmill.errors import InvalidArgumentError


class TokenTexts:
    """A tokenizer. path: a tokenizer.json, or the directory that has one. Raises InvalidArgumentError where there is
    none, and where the library is not installed."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InvalidArgumentError(
                f"tokenizer is {path} and the tokenizers library is not installed: pip install 'gristmill[tokenizer]'"
            ) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more definite
            raise InvalidArgumentError(
                f"tokenizer: {file} cannot be read: {error}; give the tokenizer.json of the model that is trained"
            ) from None

    def of(self, tokens: Iterable[int]) -> dict[int, str]:
        """The text of each token alone; those that the tokenizer does not know are left out."""
        size = self._tokenizer.get_vocab_size()
        known = (token for token in tokens if 0 <= token < size)
        return {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in known}
