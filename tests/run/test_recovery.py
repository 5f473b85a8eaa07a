"""A run over the death of its process: what was accepted is there again, and batches are the same, byte for byte."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import (
    BatchFailedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StaleIncarnationError,
    UnavailableError,
)
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState, Outcome, Position, RewardUpdate
from gristmill_service.run.machine.archived_groups import digests_of
from gristmill_service.run.machine.closed_groups import ClosedGroup
from gristmill_service.run.machine.codec import FORMAT, decode_state, encode_event, record_of, snapshot_of
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import BatchSealed, GroupKey
from gristmill_service.run.machine.state import State, apply
from gristmill_service.storage import memory
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.memory_room import MemoryRoom
from gristmill_service.storage.run_store import RunLog
from tests.run.deltas import Sender
from tests.run.harness import CONFIG, Bench, BuildBatch, build_all, contents, group_rows, key, open_run, row, table
from tests.run.logs import lose_rows
from tests.run.test_laws import COMMANDS, MISALIGNED, SETTINGS, act
from tests.strategies import LAW, Row

pytestmark = pytest.mark.usefixtures("one_token_is_left_out")


class Machine:
    """A run in a journal, whose process can die at any moment: nothing is closed then but the directory's lock."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory, self.config = directory, parse_config(CONFIG | settings)
        self.now, self.deaths, self.sender = 0.0, 0, Sender()
        self.ledger = JournalRunStore(directory, "never")
        self._begin(self.ledger.create("run", b"{}"))

    def _begin(self, log: RunLog) -> None:
        self.store = MemoryShardStore()
        self.run, self.builders = open_run(
            log, self.config, store=self.store, build_batch=build_batch, clock=lambda: self.now
        )

    def die(self) -> None:
        self.deaths += 1
        self.ledger.close()
        self.now = 1000.0 * self.deaths  # the clock of another process
        self.ledger = JournalRunStore(self.directory, "never")
        self._begin(self.ledger.open("run"))

    def submit(self, *rows: Row) -> list[str]:
        return [outcome.name for outcome in self.sender.submit(self.run, table(*rows))]

    def make_batches(self) -> None:
        build_all(self.run, self.builders)

    def shard(self, position: Position, rank: int = 0) -> bytes:
        view = self.run.shard("policy", rank, position, 0)
        assert view.state is BatchState.PUBLISHED
        assert view.address is not None
        return b"".join(self.run.read_shard(position.batch, view.address))

    def train(self, position: Position, rank: int = 0, commit: bool = True) -> None:
        self.run.acknowledge("policy", rank, position, 0, commit)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def start(**settings: Any) -> Machine:
        machines.append(Machine(tmp_path / str(len(machines)), **settings))
        return machines[-1]

    yield start
    for each in machines:
        each.ledger.close()


def test_what_was_accepted_is_accepted_still(machine: Callable[..., Machine]) -> None:
    one = machine()
    one.submit(*group_rows("a"), row("b"))
    one.die()
    assert one.submit(*group_rows("a"), row("b")) == ["DUPLICATE"] * 3
    assert one.submit(row("b", 1)) == ["ACCEPTED"]
    one.make_batches()
    assert one.run.batch(0).state is BatchState.PUBLISHED


def test_a_sealed_batch_is_rebuilt_byte_for_byte(machine: Callable[..., Machine]) -> None:
    one = machine(train_batch_size=2, policy_mini_batch_size=1, merge="prefix", update_epochs_per_batch=2)
    steps = [row("a", 0, 0, last=False), row("a", 0, 1, prompt_token_ids=[1, 2, 7, 9]), row("a", 1)]
    one.submit(*steps, *group_rows("b"))
    one.make_batches()
    plan, shards = one.run.batch(0).plan, [one.shard(Position(0, 0, index)) for index in range(2)]
    one.train(Position(0))
    one.die()
    assert one.run.batch(0).state is BatchState.PENDING, "shards in memory go with the process"
    one.make_batches()
    assert one.run.batch(0).plan == plan
    assert [one.shard(Position(0, 0, index)) for index in range(2)] == shards
    assert one.run.shard("policy", 0, None, 0).position == Position(0, 0, 1), "what was acknowledged stays so"


