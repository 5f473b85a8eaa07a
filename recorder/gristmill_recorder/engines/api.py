"""What the recorder has to know of an engine's API: an engine is one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Trial(NamedTuple):
    """A call of one token, by which the engine is probed."""

    path: str
    body: Document


CHAT = Trial("v1/chat/completions", {"messages": [{"role": "user", "content": "0"}], "max_tokens": 1})


def _never(request: Document) -> bool:
    return False


def _unchanged(request: Document, prompt: Sequence[int]) -> Document:
    return request


def _none(answer: Document, about: Document) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class EngineApi:
    """The names of an engine.

    fields: those by which it returns token ids. trial: the call by which it is probed. splicing: which versions take a
    prompt as tokens. renderings: routes that render, the best first; without any, nothing is spliced.

    takes_tokens: returns whether the engine would take the prompt of a chat completion as tokens, and the agent does
    not send any.
    after_answer: messages to append to a conversation that ends with an answer, so that the engine renders the answer
    as one.
    with_tokens: returns the chat completion with a prompt of tokens. Its messages stay, because parsers read them.
    prompt_logprobs: the fields by which it returns the logprobs of the prompt's tokens; empty if it does not.
    about: a route whose answer is about the server's settings.
    problems: returns what the answers to the trial and of `about` show of wrong settings of the engine, with remedies.
    columns: how to start the engine so that its answers have values for these columns.
    """

    fields: EngineFields
    trial: Trial = CHAT
    splicing: str = ""
    renderings: Sequence[Rendering] = ()
    takes_tokens: Callable[[Document], bool] = _never
    after_answer: Sequence[Document] = ()
    with_tokens: Callable[[Document, Sequence[int]], Document] = _unchanged
    prompt_logprobs: Document = field(default_factory=dict)
    about: str = ""
    problems: Callable[[Document, Document], Iterable[str]] = _none
    columns: Mapping[str, str] = field(default_factory=dict)


def tokenize_body(request: Document) -> Document:
    """Returns the body of `/tokenize` that renders like this chat completion. Some fields it takes as kwargs only."""
    kwargs: Document = {"documents": request["documents"]} if request.get("documents") else {}
    if effort := request.get("reasoning_effort"):
        kwargs |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    kwargs |= request.get("chat_template_kwargs") or {}
    body = {name: request[name] for name in _TOKENIZED if request.get(name) is not None}
    return {**body, "chat_template_kwargs": kwargs} if kwargs else body


_TOKENIZED = ("model", "messages", "tools", "chat_template", "add_special_tokens", "mm_processor_kwargs")
