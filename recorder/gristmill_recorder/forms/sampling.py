"""Read from a call how its tokens are sampled, and what of it a trainer cannot reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

_SETS = ("allowed_token_ids", "bad_words", "custom_logit_processor", "logit_bias", "min_new_tokens", "min_tokens")
# By setting, the values that change nothing. vLLM and SGLang have the same names.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (0,)),
    "top_k": (0, -1),
    **dict.fromkeys((*_SETS, "thinking_token_budget", "vllm_xargs"), (0, {}, [])),
}
_GRAMMARS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)


class Sampling(NamedTuple):
    """How the tokens of a call are sampled.

    odd: names of the settings that a trainer cannot reproduce, which computes logprobs at one temperature alone.
    is_masked: whether the steps are not trained. note: the settings as a line of JSON; None if rows have no column for
    it.
    """

    odd: tuple[str, ...] = ()
    is_masked: bool = False
    note: bytes | None = None

    @classmethod
    def of(cls, request: dict[str, Any], temperature: float | None, *, has_note: bool) -> Sampling:
        """Reads a request for the engine. temperature: the trainer's; None masks nothing."""
        settings = dict(_settings(request))
        odd = set(settings) - {"temperature"}
        if settings.get("temperature", 1) != (1 if temperature is None else temperature):
            odd.add("temperature")
        note = orjson.dumps(settings) + b"\n" if has_note else None
        return cls(tuple(sorted(odd)), bool(odd) and temperature is not None, note)


PLAIN = Sampling()


def _settings(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the settings that change the distribution, numbers with their values."""
    for name, plain in _PLAIN.items():
        if (value := request.get(name)) is not None and value not in plain:
            yield name, value if isinstance(value, (int, float)) else True
    if _has_grammar(request):
        yield "grammar", True


def _has_grammar(request: dict[str, Any]) -> bool:
    formats = (request.get("response_format"), _get(request.get("text"), "format"))
    if any(_get(format_, "type") not in (None, "text") for format_ in formats):
        return True
    if any(request.get(name) for name in _GRAMMARS):
        return True
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    # Engines hold calls of such tools to their schema, if their parser has one.
    tools = request.get("tools") if choice != "none" else None
    listed = tools if isinstance(tools, list) else ()
    return any(_get(tool, "strict") or _get(_get(tool, "function"), "strict") for tool in listed)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
