"""A batch that waits for columns that trainers write: forward shards, completion, and what outlives a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    StaleIncarnationError,
)
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.answers import BatchState, ColumnPlace, Position
from gristmill_service.run.machine.codec import snapshot_of
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.run_store import Replay, RunStore
from tests.run.forwarded import (
    NAMES,
    PLACES,
    SETTINGS,
    as_sent_with_rows,
    forwarded,
    shard,
    submit,
    train_shards,
    values_for,
    write,
    write_all,
)
from tests.run.harness import (
    CONFIG,
    HeldBuilders,
    SettledRun,
    build_all,
    open_run,
)
from tests.run.logs import RecordingLog


class TestWaiting:
    def test_its_forward_shards_are_there_and_it_says_what_it_waits_for(self) -> None:
        bench = forwarded()
        answer = bench.run.batch(0)
        assert answer.state is BatchState.FORWARD
        assert answer.plan
        assert answer.awaits == [ColumnPlace(*place, name) for place in PLACES for name in ("ref_logprobs", "values")]
        assert bench.run.shard("policy", 0, None, 0).state is BatchState.PENDING
        forward_shard = bench.run.shard("policy", 0, None, 0, is_forward=True)
        assert (forward_shard.state, forward_shard.position, forward_shard.incarnation) == (
            BatchState.FORWARD,
            Position(0),
            1,
        )
        assert not {"advantages", "returns", "rewards", *NAMES} & shard(bench.run, 0, 0).keys()
        assert bench.run.status().batches_published == 0

    @pytest.mark.parametrize("ranks", [(), (1,), (1, 1, 0), (5,)])
    def test_it_says_what_it_waits_for_of_the_ranks_that_are_asked_for(self, ranks: tuple[int, ...]) -> None:
        bench = forwarded()
        write(bench.run, 0, 1, ("values",))
        every = [ColumnPlace(*place, name) for place in PLACES for name in ("ref_logprobs", "values")]
        every.remove(ColumnPlace(0, 1, "values"))
        assert bench.run.batch(0, ranks).awaits == [place for place in every if not ranks or place.rank in ranks]

    def test_it_cannot_be_acknowledged(self) -> None:
        bench = forwarded()
        with pytest.raises(FailedPreconditionError, match="not published yet, and waits for ref_logprobs, values"):
            bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)

    def test_it_waits_until_every_shard_has_every_column(self) -> None:
        bench = forwarded()
        for mini_batch, rank in PLACES[:-1]:
            write(bench.run, mini_batch, rank)
        assert write(bench.run, 1, 1, ("values",)) == 1
        bench.make_batches()
        assert bench.run.batch(0).awaits == [ColumnPlace(1, 1, "ref_logprobs")]
        assert write(bench.run, 1, 1, ("ref_logprobs",)) == 0
        assert bench.run.batch(0).state is BatchState.PENDING
        bench.make_batches()
        assert bench.run.batch(0).state is BatchState.PUBLISHED


class TestCompletion:
    def test_its_train_shards_are_those_of_the_same_columns_sent_with_rows(self) -> None:
        bench = forwarded()
        write_all(bench.run)
        bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()
        assert bench.run.batch(0).awaits == []
        assert bench.run.status().batches_published == 1
        assert bench.replayed() == bench.state

    def test_what_was_written_takes_room_until_the_batch_is_freed(self) -> None:
        bench = forwarded()
        before, shards = bench.state.row_bytes, bench.state.shard_bytes
        write_all(bench.run)
        # Of each group 2 + 1 observed + 1 tokens, and 3.
        assert bench.state.row_bytes == before + 2 * 2 * 7 * 4
        bench.make_batches()
        assert bench.state.shard_bytes > shards
        for mini_batch, rank in PLACES:
            bench.run.acknowledge("policy", rank, Position(0, 0, mini_batch), 0, commit=True)
        for rank in range(2):
            bench.run.acknowledge("critic", rank, Position(0, 0, 0), 0, commit=True)
        assert (bench.state.row_bytes, bench.state.shard_bytes, len(bench.rows)) == (0, 0, 0)

    @pytest.mark.parametrize("is_complete", [False, True])
    def test_shards_that_the_store_loses_are_rebuilt_of_what_was_written(self, is_complete: bool) -> None:
        bench = forwarded()
        for mini_batch, rank in PLACES if is_complete else PLACES[:2]:
            write(bench.run, mini_batch, rank)
        bench.make_batches()
        bench.store.free("run", 0)
        assert bench.run.shard("policy", 0, Position(0), 0, is_forward=True).state is BatchState.PENDING
        bench.make_batches()
        if not is_complete:
            assert bench.run.batch(0).state is BatchState.FORWARD
            assert {place[:2] for place in bench.run.batch(0).awaits} == set(PLACES[2:])
            for mini_batch, rank in PLACES[2:]:
                write(bench.run, mini_batch, rank)
            bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()

    def test_what_float32_cannot_hold_in_sums_is_refused_before_it_fails_the_batch(self) -> None:
        # Each token's KL is a number of float32, and their sum is none.
        bench = forwarded(kl_in_reward={"coef": 7e37, "estimator": "k1"})
        with pytest.raises(InvalidArgumentError, match=r"ref_logprobs\[0\] is .*, and the KL is .*e\+3"):
            write(bench.run, 0, 0)
        values = values_for(shard(bench.run, 0, 0), ("values",))
        with pytest.raises(
            InvalidArgumentError, match=r"values\[0\] is 1.9.*e\+38, which is too large to be added up in float32"
        ):
            bench.run.write(0, 0, 0, 1, {"values": np.full_like(values["values"], 2e38)})
        assert len(bench.run.batch(0).awaits) == 8

    def test_the_largest_numbers_that_are_taken_give_a_batch_that_can_be_trained(self) -> None:
        bench = forwarded(kl_in_reward={"coef": 1.0, "estimator": "k1"}, whiten="batch")
        for mini_batch, rank in PLACES:
            mask = shard(bench.run, mini_batch, rank)["response_mask"]
            signs = np.where(np.arange(mask.size).reshape(mask.shape) % 2, 1, -1)
            sent = {"values": signs * np.float32(9e29), "ref_logprobs": signs * np.float32(9e29)}
            bench.run.write(0, mini_batch, rank, 1, {name: one.astype(np.float32) for name, one in sent.items()})
        bench.make_batches()
        assert bench.run.status().failed_batches == {}
        assert all(np.isfinite(shard(bench.run, *place)["advantages"]).all() for place in PLACES)

    def test_a_store_without_room_for_both_takes_the_train_shards_in_place_of_the_forward_shards(self) -> None:
        class Small(MemoryShardStore):
            def publish(self, run: str, batch: int, *what: Any) -> int:
                if self._batches:
                    raise ResourceExhaustedError("the store is full")
                return super().publish(run, batch, *what)

        bench = forwarded(Small())
        write_all(bench.run)
        bench.make_batches()
        assert bench.run.batch(0).state is BatchState.PUBLISHED


class TestIncarnations:
    def test_a_trainer_that_is_started_again_writes_again(self) -> None:
        bench = forwarded()
        write(bench.run, 0, 0)
        before = bench.state.row_bytes
        resumed = bench.run.resume("policy", Checkpoint(None), "second")
        assert bench.state.row_bytes < before
        assert len(bench.run.batch(0).awaits) == 8
        with pytest.raises(StaleIncarnationError):
            write(bench.run, 0, 0)
        write_all(bench.run, incarnation=resumed.incarnation)
        bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()
        assert bench.replayed() == bench.state

    def test_what_is_complete_stays_so_when_it_is_started_again(self) -> None:
        bench = forwarded()
        write_all(bench.run)
        bench.make_batches()
        bench.run.resume("policy", Checkpoint(None), "second")
        bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()

    def test_a_critic_that_is_started_again_drops_nothing(self) -> None:
        bench = forwarded()
        write(bench.run, 0, 0)
        bench.run.resume("critic", Checkpoint(None), "second")
        assert len(bench.run.batch(0).awaits) == 6

    def test_started_again_while_the_batch_is_completed_it_waits_again(self) -> None:
        bench = forwarded()
        write_all(bench.run)
        plain = bench.build_batch

        def build(*steps: Any, **more: Any) -> Any:
            if more.get("written"):
                bench.run.resume("policy", Checkpoint(None), "second")
            return plain(*steps, **more)

        bench.run._builder._pipeline = build
        bench.make_batches()
        assert bench.run.batch(0).state is BatchState.FORWARD
        assert len(bench.run.batch(0).awaits) == 8
        bench.run._builder._pipeline = plain
        write_all(bench.run, incarnation=bench.state.models["policy"].incarnation)
        bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()
        assert bench.replayed() == bench.state

    @pytest.mark.parametrize("dp_size", [1, 3])
    @pytest.mark.parametrize("model", ["policy", "critic"])
    def test_what_is_complete_is_cut_for_other_ranks(self, model: Any, dp_size: int) -> None:
        bench = forwarded()
        write_all(bench.run)
        bench.make_batches()
        bench.run.resume(model, Checkpoint(None), "other ranks", dp_size)
        bench.reopen()
        bench.make_batches()
        assert train_shards(bench.run, dp_size) == as_sent_with_rows(dp_size)
        bench.run.resume(model, Checkpoint(None), "as before", 2)
        bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()
        assert bench.replayed() == bench.state

    def test_a_critic_behind_the_policy_goes_on_with_other_ranks(self) -> None:
        bench = forwarded()
        write_all(bench.run)
        bench.make_batches()
        for mini_batch, rank in PLACES:
            bench.run.acknowledge("policy", rank, Position(0, 0, mini_batch), 0, True)
        for model in ("policy", "critic"):
            bench.run.resume(model, Checkpoint(None), "bigger", 4)
        bench.make_batches()
        for rank in range(4):
            bench.run.acknowledge("critic", rank, Position(0), 0, True)
        assert bench.state.freed == 1

    @pytest.mark.parametrize(
        ("model", "is_complete", "settings"),
        [
            ("policy", False, {}),
            ("critic", False, {}),
            ("policy", True, {"on_misaligned": "drop_trailing", "critic_mini_batch_size": None}),
        ],
    )
    def test_for_other_ranks_it_is_written_again(self, model: Any, is_complete: bool, settings: dict[str, Any]) -> None:
        bench = forwarded(**settings)
        for mini_batch, rank in PLACES if is_complete else PLACES[:3]:
            write(bench.run, mini_batch, rank)
        bench.make_batches()
        bench.run.resume(model, Checkpoint(None), "smaller", 1)
        bench.make_batches()
        answer = bench.run.batch(0)
        assert answer.state is BatchState.FORWARD
        assert {place[:2] for place in answer.awaits} == {(0, 0), (1, 0)}
        for mini_batch in range(2):
            write(bench.run, mini_batch, 0, incarnation=bench.state.models["policy"].incarnation)
        bench.make_batches()
        assert bench.run.batch(0).state is BatchState.PUBLISHED
        assert bench.replayed() == bench.state

    def test_a_batch_that_is_given_up_takes_what_was_written_with_it(self) -> None:
        bench = forwarded()
        write(bench.run, 0, 0)
        bench.run.resume("policy", Checkpoint(Position(1), give_up_reason="lost"), "second")
        bench.make_batches()
        assert (bench.state.row_bytes, len(bench.rows)) == (0, 0)


@pytest.mark.parametrize(("lost", "left"), [(1, 0), (2, 2), (3, 4), (5, 8)])
def test_a_batch_awaits_what_a_log_that_is_too_short_has_lost_of_it(lost: int, left: int) -> None:
    """lost: records of the log's end, the last of which says that the batch is complete."""

    class Short(RecordingLog):
        def replay(self) -> Replay:
            self.records = self.records[:-lost] if self.records else []
            return Replay(None, list(self.records), lambda: bool(self.records))

    bench = forwarded(log=Short())
    write_all(bench.run)
    bench.make_batches()
    bench.reopen()
    bench.make_batches()
    assert len(bench.run.batch(0).awaits) == left
    write_all(bench.run)
    bench.make_batches()
    assert train_shards(bench.run) == as_sent_with_rows()
    assert bench.replayed() == bench.state


