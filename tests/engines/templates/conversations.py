"""Agents hold random conversations through a recorder that splices; what was trained is compared with what was said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import openai

from tests.engines.templates.directly import Comparison
from tests.engines.templates.engine import ScriptedEngine
from tests.engines.templates.families import Family
from tests.engines.templates.model import Answer, answer_of
from tests.on_loop import Service
from tests.recorder.engine import serving
from tests.recorder.recorders import Recorder, batches, create_run, end, post, start

_AT_ONCE = 8
_PARAMETERS = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "description": "Where."},
        "count": {"type": "number", "description": "How many."},
    },
    "required": ["at"],
}


@dataclass
class Outcome:
    """conversations, calls, rows: counts. refused: conversations that the template refused at some call. different:
    rows that are not what was read and sampled. answers: those that were compared with the engine's own to the same
    call. hidden: calls that the template refuses, and were answered because they were spliced. results: the recorder's
    counts. wrong: bridges that are not the template's own words, and unlike: answers that are not the engine's own, one
    text for each."""

    conversations: int
    calls: int
    refused: int
    rows: int
    different: int
    answers: int
    hidden: int
    results: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)

    @property
    def broken(self) -> int:
        """Prompts that do not begin with the call before."""
        return self.rows - self.conversations


COUNTS = ("conversations", "calls", "refused", "rows", "different", "answers", "hidden")
RESULTS = ("spliced", "start", "history", "settings", "fields", "rendering", "end", "ignored")


class Conversation:
    """One conversation: its calls, in order, by their marks."""

    def __init__(self, family: Family, engine: ScriptedEngine, compared: Comparison, number: int, seed: int) -> None:
        self.chance = Random(f"{seed} {family.name} {number}")
        self.family, self.engine, self.compared, self.number = family, engine, compared, number
        self.marks: list[str] = []
        self.has_tools = self.chance.random() < 0.8
        self.gives_thoughts = self.chance.random() < 0.35
        self.is_of_anthropic = self.chance.random() < 0.15

    async def hold(self, url: str) -> bool:
        """Returns whether it came to its end: some templates refuse some conversations."""
        try:
            if self.is_of_anthropic:
                async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                    await self._with_anthropic(client)
            else:
                http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [self.compared.completion]})
                more: Any = {"api_key": "none", "max_retries": 0, "timeout": 60, "http_client": http}
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", **more) as client:
                    await self._with_openai(client)
        except (anthropic.BadRequestError, openai.BadRequestError):
            self.marks.pop()
            return False
        return True

    def _turns(self) -> range:
        return range(self.chance.randint(2, 7))

    def _words(self, turn: int) -> str:
        """What the next message says, after its answer is written down."""
        mark = f"q{self.number}-{turn}-"
        answered = f"a{self.number}-{turn}-"
        self.engine.scripts[mark] = answer_of(self.family, self.chance, answered, has_tools=self.has_tools)
        self.marks.append(mark)
        return f"{mark} {self.chance.choice(('go on', 'näher', 'why?  ', '{}', '日本'))}"

    async def _with_openai(self, client: openai.AsyncOpenAI) -> None:
        function = {"name": "look", "description": "Look around.", "parameters": _PARAMETERS}
        more: dict[str, Any] = {"tools": [{"type": "function", "function": function}]} if self.has_tools else {}
        messages: list[Any] = [{"role": "system", "content": "Be brief."}] if self.chance.random() < 0.5 else []
        calls: list[Any] = []
        for turn in self._turns():
            if calls:
                words = [*[f"result {index}" for index in range(len(calls) - 1)], self._words(turn)]
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": text}
                    for call, text in zip(calls, words, strict=True)
                ]
            else:
                messages.append({"role": "user", "content": self._words(turn)})
            said = await self._ask_openai(client, messages, more)
            calls = said.get("tool_calls") or []
            messages.append(said)

    async def _ask_openai(
        self, client: openai.AsyncOpenAI, messages: list[Any], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the answer as an agent sends it back."""
        asked: dict[str, Any] = {"model": "toy", "messages": messages, **more}
        if self.chance.random() < 0.3:
            asked |= {"logprobs": True, "top_logprobs": 1}
        if self.chance.random() < 0.4:
            if self.chance.random() < 0.5:
                asked["stream_options"] = {"include_usage": True}
            said: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                for choice in chunk.choices:
                    delta = choice.delta.to_dict()
                    said["content"] += delta.get("content") or ""
                    said["reasoning"] += delta.get("reasoning") or delta.get("reasoning_content") or ""
                    for part in delta.get("tool_calls") or ():
                        _join(said["tool_calls"], part)
        else:
            said = (await client.chat.completions.create(**asked)).choices[0].message.to_dict()
        thoughts, calls = said.get("reasoning") or said.get("reasoning_content"), said.get("tool_calls") or []
        for call in calls:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
        sent: dict[str, Any] = {"role": "assistant", "content": said.get("content") or self.chance.choice((None, ""))}
        return (
            sent
            | ({"tool_calls": calls} if calls else {})
            | ({"reasoning": thoughts} if thoughts and self.gives_thoughts else {})
        )

    async def _with_anthropic(self, client: anthropic.AsyncAnthropic) -> None:
        tools = [{"name": "look", "description": "Look around.", "input_schema": _PARAMETERS}]
        more: dict[str, Any] = {"tools": tools} if self.has_tools else {}
        messages: list[Any] = []
        calls: list[Any] = []
        for turn in self._turns():
            content: Any = self._words(turn)
            if calls:
                content = [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": content if call is calls[-1] else "result",
                    }
                    for call in calls
                ]
            messages.append({"role": "user", "content": content})
            asked: dict[str, Any] = {"model": "toy", "max_tokens": 100, "messages": messages, **more}
            if self.chance.random() < 0.4:
                async with client.messages.stream(**asked) as events:
                    said = await events.get_final_message()
            else:
                said = await client.messages.create(**asked)
            self.compared.message(said, self.engine.scripts[self.marks[-1]])
            kept = [block.to_dict() for block in said.content if self.gives_thoughts or block.type != "thinking"]
            calls = [block for block in said.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": kept or "0"})
            if not kept:
                return

    def expected(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Returns the rows that a trainer should get: tokens, trained tokens and their logprobs."""
        rows: list[tuple[list[int], list[int], list[float]]] = []
        for mark in self.marks:
            prompt, answer = self.engine.asked[mark][0], self.engine.scripts[mark]
            given = self.engine.logprobs(mark)
            if rows and prompt[: len(rows[-1][0])] == rows[-1][0]:
                _, sampled, logprobs = rows.pop()
            else:
                sampled, logprobs = [], []
            rows.append(([*prompt, *answer.tokens], [*sampled, *answer.tokens], [*logprobs, *given]))
        return rows

    def wrong_bridges(self) -> list[str]:
        """Returns what is wrong with the tokens between an answer and the next, one text for each."""
        wrong = []
        for before, mark in zip(self.marks, self.marks[1:], strict=False):
            base, answer = self.engine.asked[before][0], self.engine.scripts[before]
            prompt, request = self.engine.asked[mark]
            if prompt[: len(base) + len(answer.tokens)] != [*base, *answer.tokens]:
                continue
            bridge = self.family.decode(prompt[len(base) + len(answer.tokens) :])
            if problem := self._problem(bridge, before, mark, answer, request):
                wrong.append(
                    f"{self.family.name} {mark} ends {self.family.decode(answer.tokens[-1:])!r}: {problem}: {bridge!r}"
                )
        return wrong

    def _problem(self, bridge: str, before: str, mark: str, answer: Answer, request: Mapping[str, Any]) -> str:
        if mark not in bridge:
            return "the new message is lost"
        if before in bridge or before.replace("q", "a") in bridge:
            return "an old message is repeated"
        try:
            whole = self.family.render(request["messages"], request)
        except ValueError:
            # The template refuses what is spliced.
            return ""
        said = before.replace("q", "a") + (str(len(answer.calls) - 1) if answer.calls else "")
        if said not in whole:
            return ""
        expected = self._expected_bridge(whole[whole.rfind(said) :], answer)
        # Gemma's template puts the words of an answer with calls behind the results.
        expected = expected.partition(before.replace("q", "a"))[0]
        return "" if bridge == expected else f"the template has {expected!r}"

    def _expected_bridge(self, rest: str, answer: Answer) -> str:
        """Returns the template's own words after an answer, of which `rest` is the end."""
        place, end = min((rest.find(end), end) for end in self.family.ends if end in rest)
        is_read = self.family.decode(answer.tokens[-1:]) == end if self.family.begins else not answer.is_cut
        return rest[place + len(end) :] if is_read else rest[place:]


def run(engine: ScriptedEngine, count: int, seed: int, service: Service, folder: Path, name: str) -> Outcome:
    """Holds `count` conversations. folder: an empty one for the recorder."""
    create_run(service.grpc_address, name, merge="prefix", max_buffered_batches=count)
    flags = ("--engine", engine.api, "--journal", str(folder / "journal"), "--splice", "on")
    family = engine.family
    with serving(engine):
        compared = Comparison(engine.url, engine.has_model)
        recorder = start(folder / "log", engine.url, service.grpc_address, *flags)
        try:
            held = [Conversation(family, engine, compared, number, seed) for number in range(count)]
            refused = asyncio.run(_hold(held, recorder, name)).count(False)
            results = {result: int(recorder.metric(f'splices_total{{result="{result}"}}')) for result in RESULTS}
        finally:
            end(recorder)
    held = [one for one in held if one.marks]
    expected = sorted(row for one in held for row in one.expected())
    rows = sorted(
        (row.tokens, row.trained, row.logprobs)
        for batch in batches(service.grpc_address, name, len(held))
        for row in batch
    )
    different = len(rows) - sum(one == another for one, another in zip(rows, expected, strict=False))
    calls = sum(len(one.marks) for one in held)
    wrong = [problem for one in held for problem in one.wrong_bridges()]
    counts = (len(held), calls, refused, len(rows), different, compared.answers, compared.refused)
    return Outcome(*counts, results, wrong, compared.different)


def _join(calls: list[Any], part: Mapping[str, Any]) -> None:
    """Adds a part of a streamed call: some engines send its arguments piece by piece."""
    if part["index"] == len(calls):
        calls.append(
            {"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}}
        )
    calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


async def _hold(conversations: list[Conversation], recorder: Recorder, run: str) -> list[bool]:
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def hold(one: Conversation) -> bool:
        async with at_once:
            url = recorder.base(run, f"uid-{one.number}")
            is_whole = await one.hold(url)
            if one.marks:
                await asyncio.to_thread(post, f"{url}/finish", {"reward": 1.0})
            return is_whole

    return await asyncio.gather(*map(hold, conversations))
