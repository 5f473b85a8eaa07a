"""Begin prompt groups: decide how many may be admitted, which paces producers, and check their sizes and tags.

Also computes the limits of bytes and of quotas that apply to rows of open groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gristmill._wire.steps import TrajectoryKey, check_tag, check_uid
from gristmill.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from gristmill_service.access.quotas import Limits, Quota
from gristmill_service.config import MOST_TAGS, RunConfig
from gristmill_service.pipeline.rows.validate import sizes_of
from gristmill_service.run.machine.answers import Admission, Admissions
from gristmill_service.run.machine.decisions import pacing
from gristmill_service.run.machine.decisions.pacing import UNBOUNDED, Asked
from gristmill_service.run.machine.events import GroupKey, GroupsAdmitted, GroupTagged, NewGroup, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import Decision, State, TagGroups

RETRY_AFTER_S = 0.5

# A run does nothing else while it decides and logs a request.
_LEAST_OVERDRAFT = 1 << 20
_QUOTA_WORDS = {"groups": "prompt groups", "rows": "rows", "row_bytes": "bytes of rows"}

FindQuota = Callable[[], Quota]
"""Returns the usage and the limits of the caller's runs."""


class View(Protocol):
    """The parts of a run that decisions read: its state, configuration and capacity."""

    @property
    def state(self) -> State: ...

    @property
    def config(self) -> RunConfig: ...

    def room(self) -> Room:
        """Returns the capacity for new groups."""

    def bytes_left(self) -> BytesLeft:
        """Returns the bytes that rows of admitted groups may still use."""

    def quota(self) -> Quota | None:
        """Returns the run's quota; None if the service sets none."""

    def now(self) -> float:
        """Returns the time on the run's clock, in seconds."""


class Room(NamedTuple):
    """How many more groups may be admitted.

    reason: the limit that applies, for error messages. reserved: for each tag, how many of these groups only that tag
    may use, so that `tag_shares` can be met. waits: whether waiting callers are woken when there is more capacity.
    """

    groups: int
    reason: str
    reserved: Mapping[str, int] = MappingProxyType({})
    waits: bool = True

    def within(self, other: Room) -> Room:
        """Returns the tighter of both limits, with the reservations of this one."""
        return self if self.groups <= other.groups else other._replace(reserved=self.reserved)

    def groups_of(self, tag: str) -> int:
        """Returns how many groups with this tag may be admitted; "" for groups without a tag."""
        if not self.reserved:
            return max(0, self.groups)
        return max(0, self.groups - sum(self.reserved.values()) + self.reserved.get(tag, 0))

    def less(self, tag: str) -> Room:
        """Returns the capacity that is left after one more group of the tag."""
        left = {name: count - (name == tag) for name, count in self.reserved.items()}
        return self._replace(groups=self.groups - 1, reserved={name: count for name, count in left.items() if count})

    def reason_for(self, tag: str) -> str:
        if self.groups <= 0 or not self.reserved:
            return self.reason
        return (
            f"the {self.groups} groups that may begin are reserved for the tags {', '.join(map(repr, self.reserved))} "
            "(tag_shares)"
        )


class BytesLeft(NamedTuple):
    """The bytes that rows of admitted groups may still use. reason: the limit that applies, for error messages."""

    nbytes: int
    reason: str


# --- Beginning groups


def new_groups(round_: int, uids: Sequence[str], n_samples: Sequence[int], tags: Sequence[str]) -> list[NewGroup]:
    """Returns the groups that a request names. Raises InvalidArgumentError for invalid names, or too many groups."""
    if round_ < 0:
        raise InvalidArgumentError(f"round {round_} is negative; send 0 or more")
    if "" in uids:
        raise InvalidArgumentError(f"uids[{list(uids).index('')}] is empty; send a non-empty uid for each prompt")
    for uid in uids:
        check_uid(uid)
    for name, values in (("n_samples", n_samples), ("tags", tags)):
        if len(values) not in (0, len(uids)):
            raise InvalidArgumentError(f"{name} has {len(values)} entries for {len(uids)} uids; send one each, or none")
    sizes, names = n_samples or [0] * len(uids), tags or [""] * len(uids)
    return [NewGroup(GroupKey(round_, uid), size, tag) for uid, size, tag in zip(uids, sizes, names, strict=True)]


