"""The clients and the real service: rollouts in one end, the same tokens out at the other, trained exactly once."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill import (
    FailedPreconditionError,
    RolloutClient,
    TrainerClient,
)
from gristmill._wire.addresses import Position
from gristmill.v1 import trainer_pb2, trainer_pb2_grpc
from gristmill_service.api.rpc import methods
from tests.client.whole_way import CONFIG, prompts, roll_out, trainer_of
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.serving import ServiceProcess, StartService


def test_a_run_from_rollouts_to_the_last_mini_batch(client: RolloutClient, trainer: TrainerClient) -> None:
    assert client.create_run(CONFIG) == []
    roll_out(client, prompts(0, 4))
    assert client.finish() == 2
    seen = []
    for batch in trainer:
        assert len(batch) == 4
        assert batch.plan["batch"] == batch.number
        assert [shard.position.mini_batch for shard in batch.forward()] == [0, 1]
        for shard in batch.mini_batches():
            seen.append(shard.position)
            micros = list(shard.micro_batches())
            assert [micro["sequences"].tolist() for micro in micros] == [[[1, 2, 3, 4, 5, 6, 7]]] * 2
            assert [micro["loss_mask"].tolist() for micro in micros] == [[[1, 1, 0, 1]]] * 2
            assert sum(float((m["advantages"] * m["loss_mask"]).sum()) for m in micros) == pytest.approx(0)
            shard.ack()
            shard.ack()
    assert seen == [Position(b, e, m) for b in range(2) for e in range(2) for m in range(2)]
    assert client.status().batches_freed == 2


def test_a_batch_tells_a_rank_where_its_first_shard_is(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG | {"policy_mini_batch_size": 2, "update_epochs_per_batch": 1})
    roll_out(client, prompts(0, 4))
    client.finish()
    before = _calls(service, "GetShard")
    with trainer_of(service, client, prefetch=0) as trainer:
        for batch in trainer:
            assert [shard.position for shard in batch.forward()] == [Position(batch.number)]
            # The same again, which is asked for.
            for shard in batch.mini_batches():
                shard.ack()
    assert _calls(service, "GetShard") - before == 2
    assert client.status().batches_freed == 2


def _calls(service: Service, call: str) -> float:
    """How many of these calls gRPC was answered with so far."""
    lines = httpx.get(f"{service.http_url}/metrics").text.splitlines()
    mine = (line for line in lines if line.startswith("gristmill_call_seconds_count{") and f'call="{call}"' in line)
    return sum(float(line.rpartition(" ")[2]) for line in mine)


def test_processes_of_one_rank_read_the_same_shard_and_one_acknowledges(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    client.finish()
    with trainer_of(service, client) as first, trainer_of(service, client, acks=False) as second:
        one, other = next(iter(first)), next(iter(second))
        for mine, theirs in zip(one.mini_batches(), other.mini_batches(), strict=True):
            assert mine["sequences"].equal(theirs["sequences"])
            theirs.ack()
            assert client.status().models["policy"].next[0].mini_batch == mine.position.mini_batch
            mine.ack()
        assert first.position == second.position == Position(1)


def test_trainers_wait_for_a_batch_and_end_with_the_run(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    trained = []

    def train() -> None:
        for batch in trainer:
            for shard in batch.mini_batches():
                shard.ack()
            trained.append(batch.number)

    thread = threading.Thread(target=train)
    thread.start()
    roll_out(client, prompts(0, 2))
    roll_out(client, prompts(2, 1))
    client.finish()
    thread.join(30)
    assert trained == [0, 1]


def test_a_plan_is_encoded_once_for_all_the_ranks_that_wait_for_it(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG)
    # Calls that waited in the test before are gone, and its plan, which may be the same bytes.
    wait_until(lambda: service.long_poll.count == 0)
    methods._published_batch.cache_clear()
    request = trainer_pb2.GetBatchRequest(run=client.run, wait_s=20)
    with grpc.insecure_channel(service.grpc_address) as channel:
        ask = trainer_pb2_grpc.TrainerServiceStub(channel).GetBatch  # type: ignore[no-untyped-call]
        answers = [ask.future(request) for _ in range(40)]
        wait_until(lambda: service.long_poll.count == 40)
        roll_out(client, prompts(0, 2))
        assert {answer.result().state for answer in answers} == {trainer_pb2.BATCH_STATE_PUBLISHED}
    assert methods._published_batch.cache_info().misses == 1


def test_a_batch_left_before_its_end_is_not_skipped_silently(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    batches = iter(trainer)
    next(batches)
    with pytest.raises(
        FailedPreconditionError, match=r"the loop left batch 0 at batch 0 epoch 0 mini-batch 0; iterate its"
    ):
        next(batches)


def test_acknowledging_ahead_is_refused(service: Service, client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    for reader in (trainer, trainer_of(service, client, acks=False)):
        _, second, *_ = next(iter(reader)).mini_batches()
        with pytest.raises(
            FailedPreconditionError, match="the next is batch 0 epoch 0 mini-batch 0; acknowledge in order"
        ):
            second.ack()
        reader.close()


def test_shards_are_mapped_where_the_service_shares_memory_and_streamed_where_not(
    service_process: ServiceProcess, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutClient(service_process.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        roll_out(client, prompts(0, 2))
    with TrainerClient(service_process.grpc_address, run_name, 0) as trainer:
        mapped = next(next(iter(trainer)).forward())
        mapped["rewards"].zero_()
        again = trainer.open_shard(mapped.position)
        monkeypatch.setattr("gristmill._client.trainer.shards.pull.is_mappable", lambda path, size: False)
        streamed = trainer.open_shard(mapped.position)
    assert (again.is_mapped, streamed.is_mapped) == (True, False)
    assert again["rewards"].any()
    assert again.metadata == streamed.metadata
    assert all(again[name].equal(streamed[name]) for name in again.tensors)


def empty(directory: Path) -> None:
    for file in directory.glob("**/*.safetensors"):
        os.truncate(file, 0)


def shorten(directory: Path) -> None:
    for file in directory.glob("**/*.safetensors"):
        os.truncate(file, 100)


def remove(directory: Path) -> None:
    for root in directory.glob("gristmill-*/"):
        shutil.rmtree(root)


@pytest.mark.parametrize("spoil", [empty, shorten, remove])
def test_a_shard_that_somebody_truncated_or_removed_is_not_mapped_but_made_anew(
    start_service: StartService, run_name: str, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    service = start_service("--shared-memory-dir", str(tmp_path))
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        roll_out(client, prompts(0, 2))
    with TrainerClient(service.grpc_address, run_name, 0, prefetch=0) as trainer:
        first = next(next(iter(trainer)).forward())
        whole = {name: tensor.clone() for name, tensor in first.tensors.items()}
        spoil(tmp_path)
        again = trainer.open_shard(first.position)
        assert again.tensors.keys() == whole.keys()
        assert all(again[name].equal(tensor) for name, tensor in whole.items())
        # The same bytes are in shared memory again.
        assert trainer.open_shard(first.position).is_mapped


def test_a_service_that_shares_no_memory_streams(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    assert not any(shard.is_mapped for shard in next(iter(trainer)).forward())


_examples = itertools.count()


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    batch_rows=st.integers(1, 9),
    layout=st.sampled_from([{"layout": "packed"}, {"pad_width": "micro_batch"}, {"pad_width": "shard"}]),
)
def test_what_goes_in_comes_out(service: Service, turns: list[int], batch_rows: int, layout: dict[str, Any]) -> None:
    run = f"in-out-{next(_examples)}"
    config = CONFIG | layout | {"merge": "none", "update_epochs_per_batch": 1}
    sent = {}
    with RolloutClient(service.grpc_address, run, max_batch_rows=batch_rows) as client:
        client.create_run(config)
        for index, count in enumerate(turns):
            uid, sample = f"p{index // 2}", index % 2
            with client.trajectory(uid, sample) as trajectory:
                for step in range(count):
                    prompt, response = [index] * (step + 1), [10 + step] * (index + 1)
                    trajectory.step(prompt, response, is_last_step=step == count - 1, reward=1.0)
                    sent[uid, sample, step] = response
        client.finish()
    trained: dict[tuple[str, int, int], list[int]] = {}
    with TrainerClient(service.grpc_address, run, 0) as trainer:
        for batch in trainer:
            for shard in batch.mini_batches():
                for micro in shard.micro_batches():
                    samples, steps = micro["sample"].tolist(), micro["step_first"].tolist()
                    names = zip(micro.metadata["uids"], samples, steps, strict=True)
                    responses = [row.tolist() for row in micro.unpad(micro["sequences"])]
                    trained |= dict(zip(names, responses, strict=True))
                shard.ack()
    assert trained == sent