def test_a_rank_may_acknowledge_what_it_trained_on_while_the_batch_is_rebuilt(
    machine: Callable[..., Machine],
) -> None:
    one = machine(train_batch_size=1)
    one.submit(*group_rows("a"))
    one.make_batches()
    one.die()
    one.train(Position(0))
    assert one.run.status().batches_freed == 1
    one.make_batches()
    assert one.store._batches == {}


def test_rows_go_with_their_batch_and_the_directory_shrinks(machine: Callable[..., Machine]) -> None:
    one = machine(train_batch_size=1)
    for number in range(30):
        one.submit(*group_rows(f"u{number}", response=range(20_000)))
        one.make_batches()
        one.train(Position(number))
    size = sum(path.stat().st_blocks * 512 for path in one.directory.glob("run-run/rows-*"))
    assert size < 100_000, "each of thirty groups had more"
    one.die()
    status = one.run.status()
    assert (status.batches_freed, status.row_bytes, len(one.run._writer.rows)) == (30, 0, 0)


def test_positions_incarnations_and_versions_are_remembered(machine: Callable[..., Machine]) -> None:
    one = machine(train_batch_size=1, dp_size=2, n_samples_per_prompt=2)
    one.submit(*group_rows("a"), *group_rows("b"))
    one.make_batches()
    one.run.announce(3)
    resumed = one.run.resume("policy", Checkpoint(Position(0)), "first")
    one.train(Position(0), rank=1, commit=False)
    one.die()
    assert one.run.policy_version() == 3
    with pytest.raises(StaleIncarnationError):
        one.run.shard("policy", 0, None, 1)
    positions = [one.run.shard("policy", rank, None, resumed.incarnation).position for rank in range(2)]
    assert positions == [Position(0), Position(1)]


def test_rewards_that_came_later_are_kept_also_per_token(machine: Callable[..., Machine]) -> None:
    one = machine(train_batch_size=1)
    one.submit(row("a", 0, reward=None, response=(5, 6)), row("a", 1, reward=[0.25, 0.5], response=(5, 6)))
    one.run.set_rewards([RewardUpdate(key("a"), None, None, np.array([1.0, 2.0]))])
    one.die()
    assert one.run.set_rewards([RewardUpdate(key("a"), None, None, np.array([1.0, 2.0]))]) == 0
    one.make_batches()
    [steps] = one.run.export(0)
    assert contents(steps)["token_rewards"] == [[1.0, 2.0], [0.25, 0.5]]


def test_only_time_in_which_workers_could_come_counts_for_stragglers(machine: Callable[..., Machine]) -> None:
    one = machine(train_batch_size=1, group_timeout_s=10)
    one.run.begin_groups(0, ["early"])
    one.now = 8.0
    one.run.begin_groups(0, ["late"])
    one.die()  # the clock of another process, after the service was down for as long
    one.run.tick()
    assert [view.state for part in one.run.groups() for view in part] == ["open", "open"]
    one.now += 2.0
    one.run.tick()
    assert [(view.uid, view.reason) for part in one.run.groups() for view in part] == [
        ("early", "timeout"),
        ("late", "samples not begun: 2"),
    ]


@pytest.mark.parametrize("is_published", [False, True])
def test_rows_that_the_disk_lost_are_dropped_with_a_reason_and_the_others_go_on(
    machine: Callable[..., Machine], is_published: bool
) -> None:
    one = machine(train_batch_size=1)
    one.submit(*group_rows("a", response=range(2000)))
    if is_published:
        one.make_batches()
    one.submit(row("b", response=range(2000)))
    one.submit(row("c"))
    lose_rows(one.directory / "run-run", 0)
    one.die()
    one.make_batches()
    with pytest.raises(BatchFailedError, match="rows of it are lost"):
        one.run.batch(0)
    assert one.submit(row("b", 1), row("c", 1)) == ["ACCEPTED"] * 2
    one.make_batches()
    assert {view.uid: (view.state, view.reason) for part in one.run.groups() for view in part} == {
        "a": ("dropped", "batch_failed"),
        "b": ("sealed", ""),
        "c": ("sealed", ""),
    }


