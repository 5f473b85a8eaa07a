"""vLLM: `entrypoints/openai` and `entrypoints/scale_out` of vllm-project/vllm."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill._engines import fields
from gristmill._engines.fields import Document
from gristmill_recorder.engines.api import EngineApi, Rendering, tokenize_body

_TRANSFER, _PROMPT = "kv_transfer_params", "prompt_token_ids"
# `render` does not need these fields.
_NOT_RENDERED = frozenset((_TRANSFER, "stream", "stream_options"))
# Calls with these fields are not rendered from their messages alone, or vLLM does not take tokens for them.
_NOT_SPLICED = ("continue_final_message", "truncate_prompt_tokens", "echo")


def _render_body(request: Document) -> Document:
    return {name: value for name, value in request.items() if name not in _NOT_RENDERED}


def _takes_tokens(request: Document) -> bool:
    is_continued = any(request.get(name) for name in _NOT_SPLICED) or request.get("add_generation_prompt") is False
    return not is_continued and _PROMPT not in (request.get(_TRANSFER) or {})


def _with_tokens(request: Document, prompt: Sequence[int]) -> Document:
    return {**request, _TRANSFER: {**(request.get(_TRANSFER) or {}), _PROMPT: list(prompt)}}


VLLM = EngineApi(
    fields=fields.VLLM,
    splicing="use vLLM 0.32 or newer, and let kv_transfer_params through",
    renderings=(
        Rendering("v1/chat/completions/render", _render_body, "token_ids", "start vLLM with --enable-scale-out"),
        Rendering("tokenize", tokenize_body, "tokens", "let its /tokenize through"),
    ),
    takes_tokens=_takes_tokens,
    with_tokens=_with_tokens,
    # 0 is the logprob of the prompt's token alone.
    prompt_logprobs={"prompt_logprobs": 0},
    columns={
        "prompt_logprobs": "let prompt_logprobs through",
        "routed_experts": "start vLLM with --enable-return-routed-experts",
        "sampling_mask": "start vLLM with --return-sampling-mask, and call /inference/v1/generate",
    },
)
