"""Fifteen model families: their chat templates, with their tokenizers or their control tokens over another's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer

FOLDER = Path(__file__).parents[3] / "build/templates"


@dataclass(frozen=True)
class Family:
    """template, tokenizer: files of the folder. end, call_end: tokens that end an answer, and one with a call. odd:
    other stop tokens of the model. tokens: control tokens that the tokenizer lacks. begins: whether an answer ends with
    the beginning of the next turn. thinks: whether answers may have thoughts."""

    name: str
    template: str
    tokenizer: str
    end: str
    call_end: str = ""
    odd: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    begins: bool = False
    thinks: bool = False

    @cached_property
    def encoder(self) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(FOLDER / f"{self.tokenizer}.json"))
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*self.tokens, *self.ends)])
        return tokenizer

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *((self.call_end,) if self.call_end else ()), *self.odd)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.encoder.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def _compiled(self) -> Any:
        environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime(2026, 1, 1).strftime(form),
        }
        text = (FOLDER / f"{self.template}.jinja").read_text()
        # transformers' tag for training, without effect on the text.
        return environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text))

    def render(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """Renders as vLLM does: arguments of calls are values. Raises ValueError if the template refuses."""
        effort = request.get("reasoning_effort")
        kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
        kwargs |= request.get("chat_template_kwargs") or {}
        text: str = self._compiled.render(
            messages=[_parsed(message) for message in messages],
            tools=request.get("tools") or None,
            add_generation_prompt=True,
            bos_token="<s>" if self.tokenizer == "mistral_nemo" else "",
            eos_token=self.end,
            **kwargs,
        )
        return text


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    parsed = dict(message)
    content = message.get("content")
    parsed["content"] = "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    if thoughts := message.get("reasoning"):
        parsed["reasoning_content"] = thoughts
    if calls := message.get("tool_calls"):
        parsed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _values(call["function"]["arguments"])}}
            for call in calls
        ]
    return parsed


def _values(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError as error:
        raise ValueError("the arguments of a call are no JSON") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_CHATML = ("<|im_start|>", "<|im_end|>")
_GEMMA = (
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>"),
)
_GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|user|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|tool_call_begin|>"),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
_MISTRAL = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]")

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2.5", "Qwen-Qwen2.5-7B-Instruct", "qwen2_5", "<|im_end|>", odd=("<|endoftext|>",)),
        Family("qwen3", "Qwen-Qwen3-0.6B", "qwen3", "<|im_end|>", odd=("<|endoftext|>",), thinks=True),
        Family("qwen3-coder", "Qwen3-Coder", "qwen3", "<|im_end|>", odd=("<|endoftext|>",)),
        Family("qwen3.5", "Qwen3.5-4B", "qwen3", "<|im_end|>", odd=("<|endoftext|>",), thinks=True),
        Family(
            "llama3.1",
            "meta-llama-Llama-3.1-8B-Instruct",
            "llama3_1",
            "<|eot_id|>",
            odd=("<|eom_id|>", "<|end_of_text|>"),
        ),
        Family(
            "hermes3",
            "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            "llama3_1",
            "<|im_end|>",
            tokens=(*_CHATML, *_CALLS),
        ),
        Family("deepseek-v3.1", "deepseek-ai-DeepSeek-V3.1", "deepseek_v3", "<｜end▁of▁sentence｜>", tokens=_CALLS[4:]),
        Family(
            "gpt-oss", "openai-gpt-oss-120b", "gptoss", "<|return|>", call_end="<|call|>", odd=("<|end|>",), thinks=True
        ),
        Family(
            "gemma-4",
            "google-gemma-4-31B-it",
            "gemma3",
            "<turn|>",
            call_end="<|tool_response>",
            tokens=_GEMMA,
            thinks=True,
        ),
        Family("mistral-nemo", "mistralai-Mistral-Nemo-Instruct-2407", "mistral_nemo", "</s>"),
        Family("mistral-small-3.2", "Mistral-Small-3.2-24B-Instruct-2506", "mistral_nemo", "</s>", tokens=_MISTRAL),
        Family(
            "granite-4.0",
            "ibm-granite-granite-4.0",
            "qwen2_5",
            "<|end_of_text|>",
            tokens=("<|start_of_role|>", "<|end_of_role|>", *_CALLS),
        ),
        Family(
            "glm-4.6",
            "GLM-4.6",
            "qwen3",
            "<|user|>",
            call_end="<|observation|>",
            odd=("<|endoftext|>",),
            tokens=_GLM,
            begins=True,
            thinks=True,
        ),
        Family(
            "kimi-k2-thinking", "Kimi-K2-Thinking", "qwen3", "<|im_end|>", odd=("[EOS]",), tokens=_KIMI, thinks=True
        ),
        Family(
            "minimax-m2",
            "MiniMax-M2",
            "qwen3",
            "[e~[",
            tokens=("]~!b[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
            thinks=True,
        ),
    )
}
