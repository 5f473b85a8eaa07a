"""The clients and the real service: rollouts in one end, the same tokens out at the other, trained exactly once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill import (
    AlreadyExistsError,
    BatchFailedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    RolloutClient,
    RowOutcome,
    StaleIncarnationError,
    TrainerClient,
)
from gristmill._client.rollout import requests
from gristmill._wire.addresses import Position
from gristmill.v1 import rollout_pb2, trainer_pb2, trainer_pb2_grpc
from gristmill_service.api import messages
from gristmill_service.run.machine.answers import BatchAnswer
from gristmill_service.service import Service
from tests.client.faces import FACES, connecting
from tests.serving import ServiceProcess

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "step_wise": True,
    "merge": "prefix",
    "loss_reduction": "token_mean",
    "micro_batch": {"size": 1},
    "update_epochs_per_batch": 2,
}


ROW = {"prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}


@pytest.fixture
def client(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        yield client


def trainer_of(service: Service, client: RolloutClient, rank: int = 0, **more: Any) -> TrainerClient:
    return TrainerClient(service.grpc_address, client.run, rank, timeout_s=20, **more)


@pytest.fixture
def trainer(service: Service, client: RolloutClient) -> Iterator[TrainerClient]:
    with trainer_of(service, client) as trainer:
        yield trainer


def roll_out(client: RolloutClient, uids: Sequence[str], **more: Any) -> None:
    """Two samples of two turns each; the second extends the first."""
    for uid in client.begin_groups(uids):
        for sample in range(2):
            with client.trajectory(uid, sample, policy_version=0, **more) as trajectory:
                assert trajectory.step([1, 2, 3], [4, 5])
                assert trajectory.step([1, 2, 3, 4, 5, 6], [7], reward=float(sample), is_last_step=True)


def prompts(first: int, count: int) -> list[str]:
    return [f"p{index}" for index in range(first, first + count)]


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


def test_both_samples_and_both_ranks_get_what_is_theirs(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG | {"dp_size": 2})
    roll_out(client, prompts(0, 2))
    client.finish()
    rows = []
    for rank in range(2):
        with trainer_of(service, client, rank, dp_size=2, auto_commit=False) as trainer:
            for batch in trainer:
                rows += [row for shard in batch.forward() for row in shard["row"].tolist()]
                for shard in batch.mini_batches():
                    shard.ack()
    assert sorted(rows) == [0, 1, 2, 3]


def test_processes_of_one_rank_read_the_same_shard_and_one_acknowledges(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    client.finish()
    with trainer_of(service, client) as first, trainer_of(service, client, acknowledges=False) as second:
        one, other = next(iter(first)), next(iter(second))
        for mine, theirs in zip(one.mini_batches(), other.mini_batches(), strict=True):
            assert mine["sequences"].equal(theirs["sequences"])
            theirs.ack()
            assert client.status().ranks[0].next.mini_batch == mine.position.mini_batch
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


def test_a_plan_is_encoded_once_for_all_the_ranks_that_wait_for_it(
    service: Service, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_run(CONFIG)
    encode, published = messages.batch_to, []

    def encoding(answer: BatchAnswer) -> trainer_pb2.GetBatchResponse:
        published.extend([answer] if answer.plan else [])
        return encode(answer)

    monkeypatch.setattr(messages, "batch_to", encoding)
    before = service.long_poll.count
    request = trainer_pb2.GetBatchRequest(run=client.run, wait_s=20)
    with grpc.insecure_channel(service.grpc_address) as channel:
        ask = trainer_pb2_grpc.TrainerServiceStub(channel).GetBatch  # type: ignore[no-untyped-call]
        answers = [ask.future(request) for _ in range(40)]
        while service.long_poll.count < before + 40:
            time.sleep(0.005)
        roll_out(client, prompts(0, 2))
        assert {answer.result().state for answer in answers} == {trainer_pb2.BATCH_STATE_PUBLISHED}
    assert 1 <= len(published) <= 3, "by those who were answered at the same moment, and by nobody after them"


def test_a_batch_left_before_its_end_is_not_skipped_silently(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    batches = iter(trainer)
    next(batches)
    with pytest.raises(FailedPreconditionError, match=r"batch 0 was left at batch 0 epoch 0 mini-batch 0; train its"):
        next(batches)


def test_acknowledging_ahead_is_refused(service: Service, client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    for reader in (trainer, trainer_of(service, client, acknowledges=False)):
        _, second, *_ = next(iter(reader)).mini_batches()
        with pytest.raises(
            FailedPreconditionError, match="the next is batch 0 epoch 0 mini-batch 0; acknowledge in order"
        ):
            second.ack()
        reader.close()


# Resuming.


def test_training_goes_on_from_the_checkpoint(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 4))
    client.finish()
    with trainer_of(service, client, auto_commit=False) as trainer:
        batch = next(iter(trainer))
        first, second, *_ = batch.mini_batches()
        first.ack()
        state = trainer.state_dict()
        trainer.commit()
        second.ack()
    with trainer_of(service, client, auto_commit=False) as trainer:
        trainer.load_state_dict(state)
        assert trainer.state_dict() == state
        seen = []
        for batch in trainer:
            for shard in batch.mini_batches():
                seen.append(tuple(shard.position))
                shard.ack()
        trainer.commit()
    assert seen == [(0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert client.status().batches_freed == 2


def test_a_checkpoint_is_committed_by_its_state_while_training_goes_on(client: RolloutClient, service: Service) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client, auto_commit=False) as trainer:
        state = trainer.state_dict()
        for shard in next(iter(trainer)).mini_batches():
            shard.ack()
        trainer.commit(state)
        assert client.status().batches_freed == 0
        trainer.commit()
        assert client.status().batches_freed == 1


def test_an_earlier_start_of_the_trainer_is_refused_after_a_resume(
    service: Service, client: RolloutClient, trainer: TrainerClient
) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client) as earliest:
        earliest.load_state_dict({})
        shard = next(next(iter(earliest)).mini_batches())
        trainer.load_state_dict(earliest.state_dict())
        with pytest.raises(StaleIncarnationError, match=r"incarnation \d was superseded by \d"):
            shard.ack()
    next(next(iter(trainer)).mini_batches()).ack()


def test_ranks_of_one_launch_resume_together_wherever_a_crash_left_them(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG | {"dp_size": 2})
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client, 0) as ahead:
        next(next(iter(ahead)).mini_batches()).ack()
    ranks = [trainer_of(service, client, rank) for rank in range(2)]
    before = client.status().models[0].incarnation
    assert [trainer.position for trainer in ranks] == [Position(0, 0, 1), Position(0, 0, 0)]
    for trainer in ranks:
        trainer.load_state_dict({}, launch="job-7 restart-1")
    assert [trainer.position for trainer in ranks] == [Position(0, 0, 0)] * 2
    assert client.status().models[0].incarnation == before + 1
    for trainer in ranks:
        trainer.close()


def test_several_ranks_without_a_common_launch_are_told_how_to_give_one(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG | {"dp_size": 2})
    with trainer_of(service, client) as trainer, pytest.raises(InvalidArgumentError, match="launch is not given"):
        trainer.load_state_dict({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "other"}, "state: run is 'other' and this trainer's is"),
        ({"model": "critic"}, "state: model is 'critic'"),
        ({"version": 3}, "state: version is 3 and this gristmill reads 1, 2"),
        ({"run_id": None}, "state: run_id is None and generation"),
        ({"epoch": None}, "no position in"),
    ],
)
def test_a_state_of_something_else_is_refused(
    client: RolloutClient, trainer: TrainerClient, change: dict[str, Any], message: str
) -> None:
    client.create_run(CONFIG)
    with pytest.raises(InvalidArgumentError, match=message):
        trainer.load_state_dict(trainer.state_dict() | change)


# What trainers are refused.


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dp_size": 4}, "its dp_size is 1 and this trainer's 4"),
        ({"rank": 1}, r"rank is 1; with dp_size 1 it is 0\.\.0"),
        ({"rank": -1}, "rank is -1"),
        ({"model": "critic"}, "it has no critic; give critic_mini_batch_size"),
    ],
)
def test_a_trainer_that_does_not_fit_the_run_is_refused(
    service: Service, client: RolloutClient, more: dict[str, Any], message: str
) -> None:
    client.create_run(CONFIG)
    with trainer_of(service, client, **more) as trainer, pytest.raises(InvalidArgumentError, match=message):
        next(iter(trainer))


def test_an_unknown_run_and_model_are_refused(service: Service, client: RolloutClient, trainer: TrainerClient) -> None:
    with pytest.raises(NotFoundError, match=client.run):
        next(iter(trainer))
    with pytest.raises(InvalidArgumentError, match="model is 'reward'; known are policy, critic"):
        trainer_of(service, client, model="reward")


def test_a_freed_batch_is_not_there(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    for shard in next(iter(trainer)).mini_batches():
        shard.ack()
    with pytest.raises(NotFoundError, match="batch 0"):
        trainer.open_shard(Position(0))


def test_a_batch_that_failed_is_told_of_with_its_reason_and_the_next_goes_on(
    client: RolloutClient, trainer: TrainerClient
) -> None:
    # A single row makes no two micro-batches.
    vpp = {"micro_batch": {"max_tokens": 100}, "on_misaligned": "error", "vpp_size": 2, "microbatch_group_size": 2}
    client.create_run(CONFIG | vpp)
    assert trainer.position == Position(0)
    for uid in prompts(0, 2):
        with client.trajectory(uid, 0) as trajectory:
            trajectory.step([1], [2], reward=1.0, is_last_step=True)
        with client.trajectory(uid, 1) as trajectory:
            trajectory.abort("lost")
    roll_out(client, prompts(2, 2))
    with pytest.raises(BatchFailedError, match=r"batch 0 failed: .*align") as caught:
        next(iter(trainer))
    assert caught.value.batch == 0
    assert client.status().batches_freed == 0, "its rows are kept for a trainer that comes back with other ranks"
    assert next(iter(trainer)).number == 1
    assert client.status().batches_freed == 1


def test_a_critic_has_an_order_of_its_own(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG | {"critic_mini_batch_size": 2})
    roll_out(client, prompts(0, 2))
    client.finish()
    with trainer_of(service, client) as policy, trainer_of(service, client, model="critic") as critic:
        for trainer, steps in ((policy, 4), (critic, 2)):
            for batch in trainer:
                acknowledged = 0
                for shard in batch.mini_batches():
                    shard.ack()
                    acknowledged += 1
                assert acknowledged == steps
    assert client.status().batches_freed == 1


# Rollouts.


def test_rewards_may_come_later(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    for uid in client.begin_groups(prompts(0, 2)):
        for sample in range(2):
            with client.trajectory(uid, sample) as trajectory:
                trajectory.step([1], [2])
                trajectory.step([1, 2], [3], is_last_step=True)
    for uid in prompts(0, 2):
        for sample in range(2):
            assert client.set_reward(uid, sample, float(sample)) is True
            assert client.set_reward(uid, sample, float(sample)) is False
    shard = next(next(iter(trainer)).mini_batches())
    assert shard["rewards"].tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_rewards_per_token_come_with_the_step_or_later(
    service: Service, client: RolloutClient, trainer: TrainerClient
) -> None:
    client.create_run(CONFIG)
    with RolloutClient(service.grpc_address, client.run, token_rewards=True) as worker:
        for uid in worker.begin_groups(prompts(0, 2)):
            for sample in range(2):
                with worker.trajectory(uid, sample) as trajectory:
                    trajectory.step([1], [2, 3])
                    trajectory.step([1, 2, 3], [4, 5], reward=[0.5, 0.1] if sample else None, is_last_step=True)
            worker.set_reward(uid, 0, np.array([0.25, 0.3]))
    shard = next(next(iter(trainer)).mini_batches())
    assert shard["rewards"].tolist() == [pytest.approx([0, 0, 0.25, 0.3]), pytest.approx([0, 0, 0.5, 0.1])]


@pytest.mark.parametrize("reward", [float("nan"), [], [[1.0]], [float("inf")]])
def test_a_reward_that_is_none_is_refused(client: RolloutClient, reward: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0: reward is"):
        client.set_reward("a", 0, reward)


def test_a_whole_generator_output_is_taken_once(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    output = {
        "prompt_token_ids": [[1], [1, 2], [1], [1]] * 2,
        "response_ids": [[2], [3], [4, 5], [6]] * 2,
        "rewards": [0.0, 1.0, 0.0, 1.0] * 2,
        "trajectory_ids": [("p0", 0), ("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1), ("p1", 1), ("p2", 0), ("p2", 1)],
        "is_last_step": [False, True, True, True, False, True, True, True],
    }
    assert client.submit(output, policy_version=3) == [RowOutcome.ACCEPTED] * 8
    assert set(client.submit(output, policy_version=3)) <= {RowOutcome.DUPLICATE, RowOutcome.SEALED}
    assert client.status().rows_accepted == 8
    assert next(iter(trainer)).plan["rows_received"] == 6


def test_a_refused_row_names_its_trajectory_and_what_was_accepted_stays(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    good, bad = client.trajectory("p0", 0), client.trajectory("p0", 5)
    good.step([1], [2])
    bad.step([1], [2])
    with pytest.raises(InvalidArgumentError, match=r"uid 'p0' sample 5 .*n_samples_per_prompt"):
        client.flush()
    assert client.status().rows_accepted == 1
    again = client.trajectory("p0", 0)
    again.step([1], [3])
    with pytest.raises(AlreadyExistsError, match="uid 'p0' sample 0 step 0: another content"):
        client.flush()


def test_a_higher_attempt_supersedes_and_the_earlier_worker_is_told(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    first = client.trajectory("p0", 0)
    first.step([1], [2])
    client.flush()
    second = client.trajectory("p0", 0, attempt=1)
    second.step([1], [9])
    client.flush()
    first.step([1, 2], [3])
    client.flush()
    assert second.is_kept
    assert not first.is_kept
    assert first.step([1, 2, 3], [4]) is False


def test_a_worker_of_a_dropped_group_is_told_to_stop(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    client.begin_groups(["p0"])
    with client.trajectory("p0", 0) as trajectory:
        assert trajectory.step([1], [2])
        assert client.abort_group("p0", reason="prompt is broken") is True
        assert client.abort_group("p0") is False
        trajectory.step([1, 2], [3])
        client.flush()
        assert trajectory.step([1, 2, 3], [4]) is False
    assert client.status().groups_dropped == {"prompt is broken": 1}


def test_giving_up_a_trajectory_of_which_nothing_arrived_is_no_error(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    with client.trajectory("p0", 0) as trajectory:
        trajectory.step([1], [2])
        trajectory.abort("gave up")


def test_begun_groups_are_those_that_there_is_room_for(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG | {"max_buffered_batches": 1})
    uids = prompts(0, 4)
    assert client.begin_groups(uids, wait_s=0) == ["p0", "p1"]
    assert client.begin_groups(uids[2:], wait_s=0.01) == []
    assert client.begin_groups(uids) == ["p0", "p1"]
    roll_out(client, uids[:2])
    waiting: list[list[str]] = []
    thread = threading.Thread(target=lambda: waiting.append(client.begin_groups(uids[2:])))
    thread.start()
    for shard in next(iter(trainer)).mini_batches():
        shard.ack()
    thread.join(30)
    assert waiting == [["p2", "p3"]]
    assert client.begin_groups(uids[:2]) == []
    assert client.begin_groups([]) == []


@pytest.mark.parametrize("face", FACES)
def test_groups_of_their_own_size_go_on_without_what_comes_late(service: Service, run_name: str, face: str) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG | {"max_samples_per_prompt": 3, "surplus": 1, "update_epochs_per_batch": 1})
        with pytest.raises(
            InvalidArgumentError, match=r"uid 'a': n_samples is 9, and max_samples_per_prompt: 3 allows"
        ):
            client.begin_groups(["a"], n_samples=9)
        with pytest.raises(InvalidArgumentError, match=r"uid 'a': n_samples is 'many'; give how many"):
            client.begin_groups(["a"], n_samples="many")
        assert client.begin_groups(["a", "b"], n_samples={"a": 3}) == ["a", "b"]
        late = client.trajectory("a", 0, policy_version=3)
        with pytest.raises(InvalidArgumentError, match="policy_versions has 1 values and response_ids has 2"):
            late.step([1], [2, 3], policy_versions=[4])
        late.step([1], [2], policy_versions=[4])
        for uid, samples in (("a", (3, 1, 2)), ("b", (0, 1))):
            for sample in samples:
                client.trajectory(uid, sample).step([1], [2], reward=float(sample), is_last_step=True)
                client.flush()
        late.step([1, 2], [3], reward=1.0, is_last_step=True)
        client.flush()
        assert not late.is_kept
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:
        trained = [shard.tensors["sample"].tolist() for shard in next(iter(trainer)).mini_batches()]
    assert trained == [[1, 2, 3], [0, 1]]


@pytest.mark.parametrize("face", FACES)
def test_a_batch_has_its_share_of_each_task(service: Service, run_name: str, face: str) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG | {"tag_shares": {"math": {"min": 0.5}}, "tag_timeout_s": 60})
        with pytest.raises(InvalidArgumentError, match="uid 'a': tag is 7; name the environment or task with a string"):
            client.begin_groups(["a"], tag=7)
        assert client.begin_groups(["a", "b", "c"], tag={"a": "code", "b": "code"}) == ["a", "b", "c"]
        for uid in "ab":
            client.submit_rows({**ROW, "uid": uid, "sample": sample} for sample in range(2))
        assert client.status().batches_sealed == 0
        client.submit_rows({**ROW, "uid": "c", "sample": sample, "tag": "math"} for sample in range(2))
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:
        assert next(iter(trainer)).plan["tags"] == ["code", "math"]


def test_a_long_wait_for_room_tells_why(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.create_run(CONFIG | {"max_buffered_batches": 1})
    roll_out(client, prompts(0, 2))
    assert client.begin_groups(["late"], wait_s=0.05) == []
    assert caplog.messages == []
    monkeypatch.setattr(requests, "ROOM_NOTICE_S", 0.0)
    assert client.begin_groups(["late"], wait_s=0.05) == []
    assert f"run {client.run!r}: no room for groups for 0 s now: max_buffered_batches: 1 batches" in caplog.messages[0]


def test_waiting_for_room_is_told_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter((0.0, 0.1, 20.0, 40.0, 50.0, 60.0, 80.0, 100.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    wait = requests.RoomWait("run")
    full = rollout_pb2.BeginGroupsResponse(admissions=[rollout_pb2.GROUP_ADMISSION_NO_ROOM], reason="it is full")
    assert not any(wait.is_over(full) for _ in range(7))
    assert [message.split("for groups for ")[1] for message in caplog.messages] == [
        "40 s now: it is full",
        "80 s now: it is full",
    ]
    assert wait.is_over(rollout_pb2.BeginGroupsResponse(admissions=[rollout_pb2.GROUP_ADMISSION_ADMITTED]))


def test_rows_of_a_group_without_room_wait_until_there_is(
    service: Service, client: RolloutClient, trainer: TrainerClient
) -> None:
    client.create_run(CONFIG | {"max_buffered_batches": 1})
    roll_out(client, prompts(0, 2))
    late = client.trajectory("late", 0)
    late.step([1], [2], reward=0.0, is_last_step=True)
    for shard in next(iter(trainer)).mini_batches():
        shard.ack()
    client.flush()
    assert late.is_kept
    with RolloutClient(service.grpc_address, client.run, timeout_s=0.2) as hasty:
        hasty.begin_groups(["p3"])
        with pytest.raises(ResourceExhaustedError, match=r"uid 'p4' .*no room for .*gave up after 0\.2 s"):
            hasty.submit_rows(
                [{"uid": "p4", "sample": 0, "prompt_token_ids": [1], "response_ids": [1], "loss_mask": [1]}]
            )


@pytest.mark.parametrize("uids", ["p0", ["p0", ""]])
def test_uids_that_are_none_are_refused(client: RolloutClient, uids: str | list[str]) -> None:
    client.create_run(CONFIG)
    with pytest.raises(InvalidArgumentError, match="uid"):
        client.begin_groups(uids)


def test_sealing_takes_what_is_complete(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    with pytest.raises(FailedPreconditionError, match="complete"):
        client.seal()
    roll_out(client, ["p0"])
    assert client.seal(batch=0) == (0, 1)
    assert client.seal(batch=0) == (0, 1)
    assert next(iter(trainer)).plan["prompts"] == 1


def test_policy_versions_reach_the_workers(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    assert client.policy_version() == 0
    reached: list[int] = []
    thread = threading.Thread(target=lambda: reached.append(client.wait_policy_version(3, 30)))
    thread.start()
    trainer.announce_policy_version(3)
    thread.join(30)
    assert reached == [3]
    assert client.policy_version() == 3


def test_a_run_of_other_settings_is_refused_and_of_wrong_ones_named(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    client.create_run(CONFIG)
    with pytest.raises(AlreadyExistsError, match=client.run):
        client.create_run(CONFIG | {"merge": "none"})
    with pytest.raises(InvalidArgumentError, match="train_batch_sise"):
        client.create_run(CONFIG | {"train_batch_sise": 3})
    with pytest.raises(InvalidArgumentError, match="config is not JSON"):
        client.create_run(CONFIG | {"columns": object()})


# Shared memory.


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
        monkeypatch.setattr("gristmill._client.trainer.pull.is_mappable", lambda path, size: False)
        streamed = trainer.open_shard(mapped.position)
    assert (again.is_mapped, streamed.is_mapped) == (True, False)
    assert again["rewards"].any()
    assert again.metadata == streamed.metadata
    assert all(again[name].equal(streamed[name]) for name in again.tensors)


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
    found: dict[tuple[str, int, int], list[int]] = {}
    with TrainerClient(service.grpc_address, run, 0) as trainer:
        for batch in trainer:
            for shard in batch.mini_batches():
                for micro in shard.micro_batches():
                    samples, steps = micro["sample"].tolist(), micro["step_first"].tolist()
                    names = zip(micro.metadata["uids"], samples, steps, strict=True)
                    responses = [row.tolist() for row in micro.unpad(micro["sequences"])]
                    found |= dict(zip(names, responses, strict=True))
                shard.ack()
    assert found == sent
