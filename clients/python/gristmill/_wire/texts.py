"""Rules for strings that clients send."""

from __future__ import annotations

from gristmill.errors import InvalidArgumentError


def check_length(text: str, most: int, subject: str, remedy: str) -> None:
    """Raises InvalidArgumentError for a string of more than `most` characters."""
    if len(text) > most:
        raise InvalidArgumentError(f"{subject} has {len(text)} characters, and the limit is {most}; {remedy}")


def check_text(text: str, subject: str) -> None:
    """Raises InvalidArgumentError for a string that cannot be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{subject} is {text!r}, which is not valid Unicode: {error.reason}") from None
