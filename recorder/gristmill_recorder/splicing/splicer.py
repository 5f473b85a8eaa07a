"""Decides for each chat completion whether it is spliced, and checks that the engine read what was sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gristmill_recorder.engines.api import EngineApi
from gristmill_recorder.engines.connection import Engine
from gristmill_recorder.engines.renderer import Renderer
from gristmill_recorder.languages.images import urls_of_images
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.recording import Recording
from gristmill_recorder.rows import Row
from gristmill_recorder.splicing.bridges import Bridges
from gristmill_recorder.splicing.conversation import Conversation, Document, is_cut

Mode = Literal["off", "on", "verify"]

CHAT = "v1/chat/completions"
_MAX_SETTINGS = 4096
# After an engine ignored the tokens of a prompt, it is not asked for renderings in vain; then it may be a newer one.
_IGNORED_S = 60.0

# What reading a call with fields of wrong types raises. It is sent as it came, because the engine's error says what is
# wrong.
_INVALID = (AttributeError, KeyError, RecursionError, TypeError, ValueError)

_log = logging.getLogger("gristmill.recorder")


@dataclass(slots=True)
class Plan:
    """How a call is sent to the engine.

    request: the body to send. conversation: None if the call is no chat completion, or nobody needs it. continues: the
    recorded step that the call continues. cause: why the call is not spliced. base: the step that it continues, if it
    was read. spliced: the prompt by splicing, if it is possible. rendering: the engine's rendering of a first call with
    these settings, to compare with the prompt of the answer.
    """

    request: Document
    conversation: Conversation | None = None
    continues: int | None = None
    cause: str = ""
    base: Row | None = None
    spliced: list[int] | None = None
    rendering: list[int] | None = None

    def mark(self, rows: Sequence[Row], choices: Sequence[Document]) -> None:
        """Sets the key of each row's conversation, and whether its answer was cut, if they are known."""
        for row, choice in zip(rows, choices, strict=True):
            if self.conversation is not None and choice:
                row.said, row.is_cut = self.conversation.key_after(choice["message"]), is_cut(choice, self.request)

    @property
    def turn(self) -> Document:
        """The messages of the call and its tools, without what the step that it continues has."""
        if self.conversation is None:
            # The row has the tokens of a prompt that is no text.
            prompt = self.request.get("prompt")
            return {"prompt": prompt if isinstance(prompt, str) else None}
        if self.continues is not None:
            return {"continues": self.continues, "messages": self.conversation.messages[self.conversation.answered :]}
        tools = self.request.get("tools")
        return {"continues": None, "messages": self.conversation.messages} | ({"tools": tools} if tools else {})


class Splicer:
    """Splices the calls of all trajectories.

    mode: `verify` sends calls unchanged, and counts differences. reads: whether conversations are compared even if
    nothing is spliced.
    """

    def __init__(self, mode: Mode, api: EngineApi, engine: Engine, metrics: Metrics, *, reads: bool = False) -> None:
        self._mode, self._api, self._metrics = mode, api, metrics
        self._reads = reads or mode != "off"
        self._renderer = Renderer(engine, api)
        self._bridges = Bridges(self._renderer, api.after_answer)
        # Whether the engine's rendering is the prompt of its answers, by settings.
        self._renders: dict[bytes, bool] = {}
        self._ignored_until = 0.0

    async def plan(self, path: str, request: Document, recording: Recording, headers: Mapping[str, str]) -> Plan:
        if not self._reads or path != CHAT:
            return Plan(request)
        try:
            conversation = Conversation(request)
            plan = Plan(request, conversation)
            if 0 < conversation.answered < len(conversation.messages):
                plan.continues = recording.entry.ends.get(conversation.key(conversation.answered))
            if self._mode != "off":
                plan.cause = await self._splice(plan, conversation, recording, headers)
            if plan.spliced is not None and self._mode == "on":
                plan.request = self._api.with_tokens(request, plan.spliced)
        except _INVALID:
            return Plan(request)
        return plan

    async def _splice(
        self, plan: Plan, conversation: Conversation, recording: Recording, headers: Mapping[str, str]
    ) -> str:
        """Sets the plan's prompt, or returns why there is none."""
        request = plan.request
        if not self._api.takes_tokens(request):
            return "fields"
        if urls_of_images(request):
            # The engine would read their tokens without them.
            return "images"
        messages, count = conversation.messages, conversation.answered
        if not count or not recording.entry.ends:
            if conversation.settings not in self._renders:
                prompts = await self._renderer.render(request, [messages], headers)
                plan.rendering = prompts[0] if prompts else None
            return "start"
        base = plan.base = None if plan.continues is None else recording.row(plan.continues)
        if base is None:
            is_other = any(conversation.has_other_settings(count, key) for key in recording.entry.ends)
            return "settings" if is_other else "history"
        if time.monotonic() < self._ignored_until:
            return "ignored"
        if not self._renders.get(conversation.settings, True):
            return "rendering"
        following, cause = await self._bridges.find(request, conversation, base, headers)
        if following is not None:
            plan.spliced = [*base.prompt.tolist(), *base.response.tolist(), *following]
        return cause

    def recorded(self, plan: Plan, rows: Sequence[Row]) -> None:
        """Compares the prompt that the engine read with the plan, after the answer was recorded, and counts the
        result."""
        if plan.conversation is None or self._mode == "off" or not rows:
            return
        if plan.rendering is not None:
            if len(self._renders) >= _MAX_SETTINGS:
                self._renders.clear()
            self._renders[plan.conversation.settings] = plan.rendering == rows[0].prompt.tolist()
        for row in rows:
            if row.said is not None and not row.is_cut:
                self._bridges.ended(str(plan.request.get("model")), int(row.response[-1]))
        self._metrics.splices.labels(self._result(plan, rows[0])).inc()

    def _result(self, plan: Plan, row: Row) -> str:
        if plan.spliced is None or plan.base is None:
            return plan.cause
        is_same = row.prompt.tolist() == plan.spliced
        if self._mode == "on":
            if is_same:
                return "spliced"
            if time.monotonic() >= self._ignored_until:
                _log.warning("the engine ignores the tokens of a prompt, calls are not spliced; %s", self._api.splicing)
            self._ignored_until = time.monotonic() + _IGNORED_S
            return "ignored"
        same = plan.base.shared(row.prompt)
        if is_same:
            place = "none"
        elif same >= len(plan.base.prompt) + len(plan.base.response):
            place = "new"
        else:
            place = "answer" if same >= len(plan.base.prompt) else "earlier"
            self._metrics.splice_saved.inc(len(row.prompt))
        self._metrics.splice_differences.labels(place).inc()
        return "verified"