def test_a_batch_larger_than_all_of_memory_is_built_by_a_process_that_has_more(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_room", lambda: MemoryRoom(100, 100))
    one = machine(train_batch_size=1)
    one.submit(*group_rows("a"))
    one.make_batches()
    assert one.run.batch(0).state is BatchState.PENDING
    assert re.search(r"^run 'run': batch 0 waits: it has \d+ bytes, and 100 of 100 bytes", one.run.blocked_reason)
    monkeypatch.setattr(memory, "memory_room", lambda: MemoryRoom(1 << 20, 1 << 20))
    one.die()
    one.make_batches()
    assert (one.run.batch(0).state, one.run.blocked_reason) == (BatchState.PUBLISHED, "")


def test_what_follows_from_a_call_is_in_the_same_record() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    assert len(bench.log.records) == 1
    assert isinstance(bench.log.events[-1], BatchSealed)


def test_what_follows_from_a_logged_event_happens_when_the_log_is_read_without_it() -> None:
    """A later version may decide more than the one that wrote the log."""
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    *events, sealed = bench.log.events
    assert isinstance(sealed, BatchSealed)
    bench.log.records = [record_of([encode_event(event) for event in events])]
    bench.reopen()
    assert bench.sealed == [0]
    bench.make_batches()
    assert bench.run.batch(0).state is BatchState.PUBLISHED
    assert bench.replayed() == bench.state


def test_a_publication_that_is_not_logged_has_not_happened_and_is_repeated() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.log.refuses = 1
    bench.make_batches()
    with pytest.raises(UnavailableError, match="is being recovered from its store"):
        bench.run.batch(0)
    bench.reopen()
    assert bench.run.batch(0).state is BatchState.PENDING
    bench.make_batches()
    assert bench.run.batch(0).state is BatchState.PUBLISHED
    assert bench.replayed() == bench.state


@given(SETTINGS, MISALIGNED, st.lists(COMMANDS, max_size=30))
def test_a_snapshot_is_the_state_and_is_folded_on_from(
    chosen: dict[str, Any], misaligned: set[tuple[int, int]], commands: list[tuple[Any, ...]]
) -> None:
    bench = Bench(build_batch=BuildBatch(misaligned=misaligned), **chosen)
    half = None
    for index, command in enumerate(commands):
        act(bench, *command)
        if index == len(commands) // 2:
            half = snapshot_of(bench.state), len(bench.log.events)
    if half is None:
        return
    pieces, count = half
    state = decode_state(pieces)
    for event in bench.log.events[count:]:
        apply(state, event)
    assert state == bench.state
    assert (list(state.open), list(state.complete)) == (list(bench.state.open), list(bench.state.complete))
    assert decode_state(snapshot_of(state)) == state


def test_a_snapshot_has_the_archived_groups_as_they_were_when_it_began() -> None:
    state = State.initial(parse_config(CONFIG), "run-id")
    keys = [GroupKey(0, f"u{number}") for number in range(100_000)]
    small = sum(map(len, snapshot_of(state)))
    state.closed.archive.add(digests_of("run-id", keys), [number // 8 for number in range(len(keys))])
    state.closed.listed[GroupKey(0, "listed")] = ClosedGroup("given up", "math")
    before, pieces = copy.deepcopy(state), snapshot_of(state)
    assert before == state
    state.closed.archive.add(digests_of("run-id", [GroupKey(1, "new")]), [7])
    state.closed.listed[GroupKey(0, "listed")] = ClosedGroup("given up", "code")
    state.policy_version = 3
    decoded = decode_state(pieces)
    assert decoded == before
    assert decoded.outcomes([keys[9], GroupKey(1, "new")]) == {keys[9]: 1}
    assert decode_state(snapshot_of(state)) == state
    listed = [*snapshot_of(state)]
    assert sum(map(len, listed)) <= small + 20 * 100_001 + 100, "20 bytes a group"
    assert max(map(len, listed)) <= 1 << 20
    with pytest.raises(InvalidArgumentError, match=r"snapshot cannot be read: archived groups have \d+ bytes instead"):
        decode_state(listed[:-1])


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1])
def test_a_log_of_another_format_is_refused(version: int) -> None:
    state = State.initial(parse_config(CONFIG))
    start, *rest = snapshot_of(state)
    other = [bytes([0x92, version]) + start[2:], *rest]
    with pytest.raises(InvalidArgumentError, match=f"has format {version} and this version reads {FORMAT}"):
        decode_state(other)


class TestExport:
    def test_a_batch_that_is_freed_while_it_is_exported_is_not_reported_as_zeros(
        self, machine: Callable[..., Machine]
    ) -> None:
        one = machine(train_batch_size=40, policy_mini_batch_size=40)
        for number in range(40):
            one.submit(*group_rows(f"u{number}", response=[9] * 3000))
        one.make_batches()
        tables = one.run.export(0)
        assert next(tables).tokens.values[-1] == 9
        one.train(Position(0))
        with pytest.raises(NotFoundError, match="batch 0 is freed"):
            next(tables)

    def test_a_complete_group_that_is_dropped_while_all_are_exported_is_not_reported_as_zeros(
        self, machine: Callable[..., Machine]
    ) -> None:
        one = machine(train_batch_size=41, policy_mini_batch_size=41)
        for number in range(40):
            one.submit(*group_rows(f"u{number}", response=[9] * 3000))
        tables = one.run.export(None)
        assert next(tables).tokens.values[-1] == 9
        one.run.abort_groups(0, ["u39"], "wrong")
        with pytest.raises(UnavailableError, match="a complete group was dropped while it was exported; retry"):
            next(tables)

    def test_rows_that_are_not_decided_yet_are_not_exported(self, machine: Callable[..., Machine]) -> None:
        one = machine()
        with pytest.raises(FailedPreconditionError, match="batch 0 is not sealed yet"):
            next(one.run.export(0))


class TestOtherRanks:
    def begin(self, machine: Callable[..., Machine], **settings: Any) -> Machine:
        one = machine(**({"train_batch_size": 4, "policy_mini_batch_size": 2, "dp_size": 2} | settings))
        one.submit(*(each for uid in "abcdefgh" for each in group_rows(uid)))
        one.make_batches()
        return one

    def rows_of(self, one: Machine, position: Position, ranks: int) -> list[str]:
        metadata = [_uids(one.shard(position, rank)) for rank in range(ranks)]
        return sorted(uid for uids in metadata for uid in uids)

    def test_unacknowledged_mini_batches_are_cut_again_from_the_same_rows(
        self, machine: Callable[..., Machine]
    ) -> None:
        one = self.begin(machine)
        before = self.rows_of(one, Position(0, 0, 1), 2)
        for rank in range(2):
            one.train(Position(0), rank)
        resumed = one.run.resume("policy", Checkpoint(None), "bigger", 4)
        assert resumed.position == Position(0, 0, 1), "what all ranks have acknowledged stays done"
        assert one.run.status().shard_bytes == 0
        assert one.run.shard("policy", 3, None, resumed.incarnation).state is BatchState.PENDING
        one.make_batches()
        assert self.rows_of(one, Position(0, 0, 1), 4) == before
        assert one.run.status().config_json.count('"dp_size":4') == 1
        for batch, first in ((0, 1), (1, 0)):
            for index in range(first, 2):
                for rank in range(4):
                    one.train(Position(batch, 0, index), rank)
        status = one.run.status()
        assert (status.batches_freed, status.row_bytes, status.shard_bytes) == (2, 0, 0)

    def test_ranks_of_one_launch_ask_for_the_same_size(self, machine: Callable[..., Machine]) -> None:
        one = self.begin(machine)
        one.run.resume("policy", Checkpoint(None), "bigger", 4)
        one.run.resume("policy", Checkpoint(None), "bigger", 4)
        with pytest.raises(FailedPreconditionError, match="resumed with dp_size 4, but this rank requests 2"):
            one.run.resume("policy", Checkpoint(None), "bigger", 2)

    def test_the_old_ranks_and_the_other_model_are_refused(self, machine: Callable[..., Machine]) -> None:
        one = self.begin(machine, critic_mini_batch_size=2)
        one.run.resume("policy", Checkpoint(None), "bigger", 1)
        # Rank 1 is one that there is no more.
        for rank in range(2):
            for model in ("policy", "critic"):
                with pytest.raises(StaleIncarnationError):
                    one.run.acknowledge(model, rank, Position(0), 1, False)
                with pytest.raises(StaleIncarnationError):
                    one.run.shard(model, rank, None, 1)
        one.make_batches()
        assert one.run.resume("critic", Checkpoint(None), "bigger", 1).position == Position(0)

    def test_a_size_that_the_settings_do_not_allow_changes_nothing(self, machine: Callable[..., Machine]) -> None:
        one = self.begin(machine, mini_batch_unit="sequence", micro_batch={"size": 1})
        with pytest.raises(InvalidArgumentError, match="dp_size"):
            one.run.resume("policy", Checkpoint(None), "odd", 3)
        assert one.run.shard("policy", 1, None, 1).state is BatchState.PUBLISHED

    def test_it_is_remembered(self, machine: Callable[..., Machine]) -> None:
        one = self.begin(machine)
        one.run.resume("policy", Checkpoint(None), "bigger", 4)
        one.die()
        one.make_batches()
        assert one.run.config.dp_size == 4
        assert one.run.shard("policy", 3, None, 0).state is BatchState.PUBLISHED

    def test_a_batch_being_made_meanwhile_is_made_for_the_new_ranks(self) -> None:
        bench = Bench(train_batch_size=1, dp_size=2)
        bench.build_batch._gate = threading.Event()
        bench.submit(*group_rows("a"))
        making = threading.Thread(target=bench.make_batches)
        making.start()
        bench.build_batch.entered.wait(30)
        bench.run.resume("policy", Checkpoint(None), "smaller", 1)
        bench.build_batch._gate.set()
        making.join()
        bench.make_batches()
        view = bench.run.shard("policy", 0, None, 0)
        assert view.state is BatchState.PUBLISHED
        _, shards = bench.store.batches["run", 0]
        assert set(shards) == {ShardAddress("policy", 0, 0)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LAW, max_examples=LAW.max_examples // 2)
@given(st.data())
def test_whenever_it_dies_every_row_is_in_one_batch_or_dropped_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    one = Machine(tmp_path_factory.mktemp("journal"), train_batch_size=2, max_buffered_batches=3)
    left = [each for number in range(8) for each in group_rows(f"u{number}")]
    seen: dict[int, list[str]] = {}
    position, finished = 0, False
    for _ in range(200):
        match data.draw(st.sampled_from(["die", "submit", "submit", "make", "train", "train"])):
            case "die":
                one.die()
            case "submit" if left:
                with suppress(ResourceExhaustedError):
                    outcomes = one.sender.submit(one.run, table(left[0]))
                    assert outcomes[0] in (Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.SEALED)
                    if data.draw(st.booleans()):
                        left.pop(0)  # else the answer was lost, and it is sent again
            case "submit":
                finished = bool(one.run.finish()) or True
            case "make":
                one.make_batches()
            case "train":
                view = one.run.shard("policy", 0, None, 0)
                if view.state is BatchState.PUBLISHED:
                    assert view.position is not None
                    seen.setdefault(view.position.batch, []).extend(_uids(one.shard(view.position)))
                    one.train(view.position)
                    position += 1
                elif view.state is BatchState.END:
                    break
    for batch, uids in seen.items():
        assert len(uids) == len(set(uids)) * 2, batch
    flat = [uid for uids in seen.values() for uid in set(uids)]
    assert len(flat) == len(set(flat)), "no group is in two batches"
    named = [GroupKey(0, f"u{number}") for number in range(8)]
    states = {view.uid: view.state for part in one.run.groups(named) for view in part}
    assert set(flat) <= {uid for uid, state in states.items() if state == "sealed"}
    if finished and one.run.shard("policy", 0, None, 0).state is BatchState.END:
        assert len(flat) == 8
    one.ledger.close()


def _uids(data: bytes) -> list[str]:
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    return [uid for uid in json.loads(metadata["uids"]) if not uid.startswith("padding")]
