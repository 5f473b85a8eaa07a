"""An engine whose model follows a script, with real templates and tokenizers: agents of other makers play a task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from uuid import uuid4

from tests.engines.templates.engine import TemplateEngine
from tests.engines.templates.families import Family
from tests.engines.templates.model import Answer, spelt
from tests.recorder.engine import Words


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

    def words(self, last: str) -> Words:
        """last: the message that is answered."""
        answer = self.answers[self.calls]
        return answer if isinstance(answer, Words) else answer(last)

    def say(self, prompt: Sequence[int], answer: Answer) -> None:
        self.calls += 1
        self.tokens = [*prompt, *answer.tokens]
        self.trained += answer.tokens
        self.logprobs += answer.logprobs


@dataclass
class Model(TemplateEngine):
    """An engine that answers each call as its branch says. branches: the first whose marker is in a call, and that has
    an answer left, answers it. unknown: calls that no branch answers."""

    branches: list[Branch] = field(default_factory=list)
    unknown: list[Any] = field(default_factory=list)
    chance: Random = field(default_factory=lambda: Random(1))

    def answer(self, prompt: list[int], body: Mapping[str, Any]) -> Answer:
        given = json.dumps([each for each in body["messages"] if each["role"] in ("system", "user")])
        for branch in self.branches:
            if branch.marker in given and branch.calls < len(branch.answers):
                answer = _answer(self.family, self.chance, branch.words(str(body["messages"][-1]["content"])))
                branch.say(prompt, answer)
                return answer
        # The recorder's probes ask for one token.
        if body.get("max_tokens") != 1:
            self.unknown.append(body["messages"])
        return Answer([1], "unknown")


def _answer(family: Family, chance: Random, words: Words) -> Answer:
    tools = [*((words.tool,) if words.tool else ()), *words.then]
    # Agents know answers, and calls of tools, by their ids, which are random as vLLM's.
    calls = tuple((f"call_{uuid4().hex}", name, arguments) for name, arguments in tools)
    tokens = spelt(family, chance, words.reasoning, words.text, calls)
    if words.is_cut:
        return Answer(tokens, words.text, words.reasoning, calls, "length", is_cut=True)
    end = family.call_end if calls and family.call_end else family.end
    finish = "tool_calls" if calls else "stop"
    return Answer([*tokens, *family.encode(end)], words.text, words.reasoning, calls, finish)
