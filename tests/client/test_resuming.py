"""Trainers that start again go on from their checkpoint, and what does not fit a run is refused."""

from __future__ import annotations

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
)
from gristmill._wire.addresses import Position
from tests.client.whole_way import CONFIG, prompts, roll_out, trainer_of
from tests.on_loop import Service


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
        with pytest.raises(StaleIncarnationError, match=r"incarnation \d+ was superseded by \d+"):
            shard.ack()
    next(next(iter(trainer)).mini_batches()).ack()


def test_the_later_of_two_trainers_of_a_rank_supersedes_the_earlier(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG | {"dp_size": 2})
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client, 0) as earlier, trainer_of(service, client, 1) as other_rank:
        shard, others = (next(next(iter(one)).mini_batches()) for one in (earlier, other_rank))
        with trainer_of(service, client, 0) as later:
            assert later.position == Position(0)
            superseded = (
                r"policy: incarnation \d+ was superseded by \d+: another trainer of rank 0 started; end this process"
            )
            with pytest.raises(StaleIncarnationError, match=superseded):
                shard.ack()
            with pytest.raises(StaleIncarnationError, match=r"incarnation \d+ was superseded"):
                earlier.commit()
            others.ack()
            next(next(iter(later)).mini_batches()).ack()


def test_a_trainer_of_a_deleted_run_trains_nothing_of_the_run_that_is_created_under_its_name(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client) as old, trainer_of(service, client) as new:
        shard = next(next(iter(old)).mini_batches())
        client.delete_run()
        client.create_run(CONFIG)
        roll_out(client, prompts(0, 2))
        ours = next(next(iter(new)).mini_batches())
        with pytest.raises((StaleIncarnationError, FailedPreconditionError)):
            shard.ack()
        with pytest.raises((StaleIncarnationError, FailedPreconditionError)):
            old.commit()
        ours.ack()


def test_a_process_that_only_reads_is_not_superseded(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client, acks=False) as reader, trainer_of(service, client) as trainer:
        assert reader.position == trainer.position == Position(0)
        assert reader.open_shard(Position(0))["loss_mask"].shape == trainer.open_shard(Position(0))["loss_mask"].shape


def test_a_trainer_that_forgot_where_it_resumes_is_refused_and_says_how(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 4))
    with trainer_of(service, client, auto_commit=False) as killed:
        for shard in next(iter(killed)).mini_batches():
            shard.ack()
    with trainer_of(service, client, auto_commit=False) as forgetful:
        with pytest.raises(
            FailedPreconditionError, match=r"committed what lies before batch 0 .* load_state_dict\({}\)"
        ):
            next(iter(forgetful))
        forgetful.load_state_dict({})
        assert next(iter(forgetful)).number == 0


def test_ranks_of_one_launch_resume_together_wherever_a_crash_left_them(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG | {"dp_size": 2})
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client, 0) as ahead:
        next(next(iter(ahead)).mini_batches()).ack()
    ranks = [trainer_of(service, client, rank) for rank in range(2)]
    before = client.status().models["policy"].incarnation
    with pytest.raises(FailedPreconditionError, match=r"rank 0: .* before batch 0 epoch 0 mini-batch 1, and committed"):
        _ = ranks[0].position
    assert ranks[1].position == Position(0, 0, 0)
    for trainer in ranks:
        trainer.load_state_dict({}, launch="job-7 restart-1")
    assert [trainer.position for trainer in ranks] == [Position(0, 0, 0)] * 2
    assert client.status().models["policy"].incarnation > before
    for trainer in ranks:
        trainer.close()


def test_several_ranks_without_a_common_launch_are_told_how_to_give_one(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG | {"dp_size": 2})
    with trainer_of(service, client) as trainer, pytest.raises(InvalidArgumentError, match="launch is not set"):
        trainer.load_state_dict({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "other"}, "state: run is 'other', but '.*' in this trainer"),
        ({"model": "critic"}, "state: model is 'critic'"),
        ({"version": 3}, "state: version is 3; expected one of 1, 2"),
        ({"run_id": None}, "state: run_id is None and generation"),
        ({"epoch": None}, "has no position"),
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
        ({"dp_size": 4}, "dp_size is 1, but 4 in this trainer"),
        ({"rank": 1}, r"rank is 1 and dp_size is 1; expected 0\.\.0"),
        ({"rank": -1}, "rank is -1"),
        ({"model": "critic"}, "has no critic; create it with critic_mini_batch_size"),
    ],
)
def test_a_trainer_that_does_not_fit_the_run_is_refused(
    service: Service, client: RolloutClient, more: dict[str, Any], message: str
) -> None:
    client.create_run(CONFIG)
    with trainer_of(service, client, **more) as trainer, pytest.raises(InvalidArgumentError, match=message):
        next(iter(trainer))


def test_an_unknown_run_and_model_are_refused(service: Service, client: RolloutClient) -> None:
    hasty = TrainerClient(service.grpc_address, client.run, 0, timeout_s=1)
    with hasty as trainer, pytest.raises(NotFoundError, match=client.run):
        next(iter(trainer))
    with pytest.raises(InvalidArgumentError, match="model is 'reward'; expected one of policy, critic"):
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
