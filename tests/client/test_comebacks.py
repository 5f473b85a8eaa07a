"""Trainers and services that come back: with other ranks, from a journal, after kill -9."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gristmill import (
    BatchFailedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    RolloutClient,
    StaleIncarnationError,
    TrainerClient,
    UnavailableError,
)
from gristmill._wire import addresses
from gristmill.torch import Shard
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState, Position, ShardAnswer
from gristmill_service.run.run import Run
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.serving import StartService

CONFIG = {
    "train_batch_size": 4,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
    "dp_size": 2,
}


def fill(address: str, run: str, uids: Iterable[str], length: int = 2) -> None:
    with RolloutClient(address, run) as client:
        client.create_run(CONFIG)
        for uid in uids:
            for sample in range(2):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1] * length, [3 + sample, 4], reward=float(sample), is_last_step=True)


def uids_of(shard: Shard) -> list[str]:
    return [
        uid for uid, padding in zip(shard.metadata["uids"], shard["is_padding"].tolist(), strict=True) if not padding
    ]


def test_a_trainer_comes_back_with_other_ranks_and_goes_on_where_its_checkpoint_was(
    service: Service, run_name: str
) -> None:
    fill(service.grpc_address, run_name, "abcd")
    pair = [TrainerClient(service.grpc_address, run_name, rank, dp_size=2, auto_commit=False) for rank in range(2)]
    for rank in pair:
        rank.load_state_dict({}, launch="two")
    batches = [next(iter(rank)) for rank in pair]
    first = [next(batch.mini_batches()) for batch in batches]
    for shard in first:
        shard.ack()
    state = pair[0].state_dict()
    pair[0].commit()

    with pytest.raises(InvalidArgumentError, match=r"dp_size is 2, but 1 in this trainer; .*load_state_dict"):
        TrainerClient(service.grpc_address, run_name, 0, dp_size=1).state_dict()
    with TrainerClient(service.grpc_address, run_name, 0, dp_size=1) as alone:
        alone.load_state_dict(state)
        [batch] = [next(iter(alone))]
        shards = list(batch.mini_batches())
        assert [str(shard.position) for shard in shards] == ["batch 0 epoch 0 mini-batch 1"]
        trained = [uid for shard in [*first, *shards] for uid in uids_of(shard)]
        assert sorted(trained) == sorted([*"abcd"] * 2), "every row once, by any trainer"
        shards[0].ack()
    with pytest.raises(StaleIncarnationError):
        next(batches[0].mini_batches())
    for rank in pair:
        rank.close()


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_trainer_goes_on_within_its_batch_when_the_service_is_killed(
    start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mapped: bool, prefetch: int
) -> None:
    flags = ("--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path))
    before = start_service(*flags)
    fill(before.grpc_address, "run", "abcd", length=200_000)
    if not is_mapped:
        monkeypatch.setattr("gristmill._client.trainer.shards.pull.is_mappable", lambda path, size: False)
    with TrainerClient(before.grpc_address, "run", 0, auto_commit=False, prefetch=prefetch) as trainer:
        batch = next(iter(trainer))
        [*expected] = batch.forward()
        training = batch.mini_batches()
        next(training).ack()

        before.process.send_signal(signal.SIGKILL)
        before.process.wait()
        start_service(*flags, "--grpc-address", before.grpc_address)

        shard = next(training)
        shard.ack()
    assert shard.is_mapped == is_mapped
    assert str(shard.position) == "batch 0 epoch 0 mini-batch 1"
    assert all(shard[name].equal(expected[1][name]) for name in expected[1].tensors), "the same batch came again"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_shard_that_is_withdrawn_while_it_is_asked_for_or_read_is_waited_for(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    fill(service.grpc_address, run_name, "abcd")
    shard, read = Run.shard, Run.read_shard
    pending = [ShardAnswer(BatchState.PENDING, Position(0), incarnation=0)] * 2
    refusals = [NotFoundError("batch 0 is not published, or already freed")]

    async def shard_later(self: Run, *question: Any, **more: Any) -> ShardAnswer:
        return pending.pop() if pending else await shard(self, *question, **more)

    async def read_or_withdrawn(self: Run, batch: int, address: ShardAddress) -> AsyncIterator[bytes]:
        if refusals:
            raise refusals.pop()
        return await read(self, batch, address)

    # Nothing that happens in the run ends the wait.
    monkeypatch.setattr("gristmill._client.connection.retries.LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(Run, "shard", shard_later)
    monkeypatch.setattr(Run, "read_shard", read_or_withdrawn)
    with TrainerClient(service.grpc_address, run_name, 0, prefetch=prefetch) as trainer:
        [*shards] = next(iter(trainer)).forward()
    assert not pending
    assert not refusals
    assert [shard.position.mini_batch for shard in shards] == [0, 1]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_shard_that_the_service_says_is_published_and_never_returns_is_an_error(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    fill(service.grpc_address, run_name, "abcd")

    async def lost(self: Run, batch: int, address: ShardAddress) -> AsyncIterator[bytes]:
        raise NotFoundError("batch 0 is not published, or already freed")

    monkeypatch.setattr(Run, "read_shard", lost)
    monkeypatch.setattr("gristmill._client.trainer.shards.shard_reader.map_published", lambda *_: None)
    with (
        TrainerClient(service.grpc_address, run_name, 0, prefetch=prefetch, timeout_s=0.5) as trainer,
        pytest.raises(UnavailableError, match=r"says that the shard is published, and has not returned it for 0\.5 s"),
    ):
        next(next(iter(trainer)).mini_batches())


def test_a_trainer_waits_for_a_run_that_does_not_exist_yet_and_says_so(
    service: Service, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=60) as trainer, ThreadPoolExecutor(1) as threads:
        announced = threads.submit(trainer.announce_policy_version, 3)
        deadline = time.monotonic() + 30
        while not (told := [text for text in caplog.messages if f"run {run_name!r} does not exist yet" in text]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert told[0].endswith("the trainer waits up to 60 s until it is created (create_run)")
        fill(service.grpc_address, run_name, "abcd")
        announced.result(timeout=30)
        assert [shard.position.mini_batch for shard in next(iter(trainer)).forward()] == [0, 1]
        with RolloutClient(service.grpc_address, run_name) as client:
            assert client.policy_version() == 3
            client.delete_run()
        began = time.monotonic()
        with pytest.raises(NotFoundError, match="does not exist; create it first"):
            trainer.load_state_dict({})
        assert time.monotonic() - began < 30, "it waits only for a run that it has not seen"


def test_a_trainer_whose_run_nobody_creates_says_how_long_it_waited(service: Service, run_name: str) -> None:
    with (
        TrainerClient(service.grpc_address, run_name, 0, timeout_s=1) as trainer,
        pytest.raises(NotFoundError, match=rf"run {run_name!r} does not exist.*waited 1 s for it; raise timeout_s"),
    ):
        next(iter(trainer))


def test_a_batch_that_lies_ahead_is_not_waited_for(service: Service, run_name: str) -> None:
    fill(service.grpc_address, run_name, "abcd")
    with (
        TrainerClient(service.grpc_address, run_name, 0) as trainer,
        pytest.raises(FailedPreconditionError, match="batch 1 epoch 0 mini-batch 0 is not published"),
    ):
        trainer.open_shard(addresses.Position(1))


def test_a_trainer_that_a_failed_batch_ended_goes_on_behind_it_and_is_warned(
    service: Service, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(
            {
                "train_batch_size": 1,
                "n_samples_per_prompt": 2,
                "policy_mini_batch_size": 1,
                "micro_batch": {"max_tokens": 8},
                "dp_size": 4,
                "on_misaligned": "drop_trailing",
                "step_wise": True,
            }
        )
        with TrainerClient(service.grpc_address, run_name, 0) as trainer:
            trainer.load_state_dict({}, launch="first")
            checkpoint = trainer.state_dict()
            for uid, steps in (("short", 1), ("long", 2)):
                for sample in range(2):
                    with client.trajectory(uid, sample) as trajectory:
                        for step in range(steps):
                            trajectory.step([1, step], [3], reward=float(sample), is_last_step=step == steps - 1)
            with pytest.raises(BatchFailedError, match="on_misaligned"):
                next(iter(trainer))
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        trainer.load_state_dict(checkpoint, launch="second")
        batch = next(iter(trainer))
        assert batch.number == 1
    assert f"run {run_name!r}: batch 0 failed, and the trainer skips it: " in caplog.text


MISALIGNED = {
    "train_batch_size": 1,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"max_tokens": 8},
    "dp_size": 4,
    "on_misaligned": "error",
    "step_wise": True,
    "max_buffered_batches": 1,
}


def submit_misaligned(client: RolloutClient, *uids: str) -> None:
    """Groups of two rows, which make no four micro-batches."""
    for uid in uids:
        for sample in range(2):
            with client.trajectory(uid, sample) as trajectory:
                trajectory.step([1, 2], [3, 4], reward=float(sample), is_last_step=True)


def test_a_batch_that_failed_for_its_ranks_is_trained_by_others_also_after_the_service_was_killed(
    start_service: StartService, tmp_path: Path
) -> None:
    flags = ("--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path))
    before = start_service(*flags)
    with RolloutClient(before.grpc_address, "run") as client:
        client.create_run(MISALIGNED)
    with TrainerClient(before.grpc_address, "run", 0) as trainer, RolloutClient(before.grpc_address, "run") as client:
        assert trainer.position.batch == 0
        submit_misaligned(client, "a")
        with pytest.raises(BatchFailedError, match=r"dp_size = 4"):
            next(iter(trainer))
        checkpoint = trainer.state_dict()
    before.process.send_signal(signal.SIGKILL)
    before.process.wait()

    after = start_service(*flags, "--grpc-address", before.grpc_address)
    ranks = [TrainerClient(after.grpc_address, "run", rank, dp_size=2) for rank in range(2)]
    trained = []
    for rank in ranks:
        rank.load_state_dict(checkpoint, launch="two")
    for rank in ranks:
        batch = next(iter(rank))
        assert batch.number == 0
        for shard in batch.mini_batches():
            trained += uids_of(shard)
            shard.ack()
        rank.close()
    assert trained == ["a", "a"]
    with RolloutClient(after.grpc_address, "run") as client:
        status = client.status()
        assert (status.batches_freed, status.row_bytes, dict(status.groups_dropped)) == (1, 0, {})


@pytest.mark.parametrize("starts_late", [True, False])
def test_a_trainer_that_goes_on_makes_room_for_the_next_batch(
    service: Service, run_name: str, starts_late: bool
) -> None:
    def go_on(rank: TrainerClient) -> tuple[list[int], int]:
        failed: list[int] = []
        while True:
            try:
                return failed, next(iter(rank)).number
            except BatchFailedError as error:
                failed.append(error.batch)

    with RolloutClient(service.grpc_address, run_name) as client, ThreadPoolExecutor(4) as pool:
        client.create_run(MISALIGNED)
        ranks = [TrainerClient(service.grpc_address, run_name, rank, auto_commit=False) for rank in range(4)]
        if not starts_late:
            assert [rank.position.batch for rank in ranks] == [0] * 4
        submit_misaligned(client, "a")
        wait_until(lambda: bool(client.status().failed_batches))
        ends = [pool.submit(go_on, rank) for rank in ranks]
        submit_misaligned(client, "b")
        client.flush()
        for sample in range(2):
            with client.trajectory("c", sample) as trajectory:
                for step in range(2):
                    trajectory.step([1, step], [3], reward=float(sample), is_last_step=step == 1)
        assert {str(end.result(30)) for end in ends} == {str(([1] if starts_late else [0, 1], 2))}
        assert client.status().groups_dropped == {"batch_failed": 2}
        for rank in ranks:
            rank.close()
