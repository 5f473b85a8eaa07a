"""Every adapter's session: the run, the position in checkpoints, commits, policy versions and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill import BatchFailedError, FailedPreconditionError, InvalidArgumentError, RolloutClient
from gristmill.adapters._core import session
from gristmill.adapters._core.checkpoint import STATE_FILE, read_states
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.session import RunSession
from gristmill.adapters._core.settings import written_column
from tests.on_loop import Service

SETTINGS: dict[str, Any] = {
    "train_batch_size": 1,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 2},
    "layout": "packed",
}
Start = Callable[..., RunSession]


@pytest.fixture
def start(service: Service, run_name: str) -> Iterator[Start]:
    """Starts a trainer; closed with the test."""
    sessions: list[RunSession] = []

    def session(settings: dict[str, Any] | None = None, *, dp_size: int = 1, **options: Any) -> RunSession:
        asked = SETTINGS | (settings or {}) | {"dp_size": dp_size}
        gristmill = Gristmill(service.grpc_address, run_name)
        sessions.append(RunSession(gristmill, asked, dp_size=dp_size, **{"auto_commit": False} | options))
        return sessions[-1]

    yield session
    for opened in sessions:
        opened.close()


@pytest.fixture
def rollouts(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name) as client:
        yield client


def submit(rollouts: RolloutClient, *uids: str, samples: int = 2) -> None:
    row = {"prompt_token_ids": [1, 2], "response_ids": [3], "loss_mask": [1]}
    for uid in uids:
        rollouts.submit({**row, "uid": uid, "sample": sample, "reward": float(sample)} for sample in range(samples))


def train(session: RunSession) -> int:
    """Train one batch; return its number."""
    batches = session.next_batch()
    assert batches is not None
    for batch in batches.values():
        batch.ack()
    number: int = batches["policy"].number
    return number


def test_an_existing_run_is_found_and_cut_for_the_ranks_of_the_trainer(start: Start, rollouts: RolloutClient) -> None:
    start(dp_size=2).resume(None)
    session = start(dp_size=4)
    assert session.config["dp_size"] == 2
    session.resume(None)
    assert session.config["dp_size"] == 4
    submit(rollouts, "a")
    assert train(session) == 0


def test_a_run_with_other_settings_is_refused(start: Start) -> None:
    start()
    with pytest.raises(Exception, match="train_batch_size"):
        start({"train_batch_size": 2})


def test_a_checkpoint_has_the_position_and_its_commit_frees_what_is_before(
    start: Start, rollouts: RolloutClient, tmp_path: Path
) -> None:
    first = start()
    first.resume(None)
    submit(rollouts, "a", "b", "c")
    assert train(first) == 0
    states = first.save(tmp_path)
    assert rollouts.status().batches_freed == 0
    first.commit(states)
    assert rollouts.status().batches_freed == 1
    assert train(first) == 1
    again = start()
    again.resume(read_states(tmp_path))
    assert train(again) == 1


def test_a_checkpoint_whose_commit_was_lost_is_committed_when_it_is_resumed(
    start: Start, rollouts: RolloutClient, tmp_path: Path
) -> None:
    first = start()
    first.resume(None)
    submit(rollouts, "a")
    train(first)
    first.save(tmp_path)
    start().resume(read_states(tmp_path))
    assert rollouts.status().batches_freed == 1


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"policy": 3}'])
def test_a_checkpoint_without_a_whole_state_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(InvalidArgumentError, match=f"{STATE_FILE}: cannot read the position in the run: .*; resume"):
        read_states(tmp_path)


def test_a_training_that_starts_from_the_beginning_may_need_a_new_run(start: Start, rollouts: RolloutClient) -> None:
    first = start(auto_commit=True)
    first.resume(None, only_new_run=True)
    submit(rollouts, "a", "b")
    train(first)
    with pytest.raises(FailedPreconditionError, match=r"was trained up to batch 1 .* use another run"):
        start().resume(None, only_new_run=True)
    again = start()
    again.resume(None)
    assert train(again) == 1


def test_versions_never_go_back(start: Start, rollouts: RolloutClient) -> None:
    session = start()
    session.resume(None)
    for version, announced in ((3, 3), (1, 3), (3, 3), (4, 4)):
        session.announce(version)
        assert rollouts.policy_version() == announced
    with pytest.raises(FailedPreconditionError, match="announce a higher version"):
        session.policy.announce_policy_version(2)


def test_groups_that_are_in_no_batch_are_given_up(start: Start, rollouts: RolloutClient) -> None:
    session = start({"train_batch_size": 2})
    session.resume(None)
    submit(rollouts, "a", "b", "complete")
    submit(rollouts, "open", samples=1)
    session.give_up_unsealed()
    reasons = {group.uid: group.reason for group in rollouts.groups() if group.state == "dropped"}
    assert reasons == {"complete": "trainer_restarted", "open": "trainer_restarted"}


def test_columns_are_written_back_by_the_trainer_s_names(start: Start, rollouts: RolloutClient) -> None:
    more = {"advantage_estimator": "gae", "critic_mini_batch_size": 1, "columns": [written_column("values")]}
    session = start(more)
    session.resume(None)
    submit(rollouts, "a")
    batches = session.next_batch()
    assert batches is not None
    assert sorted(batches) == ["critic", "policy"]
    batch = batches["policy"]
    assert batch.awaits == {"values"}
    computed = (
        (shard, {"vf": [torch.ones(micro["response_mask"].shape) for micro in shard.micro_batches()]})
        for mini_batch in batch.forward()
        for shard in mini_batch.shards.values()
    )
    session.write_back(batch.awaits, {"values": "vf"}, computed)
    (mini_batch,) = batch.mini_batches()
    assert (mini_batch.shards[0].jagged("values", "response").values == 1).all()


def test_figures_of_a_batch_are_metrics(start: Start, rollouts: RolloutClient) -> None:
    session = start()
    session.resume(None)
    submit(rollouts, "a")
    train(session)
    assert session.metrics()["gristmill/score_mean"] == 0.5


def test_batches_end_with_the_run(start: Start, rollouts: RolloutClient) -> None:
    session = start()
    session.resume(None)
    submit(rollouts, "a")
    rollouts.finish()
    assert train(session) == 0
    assert session.next_batch() is None


def test_training_continues_after_a_batch_that_failed(start: Start, rollouts: RolloutClient) -> None:
    session = start({"micro_batch": {"max_tokens": 100}, "on_misaligned": "error"}, dp_size=2)
    session.resume(None)
    # One row makes no micro-batch for each of two ranks.
    submit(rollouts, "one row", samples=1)
    rollouts.abort_trajectory("one row", 1)
    submit(rollouts, "two rows")
    with pytest.raises(BatchFailedError):
        session.next_batch()
    assert train(session) == 1


def test_a_run_that_others_create_is_only_found(start: Start, service: Service, run_name: str) -> None:
    start()
    gristmill = Gristmill(service.grpc_address, run_name)
    with RunSession(gristmill, None, dp_size=1, auto_commit=True) as session:
        session.resume(None)
        assert session.position.batch == 0


def test_a_client_that_cannot_be_made_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = RolloutClient.close

    def noted(client: RolloutClient) -> None:
        closed.append(client.run)
        close(client)

    def refuse(*_: Any, **__: Any) -> None:
        raise InvalidArgumentError("no such device")

    monkeypatch.setattr(RolloutClient, "close", noted)
    monkeypatch.setattr(session, "TrainerClient", refuse)
    with pytest.raises(InvalidArgumentError, match="no such device"):
        RunSession(Gristmill("127.0.0.1:1", "run"), None, dp_size=1, auto_commit=False)
    assert closed == ["run"]
