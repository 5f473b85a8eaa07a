"""Seal complete groups into batches, or drop them by filters, and free batches; record the result of building a batch.

Reads the state, returns events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

import numpy as np

from gristmill._wire.columns import Ragged
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import FailedPreconditionError, ResourceExhaustedError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.credit.scores import trajectory_scores
from gristmill_service.pipeline.rows.comparison import compared_by
from gristmill_service.run.machine.answers import ColumnPlace, Sealed
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.decisions.admission import RETRY_AFTER_S, Room, lacking_tags
from gristmill_service.run.machine.decisions.pacing import UNBOUNDED
from gristmill_service.run.machine.events import (
    BatchFailed,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    Event,
    GroupClosed,
    GroupDropped,
    GroupKey,
    PolicyVersionAnnounced,
    RewardsSet,
    RowsStored,
    RunFinished,
    TagSharesLapsed,
    TagWait,
    TrajectoryAborted,
    WrittenColumn,
)
from gristmill_service.run.machine.groups import SURPLUS, Group, by_group
from gristmill_service.run.machine.state import Decision, State

MaySeal = Callable[[Iterable[Group]], bool]
"""A function of the groups of the next batch. Returns whether they may be sealed now."""


def consequences(
    state: State, config: RunConfig, happened: Sequence[Event] | None, may_seal: MaySeal = lambda groups: True
) -> Iterator[Sequence[Event]]:
    """Yields the events that follow from a call's events, in steps. The caller applies each step before it requests the
    next one.

    happened: all events of the call, which are applied; None to check the whole state. A run has thousands of groups,
    so a group is checked only when it changes or when the policy version changes.
    """
    groups = list(state.open) if happened is None else _changed_groups(state, happened)
    if config.surplus and (surplus := _surplus(state, groups)):
        yield surplus
    if config.stale == "drop" or config.zero_variance_filter == "replace":
        complete = (key for key in groups if key in state.complete)
        if unfit := [GroupDropped(key, why) for key in complete if (why := _unfit(state.open[key], state, config))]:
            yield unfit
    while following := _next_batch(state, config, may_seal) or (state.batches and progress.freed(state)):
        yield following


def _next_batch(state: State, config: RunConfig, may_seal: MaySeal) -> list[BatchSealed]:
    """Returns the next batch if it can be sealed now."""
    if len(state.batches) >= config.max_buffered_batches or (config.seal_by == "call" and not state.finished):
        return []
    least = 1 if state.finished else config.train_batch_size
    if len(state.complete) < least:
        return []
    if config.tag_shares and not state.finished and not state.tags_lapsed:
        keys = _shared_groups(state, config) or []
    else:
        keys = _preferred(_next_groups(state, config), state, config)
    is_due = len(keys) >= least and may_seal(state.open[key] for key in keys)
    return [_seal(state, config, keys)] if is_due else []


def tag_timeout(state: State, config: RunConfig, room: Room, now: float) -> list[Event]:
    """Returns the events that start, end or time out the wait of a batch that needs only `tag_shares`. After
    `tag_timeout_s`, the batch is sealed without them."""
    if config.tag_timeout_s is None or state.tags_lapsed:
        return []
    if not _waits_for_tags(state, config, room):
        return [] if state.tag_wait is None else [TagWait(None)]
    if state.tag_wait is None:
        return [TagWait(now)]
    return [TagSharesLapsed()] if now - state.tag_wait >= config.tag_timeout_s else []


def missing_tags(state: State, config: RunConfig) -> dict[str, int]:
    """Returns how many more complete groups of each tag the next batch needs."""
    return lacking_tags(state, config, lambda counts: counts.complete)


def seal_batch(state: State, config: RunConfig, number: int | None) -> Decision[Sealed]:
    """Seals complete groups into a batch: with `seal_by: call` all of them, else at most train_batch_size.

    number: the number of the batch, so that a repeated call changes nothing; None for the next batch.
    """
    following = state.batches_sealed
    number = following if number is None else number
    if 0 <= number < following:
        return [], lambda after: Sealed(number, after.prompts[number])
    if number != following:
        raise FailedPreconditionError(f"batch {number} cannot be sealed, the next is {following}; seal that")
    if not state.complete:
        raise FailedPreconditionError(
            f"no prompt group is complete ({len(state.open)} are open), so no batch can be sealed; submit the "
            "missing steps and rewards, or abort the trajectories that will not finish"
        )
    if config.seal_by == "call" and len(state.batches) >= config.max_buffered_batches:
        raise ResourceExhaustedError(
            f"batch {number} cannot be sealed yet: max_buffered_batches: {config.max_buffered_batches} batches are "
            "stored; wait for the trainer to commit one, or raise the setting",
            RETRY_AFTER_S,
        )
    sealed = _seal(state, config, _preferred(_complete_groups(state, config), state, config))
    return [sealed], lambda after: Sealed(number, after.prompts[number])


def finish(state: State, config: RunConfig) -> Decision[int]:
    """Ends the rollouts. The answer is the total number of batches."""
    incomplete = [] if state.finished else [key for key in state.open if key not in state.complete]
    events = [] if state.finished else [RunFinished(), *(GroupDropped(key, "finished") for key in incomplete)]
    return events, lambda after: after.batches_sealed + remaining_batches(after, config)


def record_batch(
    state: State,
    event: BatchPublished | BatchFailed,
    dp_size: int,
    written: Mapping[ColumnPlace, WrittenColumn] | None,
) -> Decision[bool]:
    """Records the result of building a batch. The answer is whether the result is still wanted. It is not if the batch
    is gone, or if it must now be built for another number of ranks or with other columns.

    dp_size: the number of ranks in the result. written: the columns that it was built with; None if only from rows.
    """
    batch = state.batches.get(event.batch)
    is_wanted = batch is not None and written in (None, batch.written) and dp_size == state.dp_size
    return [event] if is_wanted else [], lambda _: is_wanted


def withdraw_batch(state: State, number: int) -> Decision[bool]:
    """Schedules a batch whose shards the store lost to be built again. The answer is whether it was published."""
    batch = state.batches.get(number)
    was_published = batch is not None and batch.is_published
    return [BatchWithdrawn(number)] if was_published else [], lambda _: was_published


def remaining_batches(state: State, config: RunConfig) -> int:
    """Returns how many more batches a finished run makes of its complete groups."""
    return -(-len(state.complete) // (config.train_batch_size if config.seal_by == "count" else UNBOUNDED))


def _seal(state: State, config: RunConfig, keys: list[GroupKey]) -> BatchSealed:
    tags = Counter(state.open[key].tag for key in keys) if config.tag_shares else Counter()
    short = tuple(tag for tag, count in config.tag_groups(len(keys)).items() if tags[tag] < count)
    return BatchSealed(state.batches_sealed, tuple(keys), state.policy_version, short)


def _shared_groups(state: State, config: RunConfig) -> list[GroupKey] | None:
    """Returns the groups of the next batch according to its `tag_shares`; None if the batch has to wait."""
    if missing_tags(state, config):
        return None
    shares, keys = _Shares(config, config.train_batch_size), list[GroupKey]()
    for key in state.complete if config.seal_order == "completion" else state.open:
        tag, is_complete = state.open[key].tag, key in state.complete
        # An incomplete group without a tag may still get one from its rows.
        has_slot = shares.take(tag) or not (tag or is_complete)
        if not has_slot:
            continue
        if not is_complete:
            return None
        keys.append(key)
        if len(keys) == config.train_batch_size:
            return keys
    return None


def _waits_for_tags(state: State, config: RunConfig, room: Room) -> bool:
    """Returns whether `tag_shares` alone keeps the next batch from being sealed, or keeps other groups from being
    admitted."""
    if not missing_tags(state, config) or len(state.batches) >= config.max_buffered_batches:
        return False
    if room.reserved and room.groups and not room.groups_of(""):
        return True
    others = islice(_next_groups(state, config), config.train_batch_size)
    return sum(1 for _ in others) == config.train_batch_size


def _preferred(candidates: Iterable[GroupKey], state: State, config: RunConfig) -> list[GroupKey]:
    """Returns the groups of a batch, in their order. If there are more than a batch needs, groups that fill
    `tag_shares` are preferred."""
    if not config.tag_shares:
        return list(islice(candidates, config.train_batch_size if config.seal_by == "count" else None))
    keys = list(candidates)
    size = min(len(keys), config.train_batch_size)
    shares = _Shares(config, size)
    taken = {key for key in keys if shares.take(state.open[key].tag)}
    rest = islice((key for key in keys if key not in taken), size - len(taken))
    taken.update(list(rest))
    return [key for key in keys if key in taken]


class _Shares:
    """The slots of a batch: a number reserved for each tag, and the rest for any group."""

    def __init__(self, config: RunConfig, size: int) -> None:
        self._reserved = config.tag_groups(size)
        self._free = size - sum(self._reserved.values())

    def take(self, tag: str) -> bool:
        """Reserves a slot for a group with this tag. Returns whether there was one."""
        if self._reserved.get(tag):
            self._reserved[tag] -= 1
        elif self._free > 0:
            self._free -= 1
        else:
            return False
        return True


def _next_groups(state: State, config: RunConfig) -> Iterable[GroupKey]:
    """Returns the complete groups that come next in `seal_order`."""
    if config.seal_order == "completion" or state.finished:
        return _complete_groups(state, config)
    return takewhile(lambda key: key in state.complete, state.open)


def _complete_groups(state: State, config: RunConfig) -> Iterator[GroupKey]:
    """Yields all complete groups in `seal_order`."""
    if config.seal_order == "completion":
        return iter(state.complete)
    return (key for key in state.open if key in state.complete)


def _surplus(state: State, keys: Iterable[GroupKey]) -> list[TrajectoryAborted]:
    """Returns the aborts of trajectories that are not needed because their groups have enough complete ones."""
    groups = [state.open[key] for key in keys if key in state.open]
    return [
        TrajectoryAborted(TrajectoryKey(*group.key, sample), SURPLUS) for group in groups for sample in group.left_out()
    ]


def _changed_groups(state: State, happened: Sequence[Event]) -> Collection[GroupKey]:
    """Returns the groups of which these events may have changed what follows from them, in a fixed order."""
    keys: dict[GroupKey, None] = {}
    for event in happened:
        match event:
            case RowsStored(rows):
                keys.update(dict.fromkeys(key for key, _ in by_group(rows)))
            case RewardsSet(rewards):
                keys.update(dict.fromkeys(GroupKey(*reward.trajectory[:2]) for reward in rewards))
            case TrajectoryAborted(trajectory, _):
                keys[GroupKey(*trajectory[:2])] = None
            case GroupClosed(key, _):
                keys[key] = None
            case PolicyVersionAnnounced():
                keys.update(state.complete)
    return keys


def _unfit(group: Group, state: State, config: RunConfig) -> str | None:
    """Returns the reason why the group must not be trained; None if it may be."""
    if config.stale == "drop" and config.max_staleness is not None:
        oldest = group.oldest_version()
        if oldest is not None and state.policy_version - oldest > config.max_staleness:
            return "stale"
    if config.zero_variance_filter == "replace" and _is_zero_variance(group, config):
        return "zero_variance"
    return None


def _is_zero_variance(group: Group, config: RunConfig) -> bool:
    rows = list(group.ordered_rows())
    # Sum each step's reward and its rounding error as if they were two tokens.
    parts = np.array([[row.reward, row.reward_rest] for row in rows], np.float64)
    starts = [index for index, row in enumerate(rows) if row.step == 0]
    bounds, pairs = np.array([*starts, len(rows)]), Ragged.from_lengths(parts.ravel(), np.full(len(rows), 2))
    scores = trajectory_scores(parts[:, 0], bounds, config.trajectory_score, pairs).tolist()
    first = [rows[start] for start in starts]
    groups = compared_by((row.agent for row in first), (row.episode for row in first), config.episode_agents)
    # Each comparison group has one score.
    return len(scores) > 1 and len({*zip(groups, scores, strict=True)}) == len({*groups})
