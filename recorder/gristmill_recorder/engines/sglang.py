"""SGLang: `srt/entrypoints/openai` of sgl-project/sglang (pull requests 30917, 34488 and 35225)."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill._engines import fields
from gristmill._engines.fields import Document
from gristmill_recorder.engines.api import EngineApi, Rendering, tokenize_body

_PROMPT = "input_ids"
_NOT_SPLICED = ("continue_final_message", _PROMPT)


def _takes_tokens(request: Document) -> bool:
    return not any(request.get(name) for name in _NOT_SPLICED)


def _with_tokens(request: Document, prompt: Sequence[int]) -> Document:
    return {**request, _PROMPT: list(prompt)}


SGLANG = EngineApi(
    fields=fields.SGLANG,
    splicing="use SGLang 0.5.23 or newer, and let input_ids through",
    renderings=(Rendering("tokenize", tokenize_body, "tokens", "use a version whose /tokenize takes messages"),),
    takes_tokens=_takes_tokens,
    with_tokens=_with_tokens,
)
