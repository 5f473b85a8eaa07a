"""Each rollout of slime's gets one batch, and goes on where slime's checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill import FailedPreconditionError, RolloutClient
from gristmill.adapters.slime._feed import LEDGER, Feed
from tests.adapters.slime.samples import PARALLEL, DataSource, arguments, generate
from tests.client.converters.stand_ins import Sample
from tests.on_loop import Service

Start = Callable[..., Feed]


@pytest.fixture
def args(service: Service, run_name: str, tmp_path: Path) -> Any:
    """slime's, with checkpoints."""
    options = {"address": service.grpc_address, "run": run_name}
    return arguments(sample_type=Sample, gristmill=options, save=str(tmp_path), save_interval=2)


@pytest.fixture
def start(args: Any) -> Iterator[Start]:
    """Starts slime again; closed with the test."""
    started: list[Feed] = []

    def begin(first: int = 0, **parallel: int) -> Feed:
        started.append(Feed(args, PARALLEL | parallel, first))
        return started[-1]

    yield begin
    for feed in started:
        feed.close()


def roll_out(feed: Feed, args: Any, rollout_id: int, source: DataSource) -> list[dict[str, Any]]:
    """What slime's loop does before it trains a rollout."""
    feed.begin(rollout_id)
    if feed.has_batch:
        source.get_samples(args.rollout_batch_size)
    else:
        feed.submit(generate(args, rollout_id, source), rollout_id)
    return feed.next(rollout_id)