def check_that_it_outlives_its_process(store: RunStore, another: Callable[[], RunStore], is_compacted: bool) -> None:
    """What was written is there in the next process, and once it is complete the shards are made of it. another: the
    same store, as another process opens it."""
    config = parse_config(CONFIG | SETTINGS)
    run, builders = opened(store.create("run", b"{}"), config)
    submit(run)
    build_all(run, builders)
    sent = {place: values_for(shard(run, *place)) for place in PLACES}
    for place in PLACES[:2]:
        run.write(0, *place, 1, sent[place])
    if is_compacted:
        run._log.compact(run._log.end, snapshot_of(run._writer.state))
    run.close_log()

    run, builders = opened(another().open("run"), config)
    assert run.batch(0).state is BatchState.PENDING
    build_all(run, builders)
    assert {place[:2] for place in run.batch(0).awaits} == set(PLACES[2:])
    held = run._writer.state.row_bytes
    run.write(0, *PLACES[0], 1, sent[PLACES[0]])
    assert run._writer.state.row_bytes == held
    for place in PLACES[2:]:
        run.write(0, *place, 1, sent[place])
    run.close_log()

    run, builders = opened(another().open("run"), config)
    build_all(run, builders)
    assert run.batch(0).state is BatchState.PUBLISHED
    assert train_shards(run) == as_sent_with_rows()


