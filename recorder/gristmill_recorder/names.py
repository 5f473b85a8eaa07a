"""Reads the trajectory of a call from its URL or its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from gristmill.errors import InvalidArgumentError

HEADER = "x-gristmill-"
_KEYS = ("runs", "uid", "sample", "round", "attempt")
_EXAMPLE = "/runs/my-run/uid/prompt-1/sample/0/v1"
INT32_MAX = 2**31 - 1


class TrajectoryName(NamedTuple):
    """The name of a trajectory. attempt: the agent increases it by one when it samples the trajectory again."""

    run: str
    uid: str
    sample: int
    round: int
    attempt: int

    def __str__(self) -> str:
        text = f"run {self.run!r} uid {self.uid!r} sample {self.sample}"
        text += f" round {self.round}" if self.round else ""
        return text + (f" attempt {self.attempt}" if self.attempt else "")


def split(path: str, headers: Mapping[str, str]) -> tuple[TrajectoryName | None, str]:
    """Returns the trajectory that a call names, or None, and the rest of its path, such as `v1/chat/completions`.

    path: the raw path, still escaped: a uid may contain a `/` as `%2F`. It begins with `/runs/RUN/uid/UID/sample/N`,
        and may continue with `/round/N` and `/attempt/N`. If it names no trajectory, the headers `x-gristmill-run`,
        `-uid`, `-sample`, `-round` and `-attempt` are read.
    Raises InvalidArgumentError, which names the invalid part.
    """
    values: dict[str, str] = {}
    parts = path.lstrip("/").split("/")
    while len(parts) > 1 and parts[0] in _KEYS and parts[0] not in values:
        values[parts[0]] = unquote(parts[1])
        parts = parts[2:]
    rest = "/".join(parts)
    if not values:
        names = {key: headers.get(f"{HEADER}{key.removesuffix('s')}") for key in _KEYS}
        values = {key: value for key, value in names.items() if value is not None}
        # aiohttp decodes bytes that are not UTF-8 as lone surrogates.
        if any("\ud800" <= letter <= "\udfff" for value in values.values() for letter in value):
            raise InvalidArgumentError(
                f"a header {HEADER}... is not UTF-8; encode it, or use a base URL like {_EXAMPLE}"
            )
    return (_name(values) if values else None), rest


def _name(values: Mapping[str, str]) -> TrajectoryName:
    for key in ("runs", "uid", "sample"):
        if not values.get(key):
            raise InvalidArgumentError(
                f"the call names no {key.removesuffix('s')}; use a base URL that ends like {_EXAMPLE}, or set the "
                f"headers {HEADER}run, {HEADER}uid and {HEADER}sample"
            )
    sample, round_, attempt = (_number(key, values.get(key, "0")) for key in ("sample", "round", "attempt"))
    return TrajectoryName(values["runs"], values["uid"], sample, round_, attempt)


def _number(key: str, text: str) -> int:
    if (number := int32_of(text)) is None:
        raise InvalidArgumentError(f"{key} is {text[:20]!r}; use a number from 0 to {INT32_MAX}, as in {_EXAMPLE}")
    return number


def int32_of(text: str) -> int | None:
    """Parses a number from 0 to INT32_MAX, written in digits. Returns None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(INT32_MAX))):
        return None
    return number if (number := int(text)) <= INT32_MAX else None
