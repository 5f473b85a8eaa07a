"""The fields of a completion by which each engine returns token ids and logprobs.

Sources: `entrypoints/openai` of vllm-project/vllm, `srt/entrypoints/openai` of sgl-project/sglang (pull requests 30917,
34488 and 35225), `lib/llm/src/protocols/openai` of ai-dynamo/dynamo (9509 and 13640) and a Dynamo 1.6.1, and
`tools/server` of ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]

_IDS, _VERSIONS = "return_token_ids", "return_weight_versions"
_EXTENSION = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
_NVEXT, _EXTRA = "nvext", ("completion_token_ids", "engine_data", "prompt_token_ids")


@dataclass(frozen=True)
class EngineFields:
    """The fields of an engine.

    comes_first: whether the first chunk of a stream contains the prompt's token ids. asked_by: fields of answers that
    an agent gets only if its request set the flag named here. has_nulls: whether fields that were not requested are
    null in an answer, not missing. remedy: which versions return token ids. extension: the object of an answer that
    contains such fields. is_single: whether only answers with one choice have token ids. omits_logprobs: whether
    completions without logprobs lack the field. refusal: why completions cannot be recorded.

    flags: returns the flags that a request has set.
    asked: returns the fields to add to a request; is_chat: whether it is a chat completion; logprobs: whether to ask
    for the logprob of each sampled token.
    """

    comes_first: bool
    asked_by: Mapping[str, str]
    has_nulls: bool
    remedy: str
    asked: Callable[[Document, bool, bool], Document]
    extension: str = ""
    is_single: bool = False
    omits_logprobs: bool = False
    refusal: str = ""
    flags: Callable[[Document], Mapping[str, Any]] = dict


def _asked_of_vllm(request: Document, is_chat: bool, logprobs: bool) -> Document:
    more: Document = {_IDS: True, _VERSIONS: True}
    if logprobs:
        more["logprobs"] = True if is_chat else 0
    return more


def _asked_of_sglang(request: Document, is_chat: bool, logprobs: bool) -> Document:
    more: Document = dict.fromkeys(_EXTENSION, True) if is_chat else {}
    if not (is_chat and request.get("stream")):
        more[_IDS] = True
    if logprobs:
        # SGLang takes 0 to mean no logprobs.
        more["logprobs"] = True if is_chat else 1
    return more


def _asked_of_dynamo(request: Document, is_chat: bool, logprobs: bool) -> Document:
    more: Document = {"logprobs": True if is_chat else 0} if logprobs else {}
    extension = request.get(_NVEXT) or {}
    # Dynamo refuses other types.
    if isinstance(extension, dict) and isinstance(extension.get("extra_fields") or [], list):
        names = extension.get("extra_fields") or []
        more[_NVEXT] = {**extension, "extra_fields": [*names, *(name for name in _EXTRA if name not in names)]}
    return more


def _flags_of_dynamo(request: Document) -> Mapping[str, Any]:
    extension = request.get(_NVEXT)
    names = extension.get("extra_fields") if isinstance(extension, dict) else None
    return {name: name in names for name in _EXTRA} if isinstance(names, list) else {}


def _asked_of_llamacpp(request: Document, is_chat: bool, logprobs: bool) -> Document:
    return {}


VLLM = EngineFields(
    comes_first=True,
    asked_by={
        **dict.fromkeys(("token_ids", "prompt_token_ids"), _IDS),
        "weight_versions": _VERSIONS,
        "prompt_logprobs": "prompt_logprobs",
        "routed_experts": "return_routed_experts",
    },
    has_nulls=True,
    remedy="use vLLM 0.10.2 or newer",
    asked=_asked_of_vllm,
)

SGLANG = EngineFields(
    comes_first=False,
    # A flag of the server adds routed experts to every answer, and any extension of several choices has details.
    asked_by={
        **dict.fromkeys(("token_ids", "response_token_ids", "prompt_token_ids"), _IDS),
        **dict(zip(("input_ids", "output_ids"), _EXTENSION, strict=True)),
        "routed_experts": "return_routed_experts",
        "spec_tokens_details": "return_spec_tokens_details",
    },
    has_nulls=False,
    remedy="use SGLang 0.5.17 or newer",
    asked=_asked_of_sglang,
    extension="sglext",
)

DYNAMO = EngineFields(
    comes_first=False,
    asked_by={name: name for name in _EXTRA},
    has_nulls=False,
    remedy="use Dynamo 1.6.1 or newer, without DYN_ENABLE_FRONTEND_NVEXT=false",
    asked=_asked_of_dynamo,
    extension=_NVEXT,
    is_single=True,
    omits_logprobs=True,
    flags=_flags_of_dynamo,
)

LLAMACPP = EngineFields(
    comes_first=False,
    asked_by={},
    has_nulls=False,
    remedy="use a llama-server of 2025 or newer",
    asked=_asked_of_llamacpp,
    refusal="llama.cpp does not return the token ids of a completion; call /completion with a prompt of tokens",
)

FIELDS = {"vllm": VLLM, "sglang": SGLANG, "dynamo": DYNAMO}
"""The fields by the names of engines whose completions can be recorded."""
