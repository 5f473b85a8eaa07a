"""A client of several ranks, for trainers with a controller: every rank's shards, acknowledged together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gristmill import (
    FailedPreconditionError,
    InvalidArgumentError,
    RolloutClient,
    StaleIncarnationError,
    TrainerClient,
)
from gristmill._wire.addresses import Position
from gristmill.torch import MiniBatch
from tests.on_loop import Service
from tests.rows import make_config

Controller = TrainerClient[MiniBatch]

CONFIG = make_config(train_batch_size=2, n_samples_per_prompt=4, update_epochs_per_batch=2, dp_size=2, step_wise=False)
MINI_BATCHES = [Position(0, epoch, mini_batch) for epoch in range(2) for mini_batch in range(2)]


@pytest.fixture
def client(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        yield client


@pytest.fixture
def trainer(service: Service, client: RolloutClient) -> Iterator[Controller]:
    with TrainerClient(service.grpc_address, client.run, ranks="all", timeout_s=20) as trainer:
        yield trainer


def roll_out(client: RolloutClient, uids: Sequence[str], **config: Any) -> None:
    client.create_run(CONFIG | config)
    for uid in uids:
        for sample in range(4):
            with client.trajectory(uid, sample) as trajectory:
                trajectory.step([1, 2], [3 + sample, 4], reward=float(sample), is_last_step=True)


def acknowledge_rank(service: Service, run: str, rank: int, count: int) -> None:
    """As a controller does that dies between its ranks."""
    with TrainerClient(service.grpc_address, run, rank, timeout_s=20) as one:
        for _, shard in zip(range(count), next(iter(one)).mini_batches(), strict=False):
            shard.ack()


def places(client: RolloutClient) -> list[Position]:
    return list(client.status().models["policy"].next)


def test_a_batch_gives_the_shards_of_every_rank_in_training_order(
    service: Service, client: RolloutClient, trainer: Controller
) -> None:
    roll_out(client, "ab")
    batch = next(iter(trainer))
    seen = []
    for mini_batch in batch.mini_batches():
        seen.append(mini_batch.position)
        assert [shard.metadata["rank"] for shard in mini_batch.shards.values()] == [0, 1]
        assert {shard.position for shard in mini_batch.shards.values()} == {mini_batch.position}
        mini_batch.ack()
        mini_batch.ack()
        assert len(set(places(client))) == 1, "ranks move together"
    assert seen == MINI_BATCHES
    assert places(client) == [Position(1), Position(1)]


def test_they_are_the_shards_that_each_rank_gets_by_itself(service: Service, client: RolloutClient) -> None:
    roll_out(client, "ab")
    with TrainerClient(service.grpc_address, client.run, ranks="all", dp_size=2) as trainer:
        whole = list(next(iter(trainer)).epoch())
    for rank in range(2):
        with TrainerClient(service.grpc_address, client.run, rank) as one:
            for mini_batch, shard in zip(whole, next(iter(one)).forward(), strict=True):
                assert mini_batch.shards[rank]["sequences"].equal(shard["sequences"])
                assert mini_batch.shards[rank].metadata == shard.metadata


def test_a_trainer_that_goes_through_epochs_itself_acknowledges_the_batch(
    client: RolloutClient, trainer: Controller
) -> None:
    roll_out(client, "abcd")
    client.finish()
    trained = []
    for batch in trainer:
        shards = list(batch.epoch())
        assert [len(mini_batch.shards) for mini_batch in shards] == [2, 2]
        trained += [
            uid for mini_batch in shards for shard in mini_batch.shards.values() for uid in shard.metadata["uids"]
        ]
        batch.ack()
        batch.ack()
    assert sorted(trained) == sorted("abcd" * 4)
    assert client.status().batches_freed == 2


def test_one_rank_may_acknowledge_its_whole_batch_too(service: Service, client: RolloutClient) -> None:
    roll_out(client, "ab", dp_size=1)
    with TrainerClient(service.grpc_address, client.run, 0) as one:
        batch = next(iter(one))
        assert [shard.position.mini_batch for shard in batch.epoch()] == [0, 1]
        batch.ack()
        assert one.position == Position(1)


def test_a_batch_that_was_begun_is_acknowledged_to_its_end(client: RolloutClient, trainer: Controller) -> None:
    roll_out(client, "ab")
    batch = next(iter(trainer))
    next(iter(batch.mini_batches())).ack()
    batch.ack()
    assert places(client) == [Position(1), Position(1)]


def test_shards_of_an_epoch_are_acknowledged_by_their_batch_alone(client: RolloutClient, trainer: Controller) -> None:
    roll_out(client, "ab")
    mini_batch = next(iter(next(iter(trainer)).epoch()))
    for acknowledge in (mini_batch.ack, mini_batch.shards[1].ack):
        with pytest.raises(FailedPreconditionError, match="not read in training order"):
            acknowledge()


# Coming back.


def test_a_checkpoint_puts_every_rank_back(service: Service, client: RolloutClient) -> None:
    roll_out(client, "abcd")
    client.finish()
    with TrainerClient(service.grpc_address, client.run, ranks="all", auto_commit=False) as trainer:
        batches = iter(trainer)
        next(batches).ack()
        state = trainer.state_dict()
        trainer.commit()
        next(iter(next(batches).mini_batches())).ack()
    with TrainerClient(service.grpc_address, client.run, ranks="all", auto_commit=False) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert places(client) == [Position(1), Position(1)]
        for batch in again:
            assert batch.number == 1
            batch.ack()
        again.commit()
    assert client.status().batches_freed == 2
    with TrainerClient(service.grpc_address, client.run, ranks="all") as former:
        former.load_state_dict({})
        with TrainerClient(service.grpc_address, client.run, ranks="all") as later:
            later.load_state_dict({})
        with pytest.raises(StaleIncarnationError):
            former.commit()


def test_ranks_that_a_crash_left_apart_go_on_from_the_first_that_is_not_acknowledged(
    service: Service, client: RolloutClient, trainer: Controller
) -> None:
    roll_out(client, "ab")
    acknowledge_rank(service, client.run, rank=0, count=3)
    acknowledge_rank(service, client.run, rank=1, count=1)
    assert trainer.position == Position(0, 0, 1)
    for mini_batch in next(iter(trainer)).mini_batches():
        mini_batch.ack()
    assert places(client) == [Position(1), Position(1)]


def test_a_controller_comes_back_with_other_ranks(service: Service, client: RolloutClient) -> None:
    roll_out(client, "ab")
    with TrainerClient(service.grpc_address, client.run, ranks="all", dp_size=4) as trainer:
        with pytest.raises(InvalidArgumentError, match="dp_size is 2, but 4 in this trainer"):
            next(iter(trainer))
        trainer.load_state_dict({})
        batch = next(iter(trainer))
        assert [len(mini_batch.shards) for mini_batch in batch.epoch()] == [4, 4]
        batch.ack()


def test_what_was_sampled_before_is_had_again(client: RolloutClient, trainer: Controller) -> None:
    roll_out(client, "ab")
    rows = trainer.rows(next(iter(trainer)).number)
    assert [(row["uid"], row["sample"]) for row in rows] == [(uid, sample) for uid in "ab" for sample in range(4)]
    assert rows[1]["response_ids"] == [4, 4]
    assert rows[1]["reward"] == 1.0
    with pytest.raises(FailedPreconditionError, match="batch 1 is not sealed yet"):
        trainer.rows(1)
    client.submit([row | {"uid": f"again-{row['uid']}"} for row in rows])
    assert {group.uid for group in client.groups()} == {"a", "b", "again-a", "again-b"}


# Columns that the controller writes.


def test_the_controller_writes_columns_for_every_rank(client: RolloutClient, trainer: Controller) -> None:
    values = {"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}
    roll_out(client, "ab", columns=[values], advantage_estimator="gae", update_epochs_per_batch=1)
    batch = next(iter(trainer))
    assert batch.awaits == {"values"}
    for mini_batch in batch.forward():
        for shard in mini_batch.shards.values():
            assert shard.is_forward
            trainer.write(shard, {"values": shard["response_mask"] * 0.5})
    for mini_batch in batch.epoch():
        assert all(shard["returns"].shape == shard["response_mask"].shape for shard in mini_batch.shards.values())
    batch.ack()
    assert places(client) == [Position(1), Position(1)]


def test_a_mini_batch_is_opened_ahead_for_all_ranks(service: Service, client: RolloutClient) -> None:
    roll_out(client, "ab")
    with TrainerClient(service.grpc_address, client.run, ranks="all", prefetch=2) as trainer:
        for mini_batch in next(iter(trainer)).mini_batches():
            assert len(mini_batch.shards) == 2
            mini_batch.ack()
        assert trainer.position == Position(1)


def test_a_client_of_some_ranks_acknowledges_those_alone(service: Service, client: RolloutClient) -> None:
    roll_out(client, "ab", dp_size=4)
    with TrainerClient(service.grpc_address, client.run, ranks=range(2, 4)) as upper:
        mini_batch = next(next(iter(upper)).mini_batches())
        assert [shard.metadata["rank"] for shard in mini_batch.shards.values()] == [*mini_batch.shards] == [2, 3]
        mini_batch.ack()
    assert places(client) == [Position(0), Position(0), Position(0, 0, 1), Position(0, 0, 1)]


def test_iterating_a_batch_gives_its_mini_batches(client: RolloutClient, trainer: Controller) -> None:
    roll_out(client, "ab")
    seen = []
    for mini_batch in next(iter(trainer)):
        seen.append(mini_batch.position)
        mini_batch.ack()
    assert seen == MINI_BATCHES


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({}, "rank is None and ranks is None; set rank=N"),
        ({"rank": 0, "ranks": "all"}, "rank is 0 and ranks is all; set rank=N"),
        ({"ranks": "some"}, "ranks is 'some'; set a range, or 'all'"),
        ({"ranks": range(0, 4, 2)}, "set a range with step 1 that is not empty"),
        ({"ranks": range(0)}, "set a range with step 1 that is not empty"),
    ],
)
def test_a_client_is_told_its_ranks_in_one_way(service: Service, which: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        TrainerClient(service.grpc_address, "run", **which)


def test_ranks_that_the_run_does_not_have_are_refused(service: Service, client: RolloutClient) -> None:
    roll_out(client, "ab")
    with (
        TrainerClient(service.grpc_address, client.run, ranks=range(1, 3)) as trainer,
        pytest.raises(InvalidArgumentError, match=r"ranks is range\(1, 3\); expected ranks below dp_size=2"),
    ):
        _ = trainer.position