def tokens(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """The rows of a batch, in its order."""
    rows: dict[int, list[int]] = {}
    for rank in ranks:
        rows |= dict(zip(rank["partition"], [row.tolist() for row in rank["tokens"]], strict=True))
    return [rows[place] for place in sorted(rows)]


def given(args: Any, rollout_id: int) -> list[list[int]]:
    """The rows that slime samples for a rollout, if it begins from nothing."""
    source = DataSource(args)
    for _ in range(rollout_id):
        source.get_samples(args.rollout_batch_size)
    return [sample.tokens for group in generate(args, rollout_id, source) for sample in group]


def test_a_rollout_s_samples_are_its_batch(start: Start, args: Any) -> None:
    feed, source = start(), DataSource(args)
    for rollout_id in range(3):
        assert sorted(tokens(roll_out(feed, args, rollout_id, source))) == sorted(given(args, rollout_id))


def test_workers_learn_the_version_that_they_sample_from(start: Start, args: Any, service: Service) -> None:
    feed, source = start(), DataSource(args)
    with RolloutClient(service.grpc_address, args.gristmill["run"]) as workers:
        for rollout_id in range(2):
            roll_out(feed, args, rollout_id, source)
            assert workers.policy_version() == rollout_id


def test_slime_goes_back_to_its_checkpoint_and_trains_the_same_batches_again(start: Start, args: Any) -> None:
    first, source = start(), DataSource(args)
    trained = [tokens(roll_out(first, args, rollout_id, source)) for rollout_id in range(2)]
    first.saved(1)
    lost = [tokens(roll_out(first, args, rollout_id, source)) for rollout_id in (2, 3)]
    # It dies; its data source goes back to what it was at the checkpoint.
    again = start(2)
    source = DataSource(args)
    source.get_samples(8)
    assert [tokens(roll_out(again, args, rollout_id, source)) for rollout_id in (2, 3)] == lost
    later = tokens(roll_out(again, args, 4, source))
    assert later not in trained + lost


def test_what_a_checkpoint_has_is_freed_and_no_more(start: Start, args: Any, service: Service) -> None:
    feed, source = start(), DataSource(args)
    status = service.runs.get(args.gristmill["run"]).status
    for rollout_id in range(3):
        roll_out(feed, args, rollout_id, source)
    assert status().batches_freed == 0
    feed.saved(1)
    assert status().batches_freed == 2


def test_a_checkpoint_that_is_written_in_the_background_is_complete_when_the_next_is_saved(
    start: Start, args: Any, service: Service
) -> None:
    args.async_save = True
    feed, source = start(), DataSource(args)
    status = service.runs.get(args.gristmill["run"]).status
    for rollout_id in range(8):
        roll_out(feed, args, rollout_id, source)
        if rollout_id % 2:
            feed.saved(rollout_id)
            # The last one is waited for.
            assert status().batches_freed == (8 if rollout_id == 7 else rollout_id - 1)


def test_a_start_that_died_before_its_commit_is_caught_up_with(start: Start, args: Any) -> None:
    first, source = start(), DataSource(args)
    for rollout_id in range(2):
        roll_out(first, args, rollout_id, source)
    # The checkpoint is there, and the manager was not notified of it.
    again = start(2)
    assert sorted(tokens(roll_out(again, args, 2, source))) == sorted(given(args, 2))


def test_samples_that_are_in_no_batch_are_dropped_and_sampled_again(start: Start, args: Any, service: Service) -> None:
    first, source = start(), DataSource(args)
    first.begin(0)
    first.submit(generate(args, 0, source)[:3], 0)
    again = start()
    assert sorted(tokens(roll_out(again, args, 0, DataSource(args)))) == sorted(given(args, 0))
    with RolloutClient(service.grpc_address, args.gristmill["run"]) as client:
        assert [group.reason for group in client.groups() if group.state == "dropped"] == ["trainer_restarted"] * 3


def test_a_checkpoint_before_what_is_committed_is_refused_naming_the_remedy(
    start: Start, args: Any, tmp_path: Path
) -> None:
    feed, source = start(), DataSource(args)
    for rollout_id in range(2):
        roll_out(feed, args, rollout_id, source)
    feed.saved(1)
    with pytest.raises(FailedPreconditionError, match="committed up to rollout 1, but slime resumes after rollout 0"):
        start(1)
    (tmp_path / LEDGER).unlink()
    assert tokens(roll_out(start(1), args, 1, source))


def test_without_checkpoints_a_batch_is_committed_when_the_next_is_asked_for(
    start: Start, args: Any, service: Service, tmp_path: Path
) -> None:
    args.save_interval = None
    feed, source = start(), DataSource(args)
    for rollout_id in range(3):
        roll_out(feed, args, rollout_id, source)
    status = service.runs.get(args.gristmill["run"]).status
    assert status().batches_freed == 2
    feed.finish()
    assert status().batches_freed == 3
    assert not (tmp_path / LEDGER).exists()
    # slime begins from nothing, with the same numbers of groups.
    assert sorted(tokens(roll_out(start(), args, 0, DataSource(args)))) == sorted(given(args, 0))


def test_slime_comes_back_with_other_ranks(start: Start, args: Any) -> None:
    first, source = start(), DataSource(args)
    trained = roll_out(first, args, 0, source)
    again = start(dp_size=4)
    ranks = roll_out(again, args, 0, DataSource(args))
    assert len(ranks) == 4
    assert tokens(ranks)[:8] == tokens(trained)


def test_samples_of_workers_come_by_another_way(start: Start, args: Any, service: Service) -> None:
    args.gristmill["rollouts"] = "workers"
    feed = start()
    feed.begin(0)
    with RolloutClient(service.grpc_address, args.gristmill["run"]) as workers:
        for uid in "abcd":
            for sample in range(2):
                with workers.trajectory(uid, sample, policy_version=0) as trajectory:
                    trajectory.step([1, 2], [3 + sample], reward=float(sample), is_last_step=True)
        ranks = feed.next(0)
        workers.finish()
    assert len(tokens(ranks)) == 8
    assert "rollout_log_probs" not in ranks[0]
    feed.begin(1)
    with pytest.raises(FailedPreconditionError, match="is finished after 1 rollouts; set --num-rollout 1"):
        feed.next(1)


def test_padding_rows_in_a_mean_over_tokens_are_warned_of(
    start: Start, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    args.calculate_per_token_loss = True
    args.rollout_batch_size = args.n_samples_per_prompt = args.global_batch_size = 1
    roll_out(start(), args, 0, DataSource(args))
    assert "batch 0 has 1 padding rows; slime includes one token of each" in caplog.text