def begin_groups(view: View, wanted: Sequence[NewGroup], find_quota: FindQuota | None) -> Decision[Admissions]:
    """Admits these groups in order, as far as there is capacity.

    wanted: a size of 0 means the run's size. find_quota: returns the caller's quota; None if it has none.
    """
    state, config = view.state, view.config
    check_sizes(state, wanted, config)
    tags, outcomes = NamedTags(state), state.outcomes([key for key, _, _ in wanted])
    for key, _, tag in wanted:
        if key not in outcomes:
            tags.name(key, tag, str(key))
    room = Room(len(wanted), "") if state.finished else room_of_caller(view, find_quota)
    admissions: list[Admission] = []
    admitted: dict[GroupKey, NewGroup] = {}
    left, refused = room, None
    for key, samples, _ in wanted:
        outcome = outcomes.get(key)
        if outcome is not None:
            is_dropped = isinstance(outcome, str) or state.is_dropped(outcome)
            admissions.append(Admission.DROPPED if is_dropped else Admission.SEALED)
        elif key in state.open or key in admitted:
            admissions.append(Admission.ADMITTED)
        elif left.groups_of(tag := tags.names.get(key, "")):
            left = left.less(tag)
            admitted[key] = NewGroup(key, samples or config.n_samples_per_prompt, tag)
            admissions.append(Admission.ADMITTED)
        else:
            refused = key if refused is None else refused
            admissions.append(Admission.NO_ROOM)
    if admitted and state.finished:
        raise finished()
    answer = Admissions(admissions, state.policy_version)
    if refused is not None:
        reason = room.reason_for(tags.names.get(refused, ""))
        answer = Admissions(admissions, state.policy_version, RETRY_AFTER_S, reason, room.waits)
    begun = [GroupsAdmitted(tuple(admitted.values()), view.now())] if admitted else []
    return [*begun, *tags.events(admitted.values())], lambda _: answer


def finished() -> FailedPreconditionError:
    return FailedPreconditionError("the run is finished and accepts no more rollouts; create another run")


def check_number_of_new(view: View, rows: Sequence[StoredRow]) -> None:
    """Raises InvalidArgumentError if the rows belong to more new groups than the run can ever admit at once."""
    new = {row.group for row in rows} - view.state.open.keys()
    new -= view.state.outcomes(new).keys()
    most = view.config.max_buffered_batches * view.config.train_batch_size
    if len(new) > most:
        raise InvalidArgumentError(
            f"{min(new)}: the request begins {len(new)} prompt groups, and max_buffered_batches allows {most}; "
            "begin fewer in one request"
        )


