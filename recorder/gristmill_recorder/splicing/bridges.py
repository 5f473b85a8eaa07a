"""Finds the bridges of calls by the engine's renderings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gristmill_recorder.engines.renderer import Renderer
from gristmill_recorder.rows import Row
from gristmill_recorder.splicing.bridge import (
    Tokens,
    bridge,
    bridge_without_end,
    end_of_turn,
    end_probes,
    following_passage,
    may_contain_passages,
    passage,
    skeletons,
)
from gristmill_recorder.splicing.conversation import LIMITS, SETTINGS, Conversation, Document

_MAX_KINDS = 4096


class _Kind(NamedTuple):
    """What decides how a template goes on after an answer. roles: of the new messages. last: the token that ended the
    answer; None if a limit did. is_cut: see `Row`."""

    settings: bytes
    roles: tuple[str, ...]
    last: int | None
    is_cut: bool
    has_calls: bool


class Bridges:
    """Finds bridges. The first of a kind takes three renderings. Later ones take one, as long as the same tokens stand
    around the end of the answer: they are compared, so that a template that goes on otherwise is rendered again.

    after_answer: see `EngineApi`.
    """

    def __init__(self, renderer: Renderer, after_answer: Sequence[Document]) -> None:
        self._renderer, self._after_answer = renderer, after_answer
        self._passages: dict[_Kind, Tokens] = {}
        # The settings of templates that do not show calls.
        self._hides_calls: set[bytes] = set()
        # The tokens that ended answers of a model, and those that its template writes at the end of turns.
        self._ends: defaultdict[str, set[int]] = defaultdict(set)
        self._own_ends: dict[str, set[int]] = {}

    def ended(self, model: str, last: int) -> None:
        """Notes that an answer of the model ended by this token."""
        self._ends[model].add(last)

    async def find(
        self, request: Document, conversation: Conversation, base: Row, headers: Mapping[str, str]
    ) -> tuple[Tokens | None, str]:
        """Returns the tokens that follow the recorded answer of `base`; or None, and the cause."""
        messages, count, settings = conversation.messages, conversation.answered, conversation.settings
        has_calls, shows_calls = bool(messages[count - 1].get("tool_calls")), settings not in self._hides_calls
        roles = tuple(message["role"] for message in messages[count:])
        kind = _Kind(settings, roles, _last(base), base.is_cut, has_calls)
        first, *others = skeletons(messages, count, shows_calls=shows_calls)
        prompts = None
        known, others_say = self._passages.get(kind), [first[: count - 1], first[count:], *map(request.get, SETTINGS)]
        if known and not may_contain_passages(others_say):
            prompts = await self._renderer.render(request, [first], headers)
            following = following_passage(known, prompts[0]) if prompts else None
            if following is not None:
                return following, ""
        more = await self._renderer.render(request, others if prompts else [first, *others], headers)
        if more is None:
            return None, "rendering"
        prompts = [*(prompts or ()), *more]
        if has_calls and shows_calls and prompts[0] == prompts[1]:
            self._hides_calls.add(settings)
            return await self.find(request, conversation, base, headers)
        answers = [[*each[:count], *self._after_answer] for each in (first, others[0])]
        following = await self._bridge(request, prompts, answers, base, headers, has_calls=has_calls)
        if following is None:
            return None, "end"
        if len(self._passages) >= _MAX_KINDS:
            self._passages.clear()
            self._hides_calls.clear()
        self._passages[kind] = passage(prompts, following)
        return following, ""

    async def _bridge(
        self,
        request: Document,
        prompts: Sequence[Tokens],
        answers: list[list[Document]],
        base: Row,
        headers: Mapping[str, str],
        *,
        has_calls: bool,
    ) -> Tokens | None:
        model, last = str(request.get("model")), _last(base)
        following = bridge(prompts, last, (), is_cut=base.is_cut, has_calls=has_calls)
        if following is not None:
            return following
        # The answer ended by a token that the template does not write first, or was cut behind a call.
        probes = end_probes(self._after_answer)
        if model not in self._own_ends and (rendered := await self._renderer.render(request, probes, headers)):
            self._own_ends[model] = end_of_turn(rendered)
        own = self._own_ends.get(model)
        if own:
            ends = own | self._ends[model]
            return bridge(prompts, last, ends, is_cut=base.is_cut, has_calls=has_calls)
        rendered = None if own is None else await self._renderer.render(request, answers, headers)
        return bridge_without_end(prompts, rendered, last) if rendered else None


def _last(base: Row) -> int | None:
    """Returns the token that ended the answer; None if a limit did."""
    return None if base.is_cut and base.stop_reason in LIMITS else int(base.response[-1])