def opened(log: Any, config: Any) -> tuple[SettledRun, HeldBuilders]:
    return open_run(log, config, store=MemoryShardStore(), build_batch=build_batch)


@pytest.mark.parametrize("is_compacted", [True, False])
def test_what_was_written_outlives_its_process(tmp_path: Path, is_compacted: bool) -> None:
    store = JournalRunStore(tmp_path, "never")
    check_that_it_outlives_its_process(store, lambda: store, is_compacted)
    store.close()


def test_what_was_written_and_is_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(CONFIG | SETTINGS)
    store = JournalRunStore(tmp_path, "never")
    run, builders = opened(store.create("run", b"{}"), config)
    submit(run)
    build_all(run, builders)
    write_all(run)
    build_all(run, builders)
    lost = next(iter(run.read(lambda state, room: state).batches[0].written.values())).table
    store.close()

    store = JournalRunStore(tmp_path, "never")
    log = store.open("run")
    retain = log.retain
    monkeypatch.setattr(log, "retain", lambda numbers: retain(numbers) | {lost})
    run, builders = opened(log, config)
    build_all(run, builders)
    assert run.batch(0).state is BatchState.FORWARD
    assert len(run.batch(0).awaits) == 8
    write_all(run)
    build_all(run, builders)
    assert train_shards(run) == as_sent_with_rows()
    store.close()