class Capacity:
    """The capacity for the rows of one request: groups, rows and bytes. The limits are computed on first use."""

    __slots__ = ("_bytes", "_find_quota", "_reasons", "_room", "_rows", "_view")

    def __init__(self, view: View, find_quota: FindQuota | None) -> None:
        self._view, self._find_quota = view, find_quota
        self._room: Room | None = None
        self._rows, self._bytes, self._reasons = 0, 0, dict[str, str]()

    def is_ample(self, rows: Sequence[StoredRow]) -> bool:
        """Returns whether all of these rows fit, provided that their groups are open."""
        if not self._reasons:
            self._find_left()
        return len(rows) <= self._rows and sum([row.nbytes for row in rows]) <= self._bytes

    def take(self, row: StoredRow, begins: str | None) -> None:
        """Reserves capacity for a row. Raises ResourceExhaustedError and reserves nothing if there is too little.

        begins: the tag of the group that the row begins ("" if it has none); None if the group is open already.
        """
        if not self._reasons:
            self._find_left()
        rows, nbytes, room = self._rows - 1, self._bytes - row.nbytes, self._room
        if begins is not None:
            room = room or room_of_caller(self._view, self._find_quota)
            if not room.groups_of(begins):
                raise ResourceExhaustedError(
                    f"{row.group}: no capacity for another prompt group: {room.reason_for(begins)}", RETRY_AFTER_S
                )
            room = room.less(begins)
        if rows < 0:
            raise self._exceeded(row, "rows", self._rows, 1)
        if nbytes < 0:
            raise self._exceeded(row, "row_bytes", self._bytes, row.nbytes)
        self._rows, self._bytes, self._room = rows, nbytes, room

    def _find_left(self) -> None:
        self._rows, (self._bytes, reason) = UNBOUNDED, self._view.bytes_left()
        self._reasons = {"row_bytes": reason}
        for quota in (self._view.quota(), self._find_quota and self._find_quota()):
            if quota is not None:
                self._rows = self._tighter("rows", self._rows, quota)
                self._bytes = self._tighter("row_bytes", self._bytes, quota)

    def _tighter(self, kind: str, left: int, quota: Quota) -> int:
        most, used = getattr(quota.limits, kind), getattr(quota.usage, kind)
        if most is None or most - used >= left:
            return left
        self._reasons[kind] = _quota_reason(quota, kind, used, most)
        return int(most - used)

    def _exceeded(self, row: StoredRow, kind: str, left: int, need: int) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{row}: needs {need} {_QUOTA_WORDS[kind]}, and {max(0, left)} are left after the rows before it: "
            f"{self._reasons[kind]}",
            RETRY_AFTER_S,
        )


# --- Limits of groups


def room_of_caller(view: View, find_quota: FindQuota | None) -> Room:
    """Returns how many groups a caller with this quota may begin."""
    return view.room() if find_quota is None else view.room().within(quota_room(find_quota()))


def room(state: State, config: RunConfig, service_bytes: int, asked: Asked) -> Room:
    """Returns how many groups may be admitted. service_bytes: the bytes that the service's other runs leave for rows of
    this run. asked: the latest batch that each policy rank asked for."""
    promised, buffered = row_bytes_promised(state), len(state.open) + state.groups_buffered
    bounds = {
        "batches": config.max_buffered_batches * config.train_batch_size - buffered,
        "bytes": _groups_in(state, config.max_buffered_bytes - promised - state.shard_bytes),
        "service": _groups_in(state, service_bytes - promised),
    }
    reserved = lacking_tags(state, config, lambda counts: counts.open) if config.tag_shares else {}
    needed = max(config.train_batch_size - len(state.open), sum(reserved.values()))
    if needed > 0 and not state.batches:
        # There is no batch to free, so the limits must not keep the next batch from being filled.
        bounds = {name: max(groups, needed) for name, groups in bounds.items()}
    pace = pacing.pace(state, config, asked)
    bounds["pace"] = pace.groups
    frees = "wait for the trainer to commit one"
    if config.seal_by == "call" and not state.batches:
        frees = "call SealBatch (seal_by: call)"
    name = min(bounds, key=bounds.__getitem__)
    match name:
        case "batches":
            reason = (
                f"max_buffered_batches: {config.max_buffered_batches} batches of train_batch_size: "
                f"{config.train_batch_size} are stored; {frees}, or raise the setting"
            )
        case "bytes":
            reason = (
                f"{state.row_bytes + state.shard_bytes} bytes are stored and {promised - state.row_bytes} reserved of "
                f"max_buffered_bytes: {config.max_buffered_bytes} by batches and open groups; {frees}, or raise the "
                "setting"
            )
        case "service":
            reason = (
                f"{promised} bytes of rows are stored or reserved of the {max(0, service_bytes)} that the service's "
                "other runs leave; wait until batches are sealed, or raise the service's max_row_bytes"
            )
        case _:
            reason = pace.reason
    return Room(max(0, bounds[name]), reason, reserved)


