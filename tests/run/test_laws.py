"""What holds whatever comes, in whatever order, how often."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import GristmillError
from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import BatchState, Position, RewardUpdate
from gristmill_service.run.machine.closed_groups import ClosedGroups
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.decisions.sealing import missing_tags
from gristmill_service.run.machine.events import (
    COLUMNS,
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
    BatchSealed,
    BatchWithdrawn,
    Event,
    GroupClosed,
    GroupDropped,
    GroupKey,
    GroupsAdmitted,
    GroupTagged,
    RowRef,
    RowsStored,
    StoredRow,
    TrajectoryAborted,
)
from gristmill_service.run.machine.state import State
from gristmill_service.run.rows.row_buffer import RowBuffer
from tests.on_loop import on_loop
from tests.pipeline.written import column
from tests.run.harness import Bench, BuildBatch, group_rows, key, row
from tests.run.logs import RecordingLog, RemoteLog
from tests.strategies import LAW, Row

UIDS = st.sampled_from("abcd")
SAMPLES = st.sampled_from([0, 0, 1, 1, 2])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    step = draw(st.integers(0, 1))
    return row(
        draw(UIDS),
        draw(SAMPLES),
        step,
        last=step == 1 or draw(st.booleans()),
        reward=draw(st.sampled_from([0.0, 1.0, None])),
        response=draw(st.sampled_from([(7,), (7, 8, 9)])),
        attempt=draw(st.sampled_from([0, 0, 0, 1])),
        round=draw(st.sampled_from([0, 0, 0, 1])),
        policy_version=draw(st.integers(-1, 1)),
        tag=draw(st.sampled_from(["", "", "x"])),
    )


@st.composite
def whole_groups(draw: st.DrawFn) -> list[Row]:
    uid, round_ = draw(UIDS), draw(st.integers(0, 2))
    # Without a version, runs that keep stale tokens out refuse them.
    version = draw(st.integers(0, 1))
    return [row(uid, sample, reward=float(sample), round=round_, policy_version=version) for sample in range(2)]


POSITIONS = st.builds(Position, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
TRAJECTORIES = st.builds(key, UIDS, SAMPLES)
CHECKPOINTS = st.builds(
    Checkpoint, st.none() | POSITIONS, generation=st.integers(0, 2), give_up_reason=st.sampled_from(["", "lost"])
)

pytestmark = pytest.mark.usefixtures("one_token_is_left_out")
WRITTEN = ("verdict", "score")
WRITTEN_COLUMNS = [column(name, scope="row") for name in WRITTEN]
WRITES = [
    st.tuples(
        st.just("write"),
        st.integers(0, 2),
        st.integers(0, 1),
        st.integers(0, 1),
        st.dictionaries(st.sampled_from(WRITTEN), st.sampled_from([0.5, 1.5]), min_size=1),
        st.sampled_from([0, 0, 0, -1, 1]),
    ),
    st.tuples(st.just("write_rest"), st.integers(0, 2), st.sampled_from([0.5, 1.5])),
]
ACKNOWLEDGE = st.tuples(
    st.just("acknowledge"), st.just("policy"), st.integers(0, 1), POSITIONS, st.just(0), st.booleans()
)
RESUME = st.tuples(
    st.just("resume"),
    st.just("policy"),
    CHECKPOINTS,
    st.sampled_from(["one", "two", "three", "four"]),
    st.sampled_from([0, 0, 1, 2]),
)
MAKE_BATCHES, REOPEN = st.tuples(st.just("make_batches")), st.tuples(st.just("reopen"))
COMMANDS = st.one_of(
    st.tuples(st.just("submit"), st.lists(rows(), min_size=1, max_size=6)),
    st.tuples(st.just("submit"), whole_groups()),
    st.tuples(st.just("begin_groups"), st.integers(0, 1), st.lists(UIDS, max_size=4)),
    st.tuples(
        st.just("begin_groups"),
        st.integers(0, 1),
        st.lists(UIDS, min_size=2, max_size=2),
        st.lists(st.integers(0, 3), min_size=2, max_size=2),
    ),
    st.tuples(
        st.just("set_rewards"),
        st.lists(
            st.builds(RewardUpdate, TRAJECTORIES, st.sampled_from([None, 0, 1]), st.sampled_from([0.0, 1.0])),
            min_size=1,
            max_size=3,
        ),
    ),
    st.tuples(st.just("abort_trajectories"), st.lists(TRAJECTORIES, min_size=1, max_size=3), st.just("")),
    st.tuples(st.just("abort_groups"), st.integers(0, 1), st.lists(UIDS, min_size=1, max_size=2), st.just("")),
    st.tuples(st.just("seal"), st.sampled_from([None, 0, 1, 2])),
    st.tuples(st.just("announce"), st.integers(0, 3)),
    ACKNOWLEDGE,
    st.tuples(st.just("commit"), st.just("policy"), POSITIONS, st.integers(0, 2)),
    RESUME,
    *WRITES,
    MAKE_BATCHES,
    REOPEN,
    st.tuples(st.just("wait"), st.sampled_from([1.0, 5.0])),
    st.tuples(st.just("finish")),
)
TRAIN = st.tuples(st.just("train"))
SETTINGS = st.fixed_dictionaries(
    {
        "train_batch_size": st.integers(1, 2),
        "dp_size": st.just(2),
        "update_epochs_per_batch": st.integers(1, 2),
        "seal_order": st.sampled_from(["completion", "admission"]),
        "seal_by": st.sampled_from(["count", "count", "call"]),
        "zero_variance_filter": st.sampled_from([None, "replace"]),
        "max_buffered_batches": st.integers(1, 3),
        "max_buffered_bytes": st.sampled_from([60, 1 << 30]),
        "group_timeout_s": st.sampled_from([None, 7.0]),
        "max_samples_per_prompt": st.sampled_from([None, 3]),
        "surplus": st.sampled_from([0, 0, 1]),
        "tag_shares": st.sampled_from([{}, {}, {"x": {"min": 0.5}}]),
        "columns": st.sampled_from([[], WRITTEN_COLUMNS]),
    },
    optional={"max_staleness": st.integers(0, 1)},
).map(
    lambda drawn: (
        drawn
        | ({"stale": "drop"} if drawn.get("max_staleness") == 1 else {})
        | ({"tag_timeout_s": 3.0, "seal_by": "count"} if drawn["tag_shares"] else {})
    )
)


LOGS = st.sampled_from([RecordingLog, RemoteLog])

# Batches that cannot be aligned, each with a dp_size for which that is so.
MISALIGNED = st.sets(st.tuples(st.integers(0, 2), st.integers(1, 2)))

# A step of a trajectory, and the same with its attempt.
StepName = tuple[TrajectoryKey, int]
Accepted = tuple[TrajectoryKey, int, int]


def act(bench: Bench, command: str, *arguments: Any) -> None:
    """Does what the command says. What is refused must leave everything as it was."""
    match command:
        case "make_batches":
            bench.make_batches()
        case "reopen":
            bench.reopen()
        case "write_rest":
            bench.write_rest(*arguments)
        case "wait":
            bench.let_pass(arguments[0])
        case _:
            before, held = snapshot(bench), len(bench.log.events)
            try:
                if command == "submit":
                    bench.submit(*arguments[0])
                elif command == "write":
                    bench.write(*arguments)
                else:
                    getattr(bench.run, command)(*arguments)
            except GristmillError:
                if bench.run.is_lost:
                    return
                assert snapshot(bench) == before
                assert len(bench.log.events) == held


def snapshot(bench: Bench) -> tuple[Any, ...]:
    state = copy.deepcopy(bench.state)
    return state, list(state.open), list(state.complete), len(bench.rows)


class Checked(Protocol):
    """The parts of a run that have to agree: a bench has them, and so has a run that threads drove."""

    @property
    def state(self) -> State: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def rows(self) -> RowBuffer: ...


def check_invariants(bench: Checked) -> None:
    state, config = bench.state, bench.config
    groups = [*state.open.values(), *(group for batch in state.batches.values() for group in batch.groups)]
    written = [column for batch in state.batches.values() for column in batch.written.values()]
    refs = [ref for group in groups for ref in group.refs()] + [RowRef(column.table, COLUMNS) for column in written]
    assert state.row_bytes == sum(row.nbytes for group in groups for row in group.stored_rows()) + sum(
        column.nbytes for column in written
    )
    assert sorted(refs) == sorted((number, row) for number, held in bench.rows._tables.items() for row in held.live)
    assert bench.rows.needed == len(refs) - len(written), "what quotas count"
    assert len(bench.rows) <= 2 * len(refs), "what is held is at most twice what is accounted for"
    assert set(state.complete) == {name for name, group in state.open.items() if group.is_complete}
    for group in groups:
        assert group.done == sum(trajectory.is_complete for trajectory in group.trajectories.values())
    for tag, counts in state.tags.items():
        keys = [key for key, group in state.open.items() if group.tag == tag]
        assert (counts.open, counts.complete) == (len(keys), sum(key in state.complete for key in keys))
    if missing_tags(state, config):
        return
    seals = config.seal_by == "count" or state.finished
    if seals and config.seal_order == "completion" and len(state.batches) < config.max_buffered_batches:
        assert len(state.complete) < config.train_batch_size, "what can be sealed is sealed"
    assert set(state.batches) == {
        number
        for number in range(state.freed, state.batches_sealed)
        if number not in state.failed or number in state.batches_kept
    }
    for number in state.batches_kept:
        assert not state.batches[number].is_published
        assert any(model.committed.batch <= number >= min(model.next).batch for model in state.models.values()), "freed"


def check_closed_groups(state: State, events: list[Event]) -> dict[GroupKey, int | str]:
    """Checks what is known of closed groups against an independent reading of the log. Returns their outcomes."""
    tags: dict[GroupKey, str] = {}
    outcomes: dict[GroupKey, int | str] = {}
    batches: dict[int, tuple[GroupKey, ...]] = {}
    until: dict[GroupKey, int] = {}
    for event in events:
        match event:
            case GroupsAdmitted(groups, _):
                tags |= {new.key: new.tag for new in groups}
            case GroupTagged(group, tag):
                tags[group] = tag
            case BatchSealed(number, groups, _):
                until |= dict.fromkeys(groups, len(batches))
                outcomes |= dict.fromkeys(groups, number)
                batches[number] = groups
            case GroupDropped(group, reason):
                outcomes[group], until[group] = reason, len(batches)
            case BatchGivenUp(number, reason):
                outcomes |= dict.fromkeys(batches[number], reason)
                until |= dict.fromkeys(batches[number], len(batches))
            case BatchFailed(number, _, keeps_rows=False):
                until |= dict.fromkeys(batches[number], len(batches))
            case BatchFreed(number):
                # A failed batch is dropped when it is freed.
                is_failed = number in state.failed
                until |= dict.fromkeys(batches[number], len(batches) if is_failed else -1)
    assert state.outcomes([*tags, GroupKey(7, "never")]) == outcomes
    assert len(state.closed.listed) + len(state.closed.archive) == len(outcomes)
    assert state.closed.listed.keys() == {group for group, batch in until.items() if batch >= state.freed}
    assert {group: closed.tag for group, closed in state.closed.listed.items()} == {
        group: tags[group] for group in state.closed.listed
    }
    lost = state.failed.keys() - state.batches.keys()
    for name, counts in state.tags.items():
        closed = [outcome for group, outcome in outcomes.items() if tags[group] == name]
        sealed = sum(isinstance(outcome, int) and (outcome not in lost) for outcome in closed)
        assert (counts.sealed, counts.dropped) == (sealed, len(closed) - sealed)
    return outcomes


@settings(LAW, max_examples=4 * LAW.max_examples)
@given(SETTINGS, LOGS, MISALIGNED, st.lists(COMMANDS, max_size=30))
def test_replaying_the_log_gives_the_same_state_and_what_is_refused_changes_nothing(
    chosen: dict[str, Any],
    log: type[RecordingLog],
    misaligned: set[tuple[int, int]],
    commands: list[tuple[Any, ...]],
) -> None:
    bench = Bench(build_batch=BuildBatch(misaligned=misaligned), log=log(), **chosen)
    for command in commands:
        act(bench, *command)
        check_invariants(bench)
        check_closed_groups(bench.state, bench.log.events)
        assert set(bench.state.batches_kept) == kept(bench.log.events)
    replayed = bench.replayed()
    assert replayed == bench.state
    assert list(replayed.open) == list(bench.state.open)
    assert list(replayed.complete) == list(bench.state.complete)


@settings(LAW, max_examples=2 * LAW.max_examples)
@given(SETTINGS, MISALIGNED, st.lists(st.one_of(COMMANDS, COMMANDS, TRAIN), max_size=20))
def test_calls_for_archived_groups_are_answered_as_if_they_were_remembered_whole(
    chosen: dict[str, Any], misaligned: set[tuple[int, int]], commands: list[tuple[Any, ...]]
) -> None:
    answers: list[list[object]] = []
    for archives in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not archives:
                patch.setattr(ClosedGroups, "archive_groups", lambda self, keys: None)
            log = RecordingLog()
            # Part of answers.
            log.run_id = "same"
            bench = Bench(build_batch=BuildBatch(misaligned=misaligned), log=log, **chosen)
            answers.append([answered(bench, *command) for command in commands])
            named = [GroupKey(round_, uid) for uid in "abcd" for round_ in range(3)]
            answers[-1] += [replace(group, tag="") for part in bench.run.groups(named) for group in part]
            assert archives or not bench.state.closed.archive.segments
    assert answers[0] == answers[1]


def answered(bench: Bench, command: str, *arguments: Any) -> object:
    """Does what the command says. Returns the answer, or the error."""
    try:
        match command:
            case "submit":
                return bench.submit(*arguments[0])
            case "train":
                bench.make_batches()
                while (view := bench.run.shard("policy", 0, None, 0)).state is BatchState.PUBLISHED:
                    for rank in range(bench.state.dp_size):
                        bench.run.acknowledge("policy", rank, view.position, 0, commit=True)
            case "make_batches" | "reopen" | "write" | "write_rest" | "wait":
                act(bench, command, *arguments)
            case _:
                return getattr(bench.run, command)(*arguments)
        return None
    except GristmillError as error:
        return repr(error)


@settings(max_examples=150, deadline=None)
@given(SETTINGS, LOGS, st.lists(st.tuples(COMMANDS, st.booleans()), max_size=20))
def test_whatever_appends_fail_the_run_goes_on_as_its_log_says(
    chosen: dict[str, Any], log: type[RecordingLog], commands: list[tuple[tuple[Any, ...], bool]]
) -> None:
    bench = Bench(log=log(), **chosen)
    for command, fails in commands:
        before = len(bench.log.records)
        bench.log.refuses = int(fails and command != ("reopen",))
        act(bench, *command)
        on_loop(bench.run._writer.commits.close)
        bench.log.refuses = 0
        if bench.run.is_lost:
            assert len(bench.log.records) == before
            bench.reopen()
        check_invariants(bench)
        assert bench.state == bench.replayed()
        assert bench.rows._tables.keys() <= bench.log.tables.keys(), "no row is removed that is needed"


def kept(events: list[Event]) -> set[int]:
    """The failed batches whose rows are kept: an independent reading of the log."""
    numbers: set[int] = set()
    for event in events:
        match event:
            case BatchFailed(number, _, keeps_rows=True):
                numbers.add(number)
            case BatchFailed(number) | BatchWithdrawn(number) | BatchFreed(number) | BatchGivenUp(number):
                numbers.discard(number)
    return numbers


def test_a_batch_that_fails_while_a_run_is_drained_is_left_out() -> None:
    bench = Bench(build_batch=BuildBatch(misaligned={(1, 2)}), train_batch_size=2, dp_size=2, max_buffered_batches=1)
    for rows in (group_rows("a"), group_rows("b")):
        act(bench, "submit", rows)
        act(bench, "seal", None)
    bench.run.finish()
    drain(bench)
    assert set(bench.state.failed) == {1}


@settings(LAW, max_examples=2 * LAW.max_examples)
@given(SETTINGS, LOGS, MISALIGNED, st.lists(COMMANDS, max_size=30))
def test_an_accepted_row_ends_in_exactly_one_batch_or_is_dropped_exactly_once(
    chosen: dict[str, Any],
    log: type[RecordingLog],
    misaligned: set[tuple[int, int]],
    commands: list[tuple[Any, ...]],
) -> None:
    bench = Bench(build_batch=BuildBatch(misaligned=misaligned), log=log(), **chosen)
    for command in commands:
        act(bench, *command)
    try:
        bench.run.finish()
    except GristmillError:
        pytest.fail("a run can always be finished")
    drain(bench)
    accepted, ends = follow(bench.log.events)
    left_out = set(bench.state.failed)
    trained = [
        (steps.key(index), int(steps.steps[index]), int(steps.attempts[index]))
        for number, steps in bench.build_batch.batches.items()
        if number not in left_out
        for index in range(len(steps))
    ]
    assert sorted(trained) == sorted(name for name, end in ends if end == "sealed")
    assert sorted(name for name, _ in ends) == sorted(accepted)
    assert (bench.state.row_bytes, len(bench.rows)) == (0, 0)


@pytest.mark.slow
@settings(LAW, max_examples=2 * LAW.max_examples)
@given(SETTINGS, LOGS, st.lists(st.one_of(*WRITES, RESUME, ACKNOWLEDGE, MAKE_BATCHES, REOPEN), min_size=12))
def test_a_batch_is_completed_with_what_one_incarnation_wrote_each_column_in_its_place(
    chosen: dict[str, Any], log: type[RecordingLog], commands: list[tuple[Any, ...]]
) -> None:
    bench = Bench(log=log(), **chosen | {"columns": WRITTEN_COLUMNS, "zero_variance_filter": None})
    for uid in "abcd":
        act(bench, "submit", group_rows(uid))
    bench.make_batches()
    rest = [("make_batches",), ("write_rest", 0, 2.5), ("make_batches",)]
    for command in [*commands, *rest]:
        act(bench, *command)
        for number, batch in bench.state.batches.items():
            if batch.is_published and not batch.awaits:
                made_of = bench.written(number)
                shards = batch.written_ranks * batch.prompts
                assert len(made_of) == shards * len(WRITTEN)
                assert made_of in [wrote for (of, _), wrote in bench.wrote.items() if of == number]


def drain(bench: Bench) -> None:
    """Trains on everything that can be built, and goes on without the rest."""
    bench.run.resume("policy", Checkpoint(None), "drain")
    bench.make_batches()
    for _ in range(200):
        position = bench.run.shard("policy", 0, None, 0).position
        assert position is not None
        # Past what failed.
        bench.run.commit("policy", position, 0)
        bench.make_batches()
        if position.batch == bench.state.batches_sealed:
            break
        bench.write_rest(position.batch, 2.5)
        bench.make_batches()
        # It may have failed just now, after the place of the trainer was asked for.
        if position.batch in bench.state.failed:
            continue
        if bench.run.batch(position.batch).state is BatchState.PUBLISHED:
            for rank in range(bench.state.dp_size):
                bench.run.acknowledge("policy", rank, position, 0, commit=True)
    assert not bench.state.complete
    assert bench.state.freed == bench.state.batches_sealed


def follow(events: list[Event]) -> tuple[list[Accepted], list[tuple[Accepted, str]]]:
    """What was accepted, and how each of it ended: an independent reading of the log."""
    accepted: list[Accepted] = []
    ends: list[tuple[Accepted, str]] = []
    held: dict[StepName, int] = {}
    left_out = {event.batch for event in events if isinstance(event, BatchGivenUp)} | _dropped(events)

    def end(names: Iterable[StepName], how: str) -> None:
        for name in list(names):
            ends.append(((name[0], name[1], held[name]), how))
            del held[name]

    def of_group(group: GroupKey) -> list[StepName]:
        return [name for name in held if name[0][:2] == tuple(group)]

    for event in events:
        match event:
            case RowsStored(stored):
                for one in stored:
                    older = [n for n in held if n[0] == one.trajectory and held[n] < one.attempt]
                    end(older, "superseded")
                    assert (one.trajectory, one.step) not in held
                    held[one.trajectory, one.step] = one.attempt
                    accepted.append((one.trajectory, one.step, one.attempt))
            case TrajectoryAborted(trajectory, _):
                end([name for name in held if name[0] == trajectory], "aborted")
            case GroupClosed(group, _):
                by_trajectory: dict[TrajectoryKey, list[StepName]] = {}
                for name in of_group(group):
                    by_trajectory.setdefault(name[0], []).append(name)
                # Which of them were complete is for the batch to say: what is not in it was closed.
                held |= {name: held[name] for names in by_trajectory.values() for name in names}
                end(_incomplete(events, event, by_trajectory), "closed")
            case GroupDropped(group, _):
                end(of_group(group), "dropped")
            case BatchSealed(number, groups):
                for group in groups:
                    end(of_group(group), "left out" if number in left_out else "sealed")
    assert not held
    return accepted, ends


def _dropped(events: list[Event]) -> set[int]:
    """Failed batches that were not rebuilt before they were freed."""
    numbers: set[int] = set()
    for event in events:
        match event:
            case BatchFailed(number):
                numbers.add(number)
            case BatchWithdrawn(number):
                numbers.discard(number)
    return numbers


def _incomplete(
    events: list[Event], until: Event, by_trajectory: dict[TrajectoryKey, list[StepName]]
) -> Iterator[StepName]:
    """Rows of trajectories that lacked a step or a reward when the group was closed."""
    rows_of: dict[Accepted, StoredRow] = {}
    rewarded: set[StepName] = set()
    for event in events[: next(index for index, event in enumerate(events) if event is until)]:
        if isinstance(event, RowsStored):
            for one in event.rows:
                rows_of[one.trajectory, one.step, one.attempt] = one
        elif hasattr(event, "rewards"):
            rewarded |= {(reward.trajectory, reward.step) for reward in event.rewards}
    for trajectory, names in by_trajectory.items():
        attempt = max(attempt for t, _, attempt in rows_of if t == trajectory)
        steps = [rows_of[trajectory, step, attempt] for _, step in names]
        whole = any(one.is_last and one.step + 1 == len(steps) for one in steps)
        paid = all(one.reward is not None or (trajectory, one.step) in rewarded for one in steps)
        if not (whole and paid):
            yield from names


@settings(max_examples=200, deadline=None)
@given(SETTINGS, st.lists(COMMANDS, max_size=30))
def test_no_more_groups_are_admitted_than_there_is_room_for(
    chosen: dict[str, Any], commands: list[tuple[Any, ...]]
) -> None:
    bench = Bench(**chosen)
    for command in commands:
        admitted = len(bench.state.open)
        act(bench, *command)
        state, config = bench.state, bench.config
        if len(state.open) <= admitted:
            continue
        batch = config.train_batch_size
        assert len(state.open) + state.groups_buffered <= config.max_buffered_batches * batch


@settings(max_examples=150, deadline=None)
@given(SETTINGS, st.permutations(range(16)), st.integers(1, 8))
def test_an_admitted_group_can_always_finish(chosen: dict[str, Any], order: list[int], size: int) -> None:
    # Under a share of tags the room at the start may all be kept for them.
    bench = Bench(**chosen | {"tag_shares": {}, "tag_timeout_s": None})
    bench.now = 0.0
    begun = [uid for uid, admission in zip("abcd", bench.begin(*"abcd"), strict=True) if admission == "ADMITTED"]
    assert begun, "there is room at the start, whatever the limits"
    steps = [
        row(u, s, t, last=t == 1, reward=float(s), response=range(50), policy_version=0)
        for u in begun
        for s in (0, 1)
        for t in (0, 1)
    ]
    mixed = [steps[index] for index in order if index < len(steps)]
    for start in range(0, len(mixed), size):
        bench.submit(*mixed[start : start + size])
    assert {(0, uid) for uid in begun} == set(bench.state.closed.listed) | set(bench.state.complete)


def test_group_keys_name_their_round_only_where_there_is_one() -> None:
    assert str(GroupKey(0, "a")) == "uid 'a'"
    assert str(GroupKey(2, "a")) == "uid 'a' round 2"
