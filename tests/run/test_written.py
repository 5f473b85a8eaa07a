"""A batch that waits for columns that trainers write: forward shards, writes, and what completes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from gristmill._wire.columns import Array
from gristmill._wire.rows import from_rows
from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    StaleIncarnationError,
    UnavailableError,
)
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.run.machine.answers import BatchState, ColumnPlace, Position
from gristmill_service.run.machine.codec import encode_state
from gristmill_service.run.machine.trainer_commands import Checkpoint
from gristmill_service.run.run import Run
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory_shards import MemoryShardStore
from gristmill_service.storage.run_store import Replay, RunStore
from tests.pipeline.written import column, files
from tests.run.harness import (
    CONFIG,
    Bench,
    InlineTasks,
    LastingLog,
    RecordingLog,
    row,
    shared_by,
    table,
)
from tests.strategies import Row

SETTINGS: dict[str, Any] = {
    "policy_mini_batch_size": 1,
    "dp_size": 2,
    "critic_mini_batch_size": 2,
    "merge": "prefix",
    "advantage_estimator": "gae",
    "kl_in_reward": {"coef": 0.5, "estimator": "k1"},
    "kl_from": "rollout_logprobs",
    "columns": [column("values"), column("ref_logprobs")],
}
NAMES = ("values", "ref_logprobs")
PLACES = [(mini_batch, rank) for mini_batch in range(2) for rank in range(2)]


def rows(uid: str) -> list[Row]:
    """A group of two trajectories: one of two steps that merge, one of a step."""
    first = row(uid, 0, last=False, response=(3, 4), rollout_logprobs=[-1.0, -2.0])
    second = row(uid, 0, 1, prompt_token_ids=[1, 2, 3, 4, 5], response=(6,), rollout_logprobs=[-3.0])
    return [first, second, row(uid, 1, response=(7, 8, 9), reward=0.5, rollout_logprobs=[-1.0, -1.0, -1.0])]


def forwarded(store: Any = None, log: RecordingLog | None = None, **settings: Any) -> Bench:
    """A run with a batch of two groups, whose forward shards are out."""
    bench = Bench(build_batch=build_batch, store=store or MemoryShardStore(), log=log, **SETTINGS | settings)
    submit(bench.run)
    bench.make_batches()
    return bench


def submit(run: Run) -> None:
    for uid in ("a", "b"):
        run.submit(table(*rows(uid)))


def shard(run: Run, mini_batch: int, rank: int, model: Any = "policy") -> dict[str, Array]:
    return load(b"".join(run.read_shard(0, ShardAddress(model, mini_batch, rank))))


def values_for(tensors: Mapping[str, Array], names: tuple[str, ...] = NAMES, scale: float = 1.0) -> dict[str, Array]:
    """What a trainer computes of a shard: something of each token, and noise on padding."""
    tokens = tensors["sequences"][:, -tensors["response_mask"].shape[1] :].astype(np.float32)
    own = tensors["response_mask"] == 1
    return {name: np.where(own, scale * tokens / 8 + index, 99).astype(np.float32) for index, name in enumerate(names)}


def write(run: Run, mini_batch: int, rank: int, names: tuple[str, ...] = NAMES, **more: Any) -> int:
    incarnation = more.pop("incarnation", 1)
    return run.write(0, mini_batch, rank, incarnation, values_for(shard(run, mini_batch, rank), names, **more))


def write_all(run: Run, **more: Any) -> None:
    for mini_batch, rank in PLACES:
        write(run, mini_batch, rank, **more)


def train_shards(run: Run) -> dict[ShardAddress, bytes]:
    addresses = [ShardAddress("policy", *place) for place in PLACES]
    addresses += [ShardAddress("critic", 0, rank) for rank in range(2)]
    return {address: b"".join(run.read_shard(0, address)) for address in addresses}


def as_sent_with_rows() -> dict[ShardAddress, bytes]:
    """The shards of the same batch, whose rollout workers sent what `values_for` writes."""
    settings = SETTINGS | {"columns": [given | {"source": "rollout"} for given in SETTINGS["columns"]]}
    config = parse_config(CONFIG | settings)
    sent = [
        one | {name: [token / 8 + index for token in one["response_ids"]] for index, name in enumerate(NAMES)}
        for uid in ("a", "b")
        for one in rows(uid)
    ]
    steps = from_rows(sent, step_wise=True, columns=config.columns)
    batch = build_batch(steps, config, run="run", batch=0, policy_version=0)
    return files(batch)


class TestWaiting:
    def test_its_forward_shards_are_there_and_it_says_what_it_waits_for(self) -> None:
        bench = forwarded()
        answer = bench.run.batch(0)
        assert answer.state is BatchState.FORWARD
        assert answer.plan
        assert answer.awaits == [ColumnPlace(*place, name) for place in PLACES for name in ("ref_logprobs", "values")]
        assert bench.run.shard("policy", 0, None, 0).state is BatchState.PENDING
        found = bench.run.shard("policy", 0, None, 0, is_forward=True)
        assert (found.state, found.position, found.incarnation) == (BatchState.FORWARD, Position(0), 1)
        assert not {"advantages", "returns", "rewards", *NAMES} & shard(bench.run, 0, 0).keys()
        assert bench.run.status().batches_published == 0

    @pytest.mark.parametrize("ranks", [(), (1,), (1, 1, 0), (5,)])
    def test_it_tells_what_it_waits_for_of_the_ranks_that_are_asked_for(self, ranks: tuple[int, ...]) -> None:
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
    def test_shards_that_the_store_loses_are_made_again_of_what_was_written(self, is_complete: bool) -> None:
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

    def test_values_of_which_no_advantage_can_be_made_fail_the_batch(self) -> None:
        # Each token's KL is a number of float32, and their sum is none.
        bench = forwarded(kl_in_reward={"coef": 7e37, "estimator": "k1"})
        write_all(bench.run)
        bench.make_batches()
        assert "float32 does not hold" in bench.run.status().failed_batches[0]
        assert (bench.state.row_bytes, len(bench.rows)) == (0, 0)

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


class TestWrites:
    @pytest.mark.parametrize("is_complete", [False, True])
    def test_the_same_bytes_again_change_nothing_and_others_are_refused(self, is_complete: bool) -> None:
        bench = forwarded()
        sent = values_for(shard(bench.run, 0, 0))
        bench.run.write(0, 0, 0, 1, sent)
        if is_complete:
            write_all(bench.run)
            bench.make_batches()
        state, records = encode_state(bench.state), len(bench.log.records)
        bench.run.write(0, 0, 0, 1, sent)
        assert (encode_state(bench.state), len(bench.log.records)) == (state, records)
        with pytest.raises(AlreadyExistsError, match="batch 0 mini-batch 0 rank 0: ref_logprobs is written already"):
            bench.run.write(0, 0, 0, 1, {**sent, "ref_logprobs": sent["ref_logprobs"] + 1})
        assert encode_state(bench.state) == state
        assert not bench.run._writer.staged

    def test_a_write_that_has_a_part_already_adds_the_rest(self) -> None:
        bench = forwarded()
        sent = values_for(shard(bench.run, 0, 0))
        bench.run.write(0, 0, 0, 1, {"values": sent["values"]})
        assert bench.run.write(0, 0, 0, 1, sent) == 6

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tensors": {}}, "no tensor came"),
            ({"tensors": {"advantages": np.zeros((1, 4), np.float32)}}, "'advantages' is of no column that trainers"),
            ({"tensors": {"micro_batch_000/values": np.zeros((1, 4), np.float32)}}, "is no tensor of this shard"),
            (
                {"tensors": {"values": np.zeros((2, 4), np.float32)}},
                r"values is F32 \[2, 4\] and has to be F32 \[1, 4\]",
            ),
            (
                {"tensors": {"values": np.array([[0, 1, 2, np.inf]], np.float32)}},
                r"uid 'a' sample 0 step 1: values\[3\] is not finite",
            ),
            ({"mini_batch": 2}, "there is no mini-batch 2"),
            ({"rank": 2}, "rank is 2 and dp_size is 2"),
            ({"incarnation": 0}, "incarnation is 0"),
        ],
    )
    def test_what_is_not_as_the_shard_is_is_refused_and_nothing_of_it_kept(
        self, change: dict[str, Any], message: str
    ) -> None:
        bench = forwarded()
        call = {"mini_batch": 0, "rank": 0, "incarnation": 1, "tensors": values_for(shard(bench.run, 0, 0))}
        state = encode_state(bench.state)
        with pytest.raises(InvalidArgumentError, match=message):
            bench.run.write(0, **{**call, **change})
        assert encode_state(bench.state) == state
        assert not bench.run._writer.staged

    def test_a_batch_that_waits_for_nothing_takes_none(self) -> None:
        bench = forwarded()
        write_all(bench.run)
        bench.make_batches()
        bench.state.batches[0].written.popitem()
        with pytest.raises(FailedPreconditionError, match="waits for no column"):
            write(bench.run, 1, 1)

    def test_before_the_shards_are_there_the_caller_is_told_to_come_again(self) -> None:
        bench = forwarded()
        sent = values_for(shard(bench.run, 0, 0))
        with pytest.raises(UnavailableError, match="batch 1 is not published yet"):
            bench.run.write(1, 0, 0, 1, sent)
        bench.store.free("run", 0)
        bench.run.batch(0)
        bench.run.shard("policy", 0, Position(0), 0, is_forward=True)
        with pytest.raises(UnavailableError, match="batch 0 is being published again"):
            bench.run.write(0, 0, 0, 1, sent)

    def test_a_log_that_is_full_refuses_the_write_whole(self) -> None:
        bench = forwarded()
        bench.log.refuses = 1
        with pytest.raises(UnavailableError, match="the book is full"):
            write(bench.run, 0, 0)
        assert not bench.run._writer.staged
        assert len(bench.run.batch(0).awaits) == 8
        write(bench.run, 0, 0)

    @pytest.mark.parametrize("kl_from", ["old_logprobs", "rollout_logprobs"])
    @pytest.mark.parametrize("last", ["old_logprobs", "ref_logprobs", "both"])
    def test_log_probabilities_whose_kl_overflows_are_refused_with_their_row(self, kl_from: str, last: str) -> None:
        bench = forwarded(
            kl_in_reward={"coef": 0.5, "estimator": "k3"},
            kl_from=kl_from,
            columns=[column("ref_logprobs"), column("old_logprobs")],
            advantage_estimator="reinforce++",
        )
        # The third token is an observation, of which anything may be written.
        sent = {"old_logprobs": [-1, -2, 0, -1], "ref_logprobs": [-1, 800, 900, 0]}
        tensors = {name: np.array([values], np.float32) for name, values in sent.items()}
        if kl_from == "rollout_logprobs":
            bench.run.write(0, 0, 0, 1, {"old_logprobs": tensors.pop("old_logprobs")})
        elif last != "both":
            first = next(name for name in tensors if name != last)
            bench.run.write(0, 0, 0, 1, {first: tensors.pop(first)})
        held = encode_state(bench.state)
        message = r"uid 'a' sample 0 step 1: \w+\[1\] is .*, and the KL is inf, of log-probabilities -2.0 and 800.0"
        with pytest.raises(InvalidArgumentError, match=message):
            bench.run.write(0, 0, 0, 1, tensors)
        assert encode_state(bench.state) == held
        if "ref_logprobs" in tensors:
            tensors["ref_logprobs"][0, 1] = 0
            bench.run.write(0, 0, 0, 1, tensors)

    def test_a_rows_sum_that_float32_cannot_hold_times_its_coefficient_is_refused(self) -> None:
        bench = forwarded(
            advantage_estimator="grpo",
            kl_in_reward={"coef": 10.0, "column": "kl"},
            columns=[column("kl", scope="row")],
        )
        with pytest.raises(
            InvalidArgumentError, match=r"uid 'a' sample 0 step 1: kl is 9.9.*e\+37, .* the coefficient 10"
        ):
            bench.run.write(0, 0, 0, 1, {"kl": np.array([1e38], np.float32)})

    def test_what_float32_cannot_hold_is_refused_before_it_fails_the_batch(self) -> None:
        bench = forwarded(columns=[column("values", dtype="float64"), column("ref_logprobs")])
        sent = {"values": np.full((1, 4), -1e300)}
        with pytest.raises(InvalidArgumentError, match=r"values\[0\] is -1e\+300, which float32 does not hold"):
            bench.run.write(0, 0, 0, 1, sent)
        assert len(bench.run.batch(0).awaits) == 8


class TestIncarnations:
    def test_a_trainer_that_is_started_again_writes_anew(self) -> None:
        bench = forwarded()
        write(bench.run, 0, 0)
        before = bench.state.row_bytes
        bench.run.resume("policy", Checkpoint(None), "second")
        assert bench.state.row_bytes < before
        assert len(bench.run.batch(0).awaits) == 8
        with pytest.raises(StaleIncarnationError):
            write(bench.run, 0, 0)
        write_all(bench.run, incarnation=2)
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
        write_all(bench.run, incarnation=2)
        bench.make_batches()
        assert train_shards(bench.run) == as_sent_with_rows()
        assert bench.replayed() == bench.state

    @pytest.mark.parametrize("is_complete", [False, True])
    @pytest.mark.parametrize("model", ["policy", "critic"])
    def test_for_other_ranks_it_is_cut_and_written_anew(self, model: Any, is_complete: bool) -> None:
        bench = forwarded()
        for mini_batch, rank in PLACES if is_complete else PLACES[:3]:
            write(bench.run, mini_batch, rank)
        bench.make_batches()
        bench.run.resume(model, Checkpoint(None), "smaller", 1)
        bench.make_batches()
        answer = bench.run.batch(0)
        assert answer.state is BatchState.FORWARD
        assert {place[:2] for place in answer.awaits} == {(0, 0), (1, 0)}
        for mini_batch in range(2):
            write(bench.run, mini_batch, 0, incarnation=2)
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

    class Short(LastingLog):
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
    run, tasks = opened(store.create("run", b"{}"), config)
    submit(run)
    tasks.build()
    sent = {place: values_for(shard(run, *place)) for place in PLACES}
    for place in PLACES[:2]:
        run.write(0, *place, 1, sent[place])
    if is_compacted:
        run._log.compact(encode_state(run._writer.state))
    run.close_log()

    run, tasks = opened(another().open("run"), config)
    assert run.batch(0).state is BatchState.PENDING
    tasks.build()
    assert {place[:2] for place in run.batch(0).awaits} == set(PLACES[2:])
    held = run._writer.state.row_bytes
    run.write(0, *PLACES[0], 1, sent[PLACES[0]])
    assert run._writer.state.row_bytes == held
    for place in PLACES[2:]:
        run.write(0, *place, 1, sent[place])
    run.close_log()

    run, tasks = opened(another().open("run"), config)
    tasks.build()
    assert run.batch(0).state is BatchState.PUBLISHED
    assert train_shards(run) == as_sent_with_rows()


def opened(log: Any, config: Any) -> tuple[Run, InlineTasks]:
    tasks = InlineTasks()
    shared = shared_by(MemoryShardStore(), build_batch=build_batch, clock=lambda: 0.0, tasks=tasks)
    run = Run("run", config, log, shared)
    run.start()
    return run, tasks


@pytest.mark.parametrize("is_compacted", [True, False])
def test_what_was_written_outlives_its_process(tmp_path: Path, is_compacted: bool) -> None:
    store = JournalRunStore(tmp_path, "never")
    check_that_it_outlives_its_process(store, lambda: store, is_compacted)
    store.close()


def test_what_was_written_and_is_lost_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(CONFIG | SETTINGS)
    store = JournalRunStore(tmp_path, "never")
    run, tasks = opened(store.create("run", b"{}"), config)
    submit(run)
    tasks.build()
    write_all(run)
    tasks.build()
    lost = next(iter(run.read(lambda state, room: state).batches[0].written.values())).table
    store.close()

    store = JournalRunStore(tmp_path, "never")
    log = store.open("run")
    retain = log.retain
    monkeypatch.setattr(log, "retain", lambda numbers, check: retain(numbers, check) | {lost})
    run, tasks = opened(log, config)
    tasks.build()
    assert run.batch(0).state is BatchState.FORWARD
    assert len(run.batch(0).awaits) == 8
    write_all(run)
    tasks.build()
    assert train_shards(run) == as_sent_with_rows()
    store.close()