def lacking_tags(state: State, config: RunConfig, count_of: Callable[[TagGroups], int]) -> dict[str, int]:
    """Returns how many groups of each tag the next batch needs to meet `tag_shares`, beyond those that count.
    count_of: returns the number of groups that count."""
    if state.finished or state.tags_lapsed:
        return {}
    lacking = {
        tag: count - (count_of(state.tags[tag]) if tag in state.tags else 0)
        for tag, count in config.tag_groups(config.train_batch_size).items()
    }
    return {tag: count for tag, count in lacking.items() if count > 0}


def quota_room(quota: Quota) -> Room:
    """Returns how many groups a quota allows; none if its rows or bytes are used up."""
    rooms = []
    for kind, most, used in zip(Limits._fields, quota.limits, quota.usage, strict=True):
        if most is not None:
            groups = most - used if kind == "groups" else UNBOUNDED if most > used else 0
            rooms.append(Room(max(0, groups), _quota_reason(quota, kind, used, most), waits=quota.is_of_run))
    return min(rooms, key=lambda room: room.groups, default=Room(UNBOUNDED, ""))


def _quota_reason(quota: Quota, kind: str, used: int, most: int) -> str:
    setting = quota.setting.format(kind)
    return (
        f"{quota.whose} {used} {_QUOTA_WORDS[kind]}, and {setting} is {most}; wait until batches are freed, abort "
        f"groups, or raise {setting}"
    )


# --- Limits of bytes


def row_bytes_promised(state: State) -> int:
    """Returns the bytes of stored rows, plus the bytes that are expected for open groups."""
    return state.row_bytes + int(_mean_bytes(state) * (len(state.open) - len(state.complete)))


def with_overdraft(limit: int) -> int:
    """Returns the bytes that rows may use when admission stops at `limit`. Admission estimates the size of groups, so
    rows of admitted groups may exceed the limit by a quarter; beyond that, rows have to wait."""
    return limit + limit // 4 + _LEAST_OVERDRAFT


def bytes_left(state: State, config: RunConfig, service_bytes: int) -> BytesLeft:
    """Returns the bytes that rows of admitted groups may still use. service_bytes: the bytes that the service allows
    for rows of this run."""
    of_run, stored = with_overdraft(config.max_buffered_bytes), state.row_bytes
    if of_run <= service_bytes:
        reason = (
            f"{stored} bytes of rows are stored, which may exceed max_buffered_bytes: {config.max_buffered_bytes} by "
            "at most a quarter; commit a batch, abort groups that will not complete, or raise the setting"
        )
    else:
        reason = (
            f"{stored} bytes of rows are stored, and the service's other runs leave {service_bytes}; wait until "
            "batches are freed, abort groups that will not complete, or raise the service's max_row_bytes"
        )
    return BytesLeft(max(0, min(of_run, service_bytes) - stored), reason)


def _mean_bytes(state: State) -> float:
    """Returns the mean bytes of the rows of a complete group; 0 if no group has been complete."""
    return state.completed_bytes / state.completions if state.completions else 0.0


