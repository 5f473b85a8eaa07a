"""Finds the tokens with which the engine continues a recorded answer: the *bridge*.

A chat template renders a conversation, and may render it otherwise when messages follow. So the bridge is not the
difference of two renderings with and without the new messages. Here three renderings of the same messages differ in one
place each: what follows the answer in all of them is the template's own rendering of what is new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson

Document = dict[str, Any]
Tokens = Sequence[int]

# What the answers of skeletons say: words of letters that no message has, and that differ in their last token.
WORDS = ("xqzj", "xqzk")
# Tokens before the end of an answer that a passage begins with: the whole word, whatever the tokenizer.
_BEFORE = 4
_NAMES = ("role", "name", "tool_call_id")
# Words of a user that switch how later messages are rendered (Nemotron Nano v2).
_SWITCH = re.compile("/(?:no_?)?think")
_QUESTION = {"role": "user", "content": "0"}


def skeletons(messages: Sequence[Document], count: int, *, shows_calls: bool = True) -> list[list[Document]]:
    """Returns three conversations: with one answer, with another answer, and with other words in all new messages.

    messages: of the call; the first `count` are recorded, and the last of these is the answer. Recorded messages are
    emptied, because only the roles, names, ids and switches of earlier messages can change how later ones are rendered.
    shows_calls: whether answers with calls differ in their arguments; otherwise in their words.
    """
    old, answer, new = [_emptied(message) for message in messages[:count]], messages[count - 1], messages[count:]
    first, second = ([*old[:-1], _answer(answer, word, shows_calls=shows_calls)] for word in WORDS)
    return [[*first, *new], [*second, *new], [*first, *map(_reworded, new)]]


def bridge(
    renderings: Sequence[Tokens], last: int | None, ends: Collection[int], *, is_cut: bool, has_calls: bool
) -> Tokens | None:
    """Returns the tokens that follow the answer; None if they cannot be told apart from it.

    renderings: of the three skeletons. last: the token that ended the answer; None if a limit did. ends: tokens that
    end answers of the model; empty while they are unknown. is_cut: whether the answer may have no end of turn; then the
    bridge contains the template's own, unless the answer ended by this very token. has_calls: whether it has calls;
    then the rest of a call's syntax precedes the template's end.
    """
    rest, between = _rest(renderings)
    if not between:
        return None
    if is_cut and not has_calls:
        return _without(last, rest)
    place = next((place for place, token in enumerate(between) if token == last or token in ends), None)
    # The header of the next turn, too, may contain the last token.
    is_unclear = not ends and (is_cut or (place and not has_calls))
    if place is None or is_unclear:
        return None
    return _without(last, rest[place:]) if is_cut else rest[place + 1 :]


def bridge_without_end(renderings: Sequence[Tokens], answers: Sequence[Tokens], last: int | None) -> Tokens | None:
    """Returns the tokens that follow the answer in a template that has no end of turn, and only begins the next turn.

    renderings: of the three skeletons. answers: of the first two without the new messages. last: see `bridge`.
    """
    rest, between = _rest(renderings)
    return _without(last, rest[len(_common_beginning(rest, _common_ending(*answers))) :]) if between else None


def _without(last: int | None, following: Tokens) -> Tokens:
    """Returns the tokens that follow the answer, without its own last one."""
    return following[1:] if following and following[0] == last else following


def _rest(renderings: Sequence[Tokens]) -> tuple[Tokens, Tokens]:
    """Returns what follows the answer, and of this what precedes the words of the new messages: only there can the
    answer have ended, because new messages may contain ends of turns too."""
    first, other_answer, other_words = renderings
    if first in (other_answer, other_words):
        return [], []
    rest = _common_ending(first, other_answer)
    return rest, rest[: max(0, len(_common_beginning(first, other_words)) - (len(first) - len(rest)))]


def passage(renderings: Sequence[Tokens], following: Tokens) -> Tokens:
    """Returns the tokens around the end of the answer in the first skeleton, from its last words to the bridge."""
    first, other_answer, _ = renderings
    end = len(first) - len(_common_ending(first, other_answer))
    return first[max(0, end - _BEFORE) : len(first) - len(following)]


def following_passage(passage: Tokens, rendering: Tokens) -> Tokens | None:
    """Returns the tokens that follow the passage in a first skeleton; None if it is not there, or there twice."""
    length = len(passage)
    begins = [place for place, token in enumerate(rendering) if token == passage[0]]
    ends = [place + length for place in begins if rendering[place : place + length] == passage]
    return rendering[ends[0] :] if len(ends) == 1 else None


def may_contain_passages(values: Any) -> bool:
    """Returns whether the messages and settings contain the word that every passage contains."""
    try:
        return WORDS[0].encode() in orjson.dumps(values)
    except TypeError:
        # Nested too deeply to be looked through.
        return True


def end_probes(after_answer: Sequence[Document]) -> list[list[Document]]:
    """Returns the four conversations from whose renderings `end_of_turn` reads the template's end of turn."""
    answered = [[_QUESTION, {"role": "assistant", "content": word}] for word in "xy"]
    return [[*messages, *after] for after in (after_answer, [_QUESTION]) for messages in answered]


def end_of_turn(renderings: Sequence[Tokens]) -> set[int]:
    """Returns the token that ends an answer in the template, or nothing for templates without an end of turn."""
    first, second, continued, also_continued = renderings
    shared = _common_beginning(_common_ending(first, second), _common_ending(continued, also_continued))
    return {*shared[:1]}


def _common_beginning(first: Tokens, second: Tokens) -> Tokens:
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def _common_ending(first: Tokens, second: Tokens) -> Tokens:
    return _common_beginning(first[::-1], second[::-1])[::-1]


def _emptied(message: Mapping[str, Any]) -> Document:
    """Returns the message without its words. A system's words stay, because some templates read them."""
    if message["role"] in ("system", "developer"):
        return dict(message)
    kept = {name: message[name] for name in _NAMES if message.get(name) is not None}
    if not (calls := message.get("tool_calls")):
        switches = _SWITCH.findall(_text(message)) if message["role"] == "user" else ()
        return {**kept, "content": " ".join(["0", *switches])}
    # Some tokenizers refuse an answer with both words and calls.
    return {**kept, "content": "", "tool_calls": [_call(call, {}) for call in calls]}


def _answer(message: Mapping[str, Any], word: str, *, shows_calls: bool) -> Document:
    """Returns the emptied answer with one word: as its content, or as an argument of all calls, because some templates
    show only the first."""
    empty = _emptied(message)
    if shows_calls and (calls := empty.get("tool_calls")):
        return {**empty, "tool_calls": [_call(call, {"a": word}) for call in calls]}
    return {**empty, "content": word}


def _call(call: Mapping[str, Any], arguments: Document) -> Document:
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}


def _reworded(message: Document) -> Document:
    word = "y" if _text(message).startswith("x") else "x"
    is_list = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": word}] if is_list else word}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
