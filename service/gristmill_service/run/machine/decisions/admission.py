"""How many prompt groups may be admitted, and why no more: what paces producers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import Admission
from gristmill_service.run.machine.decisions.row_rules import NamedTags
from gristmill_service.run.machine.events import GroupKey, NewGroup
from gristmill_service.run.machine.state import State

RETRY_AFTER_S = 0.5

UNBOUNDED = 1 << 31
_LEAST_OVERDRAFT = 1 << 20


class Room(NamedTuple):
    """reason: what sets the limit, for a person who is refused. kept: of these groups, those that only groups of a tag
    may be, so that what comes first does not take the room of what `tag_shares` waits for. waits: whether the run can
    tell when there is more of it."""

    groups: int
    reason: str
    kept: Mapping[str, int] = MappingProxyType({})
    waits: bool = True

    def within(self, other: Room) -> Room:
        """Where both are limits. What is kept is this one's."""
        return self if self.groups <= other.groups else other._replace(kept=self.kept)

    def groups_of(self, tag: str) -> int:
        """Groups of a tag, or of none, that may be admitted now."""
        return max(0, self.groups - sum(self.kept.values()) + self.kept.get(tag, 0))

    def less(self, tag: str) -> Room:
        """What is left after one more of the tag."""
        if not self.kept:
            return Room(self.groups - 1, self.reason, self.kept, self.waits)
        kept = {name: count - (name == tag) for name, count in self.kept.items()}
        return self._replace(groups=self.groups - 1, kept={name: count for name, count in kept.items() if count})

    def reason_for(self, tag: str) -> str:
        if self.groups <= 0 or not self.kept:
            return self.reason
        return (
            f"the {self.groups} groups that may begin are reserved for the tags {', '.join(map(repr, self.kept))} "
            "(tag_shares)"
        )


class BytesLeft(NamedTuple):
    """Bytes that rows of groups which are admitted may still take. reason: what sets the limit, for a person who is
    refused."""

    nbytes: int
    reason: str


def with_overdraft(limit: int) -> int:
    """What rows may take where admission stops at `limit`. What admitted groups bring is an estimate: a quarter more
    lets batches that are under way be filled, and beyond that even their rows wait."""
    return limit + limit // 4 + _LEAST_OVERDRAFT


def room(state: State, config: RunConfig, service_bytes: int) -> Room:
    """Groups that may be admitted now. service_bytes: what the service's other runs leave for rows of this one."""
    bounds = [_by_batches(state, config), _by_bytes(state, config), _by_service(state, service_bytes)]
    kept = _kept(state, config)
    needed = max(config.train_batch_size - len(state.open), sum(kept.values()))
    if needed > 0 and not state.batches:
        # Nothing is held that could be freed: without these groups the next batch could never be filled.
        bounds = [Room(max(bound.groups, needed), bound.reason) for bound in bounds]
    if config.max_staleness is not None:
        bounds.append(_by_staleness(state, config, config.max_staleness))
    least = min(bounds, key=lambda bound: bound[:2])
    return Room(max(0, least.groups), least.reason, kept)


def _kept(state: State, config: RunConfig) -> dict[str, int]:
    """The groups of each tag that the next batch lacks, open ones counted."""
    if not config.tag_shares or state.finished or state.tags_lapsed:
        return {}
    lacking = {
        tag: count - (state.tags[tag].open if tag in state.tags else 0)
        for tag, count in config.tag_groups(config.train_batch_size).items()
    }
    return {tag: count for tag, count in lacking.items() if count > 0}


def begin(
    state: State, wanted: Sequence[NewGroup], config: RunConfig, room: Room, tags: NamedTags
) -> tuple[list[Admission], dict[GroupKey, NewGroup]]:
    """What becomes of each group where so many more may be admitted, and which are admitted by this. tags: those that
    the request names."""
    found: list[Admission] = []
    admitted: dict[GroupKey, NewGroup] = {}
    for key, samples, _ in wanted:
        tag = tags.of(key)
        closed = state.closed.get(key)
        if closed is not None:
            is_dropped = isinstance(closed, str) or state.is_dropped(closed)
            found.append(Admission.DROPPED if is_dropped else Admission.SEALED)
        elif key in state.open or key in admitted:
            found.append(Admission.ADMITTED)
        elif room.groups_of(tag):
            room = room.less(tag)
            admitted[key] = NewGroup(key, samples or config.n_samples_per_prompt, tag)
            found.append(Admission.ADMITTED)
        else:
            found.append(Admission.NO_ROOM)
    return found, admitted


def row_bytes_promised(state: State) -> int:
    """Bytes of rows that are held, and that open groups are expected to bring."""
    return state.row_bytes + _reserved(state)


def bytes_left(state: State, config: RunConfig, service_bytes: int) -> BytesLeft:
    """service_bytes: what the run's rows may take of the service's."""
    of_run, held = with_overdraft(config.max_buffered_bytes), state.row_bytes
    if of_run <= service_bytes:
        reason = (
            f"{held} bytes of rows are held, and max_buffered_bytes: {config.max_buffered_bytes} is passed by a "
            "quarter at most; commit a batch, abort groups that will not be complete, or raise the setting"
        )
    else:
        reason = (
            f"{held} bytes of rows are held, and the service's other runs leave {service_bytes}; batches have to be "
            "freed, abort groups that will not be complete, or raise the service's max_row_bytes"
        )
    return BytesLeft(max(0, min(of_run, service_bytes) - held), reason)


def _mean(state: State) -> float:
    return state.completed_bytes / state.completions if state.completions else 0.0


def _reserved(state: State) -> int:
    return int(_mean(state) * (len(state.open) - len(state.complete)))


def _by_batches(state: State, config: RunConfig) -> Room:
    held = len(state.open) + state.groups_buffered
    return Room(
        config.max_buffered_batches * config.train_batch_size - held,
        f"max_buffered_batches: {config.max_buffered_batches} batches of train_batch_size: {config.train_batch_size} "
        "are held; the trainer has to commit one, or raise the setting",
    )


def _by_bytes(state: State, config: RunConfig) -> Room:
    held, reserved, limit = state.row_bytes + state.shard_bytes, _reserved(state), config.max_buffered_bytes
    return Room(
        _groups_in(state, limit - held - reserved),
        f"{held} bytes are held and {reserved} reserved of max_buffered_bytes: {limit}; the trainer has to commit a "
        "batch, or raise the setting",
    )


def _by_service(state: State, service_bytes: int) -> Room:
    promised = row_bytes_promised(state)
    return Room(
        _groups_in(state, service_bytes - promised),
        f"{promised} bytes of rows are held or reserved of the {max(0, service_bytes)} that the service's other runs "
        "leave; batches have to be sealed, or raise the service's max_row_bytes",
    )


def _groups_in(state: State, free: int) -> int:
    """How many groups fit. Before the first is complete their size is unknown: anything fits as long as any is free."""
    mean = _mean(state)
    return int(free // mean) if mean else (UNBOUNDED if free > 0 else 0)


def _by_staleness(state: State, config: RunConfig, max_staleness: int) -> Room:
    """What is accepted plus running stays within (max_staleness + version + 1) batches (AReaL, Fu et al. 2025)."""
    batches = max_staleness + state.policy_version + 1
    return Room(
        batches * config.train_batch_size - len(state.open) - state.groups_sealed,
        f"max_staleness: {max_staleness} at policy version {state.policy_version} allows {batches} batches in all; the "
        "trainer has to announce a newer version",
    )
