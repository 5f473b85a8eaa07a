"""When complete groups leave the run: into a batch, or dropped by a filter. Reads the state, returns events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

import numpy as np

from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import FailedPreconditionError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.credit.advantage import all_equal, trajectory_scores
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.events import (
    BatchSealed,
    Event,
    GroupClosed,
    GroupDropped,
    GroupKey,
    PolicyVersionAnnounced,
    RewardsSet,
    RowsStored,
    TagSharesLapsed,
    TagWait,
    TrajectoryAborted,
)
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.row_keys import by_group
from gristmill_service.run.machine.state import State


def due(state: State, config: RunConfig, happened: Sequence[Event] | None) -> list[Event]:
    """What follows from what just happened; empty when nothing does. Apply it and ask again with it. None asks what
    follows from anything before.

    Groups are judged when they complete and when the policy version moves, not at every call: a run holds thousands.
    """
    if config.surplus and (surplus := _surplus(state, happened)):
        return [*surplus]
    if _has_filters(config):
        dropped = [
            GroupDropped(key, reason)
            for key in (list(state.complete) if happened is None else _touched(state, happened))
            if (reason := _unfit(state.open[key], state, config))
        ]
        if dropped:
            return [*dropped]
    if len(state.batches) >= config.max_buffered_batches:
        return []
    least = 1 if state.finished else config.train_batch_size
    if len(state.complete) < least:
        return []
    if config.tag_shares and not state.finished and not state.tags_lapsed:
        shared = _shared_groups(state, config)
        return [] if shared is None else [_seal(state, config, shared)]
    keys = _preferred(_next_groups(state, config), state, config)
    return [_seal(state, config, keys)] if len(keys) >= least else []


def tag_timeout(state: State, config: RunConfig, room: Room, now: float) -> list[Event]:
    """What becomes of a batch that waits for nothing but `tag_shares`: after `tag_timeout_s` it goes on without."""
    if config.tag_timeout_s is None or state.tags_lapsed:
        return []
    if not _waits_for_tags(state, config, room):
        return [] if state.tag_wait is None else [TagWait(None)]
    if state.tag_wait is None:
        return [TagWait(now)]
    return [TagSharesLapsed()] if now - state.tag_wait >= config.tag_timeout_s else []


def missing_tags(state: State, config: RunConfig) -> dict[str, int]:
    """The complete groups of each tag that the next batch lacks."""
    if not config.tag_shares or state.finished or state.tags_lapsed:
        return {}
    lacking = {
        tag: count - (state.tags[tag].complete if tag in state.tags else 0)
        for tag, count in config.tag_groups(config.train_batch_size).items()
    }
    return {tag: count for tag, count in lacking.items() if count > 0}


def seal_now(state: State, config: RunConfig) -> BatchSealed:
    """A batch of what is complete, also fewer groups than train_batch_size."""
    if not state.complete:
        raise FailedPreconditionError(
            f"no prompt group is complete ({len(state.open)} are open), so there is nothing to seal; submit the "
            "missing steps and rewards, or abort the trajectories that will not end"
        )
    return _seal(state, config, _preferred(_complete_groups(state, config), state, config))


def remaining_batches(state: State, train_batch_size: int) -> int:
    """How many batches a finished run still makes of what is complete."""
    return -(-len(state.complete) // train_batch_size)


def _seal(state: State, config: RunConfig, keys: list[GroupKey]) -> BatchSealed:
    found = Counter(state.open[key].tag for key in keys) if config.tag_shares else Counter()
    short = tuple(tag for tag, count in config.tag_groups(len(keys)).items() if found[tag] < count)
    return BatchSealed(state.batches_sealed, tuple(keys), state.policy_version, short)


def _shared_groups(state: State, config: RunConfig) -> list[GroupKey] | None:
    """The next batch with its `tag_shares`; None where it has to wait."""
    if missing_tags(state, config):
        return None
    shares, keys = _Shares(config, config.train_batch_size), list[GroupKey]()
    for key in state.complete if config.seal_order == "completion" else state.open:
        if not shares.take(state.open[key].tag):
            continue
        if key not in state.complete:
            return None
        keys.append(key)
        if len(keys) == config.train_batch_size:
            return keys
    return None


def _waits_for_tags(state: State, config: RunConfig, room: Room) -> bool:
    """Whether the next batch could be sealed but for `tag_shares`, or room is kept for them that others need."""
    if not missing_tags(state, config) or len(state.batches) >= config.max_buffered_batches:
        return False
    if room.kept and room.groups and not room.groups_of(""):
        return True
    others = islice(_next_groups(state, config), config.train_batch_size)
    return sum(1 for _ in others) == config.train_batch_size


def _preferred(candidates: Iterable[GroupKey], state: State, config: RunConfig) -> list[GroupKey]:
    """As many of these groups as a batch takes, in their order: first those that `tag_shares` asks for."""
    if not config.tag_shares:
        return list(islice(candidates, config.train_batch_size))
    keys = list(candidates)
    size = min(len(keys), config.train_batch_size)
    shares = _Shares(config, size)
    taken = {key for key in keys if shares.take(state.open[key].tag)}
    rest = islice((key for key in keys if key not in taken), size - len(taken))
    taken.update(list(rest))
    return [key for key in keys if key in taken]


class _Shares:
    """The places of a batch: so many for each tag at least, and the others for whatever comes first."""

    def __init__(self, config: RunConfig, size: int) -> None:
        self._kept = config.tag_groups(size)
        self._free = size - sum(self._kept.values())

    def take(self, tag: str) -> bool:
        """Takes a place for a group, where there is one."""
        if self._kept.get(tag):
            self._kept[tag] -= 1
        elif self._free > 0:
            self._free -= 1
        else:
            return False
        return True


def _next_groups(state: State, config: RunConfig) -> Iterable[GroupKey]:
    """The groups that come next in `seal_order`, as far as they are complete."""
    if config.seal_order == "completion" or state.finished:
        return _complete_groups(state, config)
    return takewhile(lambda key: key in state.complete, state.open)


def _complete_groups(state: State, config: RunConfig) -> Iterator[GroupKey]:
    """All that are complete, in `seal_order`."""
    if config.seal_order == "completion":
        return iter(state.complete)
    return (key for key in state.open if key in state.complete)


def _surplus(state: State, happened: Sequence[Event] | None) -> list[TrajectoryAborted]:
    """The trajectories that groups do without, because enough of the others are complete."""
    keys = list(state.open) if happened is None else _named(happened)
    groups = [state.open[key] for key in keys if key in state.open]
    return [
        TrajectoryAborted(TrajectoryKey(*group.key, sample), "surplus")
        for group in groups
        for sample in group.left_out()
    ]


def _touched(state: State, happened: Sequence[Event]) -> list[GroupKey]:
    """The complete groups that these events may have made unfit for training, in a fixed order."""
    keys = _named(happened)
    if any(isinstance(event, PolicyVersionAnnounced) for event in happened):
        keys.update(state.complete)
    return [key for key in keys if key in state.complete]


def _named(happened: Sequence[Event]) -> dict[GroupKey, None]:
    """The groups that these events changed, in a fixed order."""
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
    return keys


def _has_filters(config: RunConfig) -> bool:
    """Whether any group can be unfit."""
    return config.stale == "drop" or config.zero_variance_filter == "replace"


def _unfit(group: Group, state: State, config: RunConfig) -> str | None:
    """Why the group is not to be trained on."""
    if config.stale == "drop" and config.max_staleness is not None:
        oldest = group.oldest_version()
        if oldest is not None and state.policy_version - oldest > config.max_staleness:
            return "stale"
    if config.zero_variance_filter == "replace" and _is_zero_variance(group, config):
        return "zero_variance"
    return None


def _is_zero_variance(group: Group, config: RunConfig) -> bool:
    rows = list(group.ordered_rows())
    rewards = np.array([row.reward for row in rows], np.float64)
    starts = [index for index, row in enumerate(rows) if row.step == 0]
    return all_equal(trajectory_scores(rewards, np.array([*starts, len(rows)]), config.trajectory_score))
