"""Which trajectory a call belongs to: its URL says it, or its headers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from gristmill.errors import InvalidArgumentError

HEADER = "x-gristmill-"
_KEYS = ("runs", "uid", "sample", "round", "attempt")
_NUMBERS = frozenset(("sample", "round", "attempt"))
_EXAMPLE = "/runs/my-run/uid/prompt-1/sample/0/v1"
_INT32_MAX = 2**31 - 1


class TrajectoryName(NamedTuple):
    """One trajectory of a run. attempt: one more than before when it is sampled anew."""

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
    """The trajectory that a call names, None where it names none, and the rest of its path, as `v1/chat/completions`.

    path: as the request has it, with its escapes: a uid may hold a `/` as `%2F`. It begins with
        `/runs/RUN/uid/UID/sample/N`, and may go on with `/round/N` and `/attempt/N`. Without these, the headers
        `x-gristmill-run`, `-uid`, `-sample`, `-round` and `-attempt` count.
    Raises InvalidArgumentError naming what is wrong.
    """
    given: dict[str, str] = {}
    parts = path.lstrip("/").split("/")
    while len(parts) > 1 and parts[0] in _KEYS and parts[0] not in given:
        given[parts[0]] = unquote(parts[1])
        parts = parts[2:]
    rest = "/".join(parts)
    if not given:
        names = {key: headers.get(f"{HEADER}{key.removesuffix('s') if key == 'runs' else key}") for key in _KEYS}
        given = {key: value for key, value in names.items() if value is not None}
    return (_name(given) if given else None), rest


def _name(given: Mapping[str, str]) -> TrajectoryName:
    for key in ("runs", "uid", "sample"):
        if not given.get(key):
            raise InvalidArgumentError(
                f"the call names no {key.removesuffix('s')}; give a base URL that ends as in {_EXAMPLE}, or the "
                f"headers {HEADER}run, {HEADER}uid and {HEADER}sample"
            )
    numbers = {key: _number(key, given.get(key, "0")) for key in _NUMBERS}
    return TrajectoryName(given["runs"], given["uid"], numbers["sample"], numbers["round"], numbers["attempt"])


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= _INT32_MAX):
        raise InvalidArgumentError(f"{key} is {text!r}; give a number from 0 on, as in {_EXAMPLE}")
    return int(text)
