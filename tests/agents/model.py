"""An engine whose model follows a script: agents of other makers play a task with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from uuid import uuid4

from aiohttp import web

from tests.recorder.engine import Engine, Words, answer_of, logprobs_for


def call(tool: str, reasoning: str = "", text: str = "", **arguments: Any) -> Words:
    """What a model says that calls a tool."""
    return Words(reasoning, text, (tool, json.dumps(arguments)))


def together(*answers: Words) -> Words:
    """What a model says that calls the tools of several answers at once."""
    tools = [answer.tool for answer in answers[1:] if answer.tool]
    return replace(answers[0], then=tuple(tools))


@dataclass
class Branch:
    """The calls of one agent, or of one of its helpers.

    name: for messages of failed tests. marker: words of a system or user message by which its calls are known. answers:
    what the model says to its first call, its second, and so on; or says after it read the last message. tokens: what
    the engine read and said at the last call. trained: all that it said, with logprobs.
    """

    name: str
    marker: str
    answers: Sequence[Words | Callable[[str], Words]]
    tokens: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    calls: int = 0

    def answer(self, prompt: Sequence[int], last: str) -> Words:
        """last: the message that is answered."""
        answer = self.answers[self.calls]
        words = answer if isinstance(answer, Words) else answer(last)
        said = answer_of(words)
        self.calls += 1
        self.tokens = [*prompt, *said]
        self.trained += said
        self.logprobs += logprobs_for(len(said))
        return words


@dataclass
class Model(Engine):
    """An engine that answers each call as its branch says. branches: the first whose marker is in a call, and that has
    an answer left, answers it. unknown: calls that no branch answers."""

    branches: list[Branch] = field(default_factory=list)
    unknown: list[Any] = field(default_factory=list)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompts: list[list[int]], script: str, kind: str
    ) -> web.StreamResponse:
        # Agents know answers, and calls of tools, by their ids, which are random as vLLM's.
        words = replace(self._words(body, prompts[0]), id=f"call_{uuid4().hex}")
        return await super()._answer(request, body, prompts, f"words {json.dumps(asdict(words))}", kind)

    def _words(self, body: Mapping[str, Any], prompt: list[int]) -> Words:
        given = json.dumps([each for each in body["messages"] if each["role"] in ("system", "user")])
        for branch in self.branches:
            if branch.marker in given and branch.calls < len(branch.answers):
                return branch.answer(prompt, str(body["messages"][-1]["content"]))
        # The recorder's probes ask for one token.
        if body.get("max_tokens") != 1:
            self.unknown.append(body["messages"])
        return Words(text="unknown")
