"""SGLang: `srt/entrypoints/openai` of sgl-project/sglang (pull requests 30917, 34488 and 35225)."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill_recorder.engines.api import Document, EngineApi, Rendering, tokenize_body

_IDS, _PROMPT = "return_token_ids", "input_ids"
_EXTENSION = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
_NOT_SPLICED = ("continue_final_message", _PROMPT)


def _asked(request: Document, is_chat: bool, logprobs: bool) -> Document:
    more: Document = dict.fromkeys(_EXTENSION, True) if is_chat else {}
    if not (is_chat and request.get("stream")):
        more[_IDS] = True
    if logprobs:
        # SGLang takes 0 to mean no logprobs.
        more["logprobs"] = True if is_chat else 1
    return more


def _takes_tokens(request: Document) -> bool:
    return not any(request.get(name) for name in _NOT_SPLICED)


def _with_tokens(request: Document, prompt: Sequence[int]) -> Document:
    return {**request, _PROMPT: list(prompt)}


SGLANG = EngineApi(
    comes_first=False,
    # A flag of the server adds routed experts to every answer.
    asked_by={
        **dict.fromkeys(("token_ids", "response_token_ids", "prompt_token_ids"), _IDS),
        **dict(zip(("input_ids", "output_ids"), _EXTENSION, strict=True)),
        "routed_experts": "return_routed_experts",
    },
    remedy="use SGLang 0.5.17 or newer",
    splicing="use SGLang 0.5.23 or newer, and let input_ids through",
    renderings=(Rendering("tokenize", tokenize_body, "tokens", "use a version whose /tokenize takes messages"),),
    asked=_asked,
    takes_tokens=_takes_tokens,
    with_tokens=_with_tokens,
)
