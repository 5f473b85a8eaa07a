"""Prompt groups: search by uid; the samples of a group that is not sealed yet, and the tokens of its rows."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from gristmill.errors import NotFoundError
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.views.tokens import SHOWN_TOKENS, ShownTokens, conversation_of
from gristmill_service.run.machine.answers import GroupAnswer, GroupState
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.groups import Group, Trajectory
from gristmill_service.run.machine.state import State
from gristmill_service.run.open_rows import what_became_of
from gristmill_service.run.run import Run

SampleState = Literal["no row", "open", "waits for a reward", "complete", "aborted"]
_STATES: tuple[SampleState, ...] = get_args(SampleState)
_SHOWN = 200
_SHOWN_MATCHES = 50
_SEARCHED_ROUNDS = 1000


class FoundGroup(Document):
    uid: str
    round: int
    tag: str
    state: GroupState
    batch: int | None = Field(description="The batch that contains the group.")
    reason: str = Field(description="Why the group was dropped, or is not complete.")


class FoundGroups(Document):
    run: str
    in_all: int
    archived: int = Field(description="Groups of freed batches, which are found only by their whole uid.")
    groups: list[FoundGroup] = Field(description="The first 50 groups; groups whose uid equals the text come first.")


class GroupSample(Document):
    """A sample of a group. no row: no row arrived. open: some rows are missing. aborted: a worker aborted it."""

    sample: int
    state: SampleState
    reason: str = Field(default="", description="Why the sample was aborted.")
    attempt: int = 0
    rows: int = Field(default=0, description="Steps that arrived.")
    newest_step: int | None = Field(default=None, description="The highest number of a step that arrived.")
    missing_step: int | None = Field(default=None, description="The first missing step; null if none is missing.")
    tokens: int = Field(default=0, description="Tokens of the newest step, including its prompt.")
    reward: float | None = Field(default=None, description="Reward of the newest step; null while it is pending.")


class GroupSamples(Document):
    """The samples of a group. complete: the number of complete samples. in_all: the number of all samples."""

    run: str
    uid: str
    round: int
    tag: str
    complete: int
    in_all: int
    samples: list[GroupSample] = Field(
        description="The first 200 samples, ordered by state; incomplete samples come first."
    )


class OpenRowTokens(ShownTokens):
    """A step as it was sent. tokens: at most 2,000, from `start`. loss_mask: one value per token, -1 in the prompt."""

    step: int


async def find_groups(run: Run, text: str) -> FoundGroups:
    """Returns the groups whose uid contains this text; archived groups only if it is their uid, of the last 1,000
    rounds."""
    rounds = run.read(lambda state, _: state.next_round)
    named = [GroupKey(round_, text) for round_ in range(max(0, rounds - _SEARCHED_ROUNDS), rounds)]
    found: dict[GroupKey, GroupAnswer] = {}
    for parts in (run.groups(named), run.groups()):
        async for part in parts:
            found |= {GroupKey(group.round, group.uid): group for group in part if text in group.uid}
            await asyncio.sleep(0)
    matches = [group for group in found.values() if group.state != "unknown"]
    matches.sort(key=lambda group: (group.uid != text, group.uid, group.round))
    return FoundGroups(
        run=run.name,
        in_all=len(matches),
        archived=await run.archived(),
        groups=[FoundGroup(**asdict(group)) for group in matches[:_SHOWN_MATCHES]],
    )


def group_samples(run: Run, key: GroupKey) -> GroupSamples:
    """Returns the samples of a group. Raises NotFoundError unless the group is open, or complete and not sealed."""

    def read(state: State) -> GroupSamples:
        group = state.open.get(key)
        if group is None:
            raise NotFoundError(f"{key} is not open: {what_became_of(state, key)}")
        shown = sorted(range(group.sampled), key=lambda sample: _STATES.index(_state(group, sample)))[:_SHOWN]
        return GroupSamples(
            run=run.name,
            uid=key.uid,
            round=key.round,
            tag=group.tag,
            complete=group.done,
            in_all=group.sampled,
            samples=[_sample(group, sample) for sample in shown],
        )

    return run.read(lambda state, _: read(state))


async def row_tokens(run: Run, key: GroupKey, sample: int, step: int, start: int) -> OpenRowTokens:
    """Returns the tokens of a step. Raises NotFoundError if the group is not open or the step has not arrived."""
    row = await run.open_row(key, sample, step)
    prompt = int(row.prompt_lengths[0])
    tokens = row.tokens[0].tolist()
    mask = np.concatenate([np.full(prompt, -1), row.loss_mask[0]]).tolist()
    shown = slice(start, start + SHOWN_TOKENS)
    return OpenRowTokens(
        run=run.name,
        uid=key.uid,
        round=key.round,
        sample=sample,
        step=step,
        prompt_tokens=prompt,
        tokens_in_all=len(tokens),
        start=start,
        tokens=tokens[shown],
        loss_mask=mask[shown],
        conversation="" if start else conversation_of(row, [0]),
    )


def _state(group: Group, sample: int) -> SampleState:
    trajectory = group.trajectories.get(sample)
    if trajectory is None:
        return "aborted" if sample in group.aborted else "no row"
    if trajectory.is_complete:
        return "complete"
    return "waits for a reward" if trajectory.has_every_step else "open"


def _sample(group: Group, sample: int) -> GroupSample:
    trajectory, state = group.trajectories.get(sample), _state(group, sample)
    if trajectory is None:
        return GroupSample(sample=sample, state=state, reason=group.aborted.get(sample, ""))
    newest = trajectory.rows[trajectory.highest]
    return GroupSample(
        sample=sample,
        state=state,
        attempt=trajectory.attempt,
        rows=len(trajectory.rows),
        newest_step=newest.step,
        missing_step=_missing(trajectory),
        tokens=newest.tokens,
        reward=newest.reward,
    )


def _missing(trajectory: Trajectory) -> int | None:
    """Returns the first missing step; None if all steps up to the last have arrived."""
    if trajectory.has_every_step:
        return None
    return next(step for step in range(len(trajectory.rows) + 1) if step not in trajectory.rows)
