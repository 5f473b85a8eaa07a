"""SGLang: `srt/entrypoints/openai` of sgl-project/sglang (pull requests 30917, 34488 and 35225)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gristmill._engines import fields
from gristmill._engines.fields import Document
from gristmill_recorder.engines.api import EngineApi, Rendering, tokenize_body

_PROMPT = "input_ids"
_NOT_SPLICED = ("continue_final_message", _PROMPT)


def _takes_tokens(request: Document) -> bool:
    return not any(request.get(name) for name in _NOT_SPLICED)


def _with_tokens(request: Document, prompt: Sequence[int]) -> Document:
    return {**request, _PROMPT: list(prompt)}


def _problems(answer: Document, about: Document) -> Iterator[str]:
    """Yields a wrong setting of SGLang 0.5.23. Without a parser it streams no logprob of a token without text of its
    own: the token that ends an answer, and parts of a character."""
    if about and not about.get("tool_call_parser") and not about.get("reasoning_parser"):
        yield (
            "it has no parser, and does not stream all logprobs, so streamed chat completions are refused without "
            "--whole-answers; start SGLang with --tool-call-parser or --reasoning-parser"
        )


SGLANG = EngineApi(
    fields=fields.SGLANG,
    splicing="use SGLang 0.5.23 or newer, and let input_ids through",
    renderings=(Rendering("tokenize", tokenize_body, "tokens", "use a version whose /tokenize takes messages"),),
    takes_tokens=_takes_tokens,
    # It renders a last answer as a message of the user.
    after_answer=({"role": "assistant", "content": "0"}, {"role": "user", "content": "0"}),
    with_tokens=_with_tokens,
    about="server_info",
    problems=_problems,
)
