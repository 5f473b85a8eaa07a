"""What the recorder has to know of an engine's API: an engine is one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gristmill._engines.fields import Document, EngineFields


class Rendering(NamedTuple):
    """A route that renders conversations. body: makes its body of a chat completion. tokens: where its answer has the
    tokens. remedy: how to start the engine so that it has the route."""

    path: str
    body: Callable[[Document], Document]
    tokens: str
    remedy: str


@dataclass(frozen=True)
class EngineApi:
    """The names of an engine.

    fields: those by which it returns token ids. splicing: which versions take a prompt as tokens. renderings: routes
    that render, the best first.

    takes_tokens: returns whether the engine would take the prompt of a chat completion as tokens, and the agent does
    not send any.
    with_tokens: returns the chat completion with a prompt of tokens. Its messages stay, because parsers read them.
    prompt_logprobs: the fields by which it returns the logprobs of the prompt's tokens; empty if it does not.
    """

    fields: EngineFields
    splicing: str
    renderings: Sequence[Rendering]
    takes_tokens: Callable[[Document], bool]
    with_tokens: Callable[[Document, Sequence[int]], Document]
    prompt_logprobs: Document = field(default_factory=dict)


def tokenize_body(request: Document) -> Document:
    """Returns the body of `/tokenize` that renders like this chat completion. Some fields it takes as kwargs only."""
    kwargs: Document = {"documents": request["documents"]} if request.get("documents") else {}
    if effort := request.get("reasoning_effort"):
        kwargs |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    kwargs |= request.get("chat_template_kwargs") or {}
    body = {name: request[name] for name in _TOKENIZED if request.get(name) is not None}
    return {**body, "chat_template_kwargs": kwargs} if kwargs else body


_TOKENIZED = ("model", "messages", "tools", "chat_template", "add_special_tokens", "mm_processor_kwargs")
