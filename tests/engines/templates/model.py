"""What a model says in a conversation: random words, thoughts and calls, as random tokens of its own spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.engines.templates.families import Family

_WORDS = (
    "clock",
    "émigré",
    "日本",
    "the room",
    "\u200d👩‍🚀",
    "a b",
    "x_1",
    "“so”",
    "1.0",
    "\ttab",
    "\nline",
    "  two",
    "{}",
    "</b>",
)
_ODD, _CUT = 0.15, 0.12


@dataclass(frozen=True)
class Answer:
    """thoughts, text, calls: what the engine's parsers make of the tokens. A call has an id, a name and its arguments,
    as the model spelt them. finish, stop: as the engine names them. is_cut: whether no token ends the turn."""

    tokens: list[int]
    text: str
    thoughts: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    finish: str = "stop"
    stop: int | str | None = None
    is_cut: bool = False

    @property
    def logprobs(self) -> list[float]:
        """Exact as float32."""
        return [-(place % 64 + 1) / 64 for place in range(len(self.tokens))]


def answer_of(family: Family, chance: Random, mark: str, *, has_tools: bool) -> Answer:
    """mark: a word that the answer says, by which it is found in a rendering; an empty answer says nothing."""
    thoughts = _words(chance) if family.thinks and chance.random() < 0.6 else ""
    calls: tuple[tuple[str, str, str], ...] = ()
    text = "" if chance.random() < 0.05 else f"{mark} {_words(chance)}"
    if has_tools and chance.random() < 0.5:
        numbers = range(chance.choice((1, 1, 2, 3)))
        calls = tuple((_id(mark, number), "look", _arguments(chance, f"{mark}{number}")) for number in numbers)
        text = "" if chance.random() < 0.7 else text
    tokens = spelt(family, chance, thoughts, text, calls)
    finish = "tool_calls" if calls else "stop"
    if tokens and chance.random() < _CUT:
        stop = chance.choice((None, "!"))
        return Answer(tokens, text, thoughts, calls, "stop" if stop else "length", stop, is_cut=True)
    end = family.call_end if calls and family.call_end else family.end
    if chance.random() < _ODD:
        end = chance.choice(family.ends)
    number = family.encode(end)[0]
    stop_id = None if end == family.end else number
    return Answer([*tokens, number], text, thoughts, calls, finish, stop_id)


def _words(chance: Random) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(chance.randint(1, 8))).strip()


def _arguments(chance: Random, mark: str) -> str:
    values: dict[str, Any] = {
        "at": f"{mark} {_words(chance)}",
        "count": chance.choice((1, 1.5, None, [1, 2], {"a": "é"})),
    }
    odd = chance.random() < 0.4
    return json.dumps(values, ensure_ascii=odd, separators=(",", ":") if odd else None)


def _id(mark: str, number: int) -> str:
    """Mistral's templates take ids of nine letters and digits alone."""
    return f"c{re.sub(r'[^0-9]', '', mark)}n{number}".rjust(9, "z")[:9]


def spelt(family: Family, chance: Random, thoughts: str, text: str, calls: Iterable[tuple[str, str, str]]) -> list[int]:
    """The tokens of an answer without its end. In three of ten some words are split otherwise than the tokenizer
    does."""
    text = f"<think>{thoughts}</think>{text}" if thoughts else text
    text += "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' for _, name, arguments in calls
    )
    if len(text) < 4 or chance.random() > 0.3:
        return family.encode(text)
    places = sorted(chance.sample(range(1, len(text)), min(3, len(text) - 1)))
    parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    return [token for part in parts for token in family.encode(part)]
