"""Reads the sampling settings of a call, and finds those that a trainer cannot reproduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_SETS = ("allowed_token_ids", "bad_words", "custom_logit_processor", "logit_bias", "min_new_tokens", "min_tokens")
# The values of each setting that leave the distribution unchanged. vLLM and SGLang use the same names.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (0,)),
    # llama.cpp's own.
    **dict.fromkeys(("repeat_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), (0,)),
    **dict.fromkeys(("adaptive_target", "top_n_sigma"), (-1,)),
    "thinking_token_budget": (-1,),
    "top_k": (0, -1),
    **dict.fromkeys((*_SETS, "vllm_xargs"), (0, {}, [])),
}
_GRAMMARS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar"),
)


class Sampling(NamedTuple):
    """The sampling settings of a call.

    odd: the names of the settings that a trainer cannot reproduce: it computes logprobs at one temperature, without
    other settings. is_masked: whether the steps get loss mask 0. settings: those that change the distribution.
    """

    odd: tuple[str, ...]
    is_masked: bool
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, request: dict[str, Any], temperature: float | None) -> Sampling:
        """Reads the settings of a request to the engine. temperature: the trainer's; None: mask no steps."""
        # The engines' own routes have them apart.
        own = request.get("sampling_params")
        settings = dict(_settings({**request, **own} if isinstance(own, dict) else request))
        odd = set(settings) - {"temperature"}
        if settings.get("temperature", 1) != (1 if temperature is None else temperature):
            odd.add("temperature")
        return cls(tuple(sorted(odd)), bool(odd) and temperature is not None, settings)


def _settings(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the settings that change the distribution. The value of a setting that is not a number is True."""
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
    # Engines constrain the calls of strict tools to their schema, if the engine's tool parser supports it.
    tools = request.get("tools") if choice != "none" else None
    listed = tools if isinstance(tools, list) else ()
    return any(_get(tool, "strict") or _get(_get(tool, "function"), "strict") for tool in listed)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