def _groups_in(state: State, free: int) -> int:
    """Returns how many groups fit into the free bytes. Until a group is complete, the size of groups is unknown, and
    any free byte allows any number of groups."""
    mean = _mean_bytes(state)
    return int(free // mean) if mean else (UNBOUNDED if free > 0 else 0)


# --- Sizes


def check_sizes(state: State, wanted: Sequence[NewGroup], config: RunConfig) -> None:
    """Rejects invalid sizes, and sizes that contradict the size with which a group was begun."""
    sizes: dict[GroupKey, int] = {}
    for key, samples, _ in wanted:
        if not 0 <= samples <= config.most_samples:
            raise InvalidArgumentError(
                f"{key}: n_samples {samples} is outside of 1..{config.most_samples} ({_most(config)}); send a number "
                "in this range, or 0 for the run's n_samples_per_prompt, or raise max_samples_per_prompt"
            )
        if not samples:
            continue
        group = state.open.get(key)
        known = sizes.setdefault(key, samples) if group is None else group.samples
        if known != samples:
            raise InvalidArgumentError(
                f"{key}: n_samples {samples} differs from {known}, with which the group was begun; send {known}, or "
                "begin the group in another round"
            )


def check_sample(trajectory: TrajectoryKey, sample: int, group: Group | None, config: RunConfig) -> None:
    """Rejects a sample number that is outside the group's size. group: None if this row begins the group."""
    samples = config.most_samples + config.surplus if group is None else group.sampled
    if not 0 <= sample < samples:
        allows = sizes_of(config) if group is None else _size_of(group, config)
        raise _no_sample(trajectory, sample, samples, allows)


def samples_of(group: Group | None, config: RunConfig) -> int:
    """Returns the number of samples of a group. group: None if a row begins the group, which then has the run's
    size."""
    return config.n_samples_per_prompt + config.surplus if group is None else group.sampled


def no_sample(row: StoredRow, group: Group | None, config: RunConfig) -> InvalidArgumentError:
    """Returns the error for a row whose sample number is outside `samples_of`."""
    if group is not None:
        allowed_by = _size_of(group, config)
    else:
        allowed_by = f"n_samples_per_prompt: {config.n_samples_per_prompt}{_with_surplus(config.surplus)}"
        if config.most_samples > config.n_samples_per_prompt:
            allowed_by += ", the run's default"
    return _no_sample(row, row.trajectory.sample, samples_of(group, config), allowed_by)


def _size_of(group: Group, config: RunConfig) -> str:
    is_own = group.samples != config.n_samples_per_prompt
    size = "the group's n_samples" if is_own else "n_samples_per_prompt"
    return f"{size}: {group.samples}{_with_surplus(group.surplus)}"


def _with_surplus(surplus: int) -> str:
    return f" with surplus: {surplus}" if surplus else ""


def _no_sample(row: StoredRow | TrajectoryKey, sample: int, samples: int, allows: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{row}: sample {sample} is outside of 0..{samples - 1} ({allows}); number samples from 0, or begin the "
        "group with more (max_samples_per_prompt)"
    )


def _most(config: RunConfig) -> str:
    name = "n_samples_per_prompt" if config.max_samples_per_prompt is None else "max_samples_per_prompt"
    return f"{name}: {config.most_samples}"


# --- Tags


class NamedTags:
    """The tags that a request sets for groups without one. Rejects contradicting tags, and too many tags.

    names: the new tag of each group.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.names: dict[GroupKey, str] = {}

    def name(self, key: GroupKey, tag: str, what: str) -> None:
        """Records the tag of a group. what: the row or group of the request, for errors."""
        if self.is_new(key, tag, what):
            self.names[key] = tag

    def is_new(self, key: GroupKey, tag: str, what: str) -> bool:
        """Returns whether the tag is new for the group, which had none. Raises InvalidArgumentError like `name`."""
        if not tag:
            return False
        group = self._state.open.get(key)
        known = self.names.get(key) or (group.tag if group else "")
        if known and known != tag:
            raise InvalidArgumentError(
                f"{what}: tag {tag!r} differs from the group's tag {known!r}; use one tag per group, or none"
            )
        if not known:
            check_tag(tag, what)
            self._check_count(tag, what)
        return not known

    def events(self, admitted: Iterable[NewGroup]) -> list[GroupTagged]:
        """Returns the events that tag groups that are open already. admitted: the new groups, which have their tags."""
        new = {group.key for group in admitted}
        return [GroupTagged(key, tag) for key, tag in self.names.items() if key in self._state.open and key not in new]

    def _check_count(self, tag: str, what: str) -> None:
        names = self._state.tags.keys() | self.names.values() | {tag}
        if len(names) > MOST_TAGS:
            raise InvalidArgumentError(
                f"{what}: the run would have more than {MOST_TAGS} tags ({', '.join(sorted(names)[:5])}, ...); use a "
                "tag per environment or task, not per prompt"
            )
