"""What rollout workers send, and the answers: rewards, refusals, supersession, groups and capacity for them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gristmill import (
    AlreadyExistsError,
    FailedPreconditionError,
    GroupState,
    InvalidArgumentError,
    ResourceExhaustedError,
    RolloutClient,
    RowOutcome,
    TrainerClient,
    UnavailableError,
)
from gristmill._client.rollout import policy_versions, requests, rollout_core, sender
from gristmill._wire.column_spec import specs_of
from gristmill.v1 import rollout_pb2
from tests.client.faces import FACES, Connect, connecting
from tests.client.whole_way import CONFIG, ROW, prompts, roll_out
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.strategies import Row


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


def test_keys_of_steps_reach_the_micro_batches(client: RolloutClient, trainer: TrainerClient) -> None:
    settings = {"advantage_estimator": "gigpo", "trajectory_score": "sum", "grpo_norm_by_std": False}
    client.create_run(CONFIG | settings | {"loss_reduction": "none"})
    for uid in client.begin_groups(prompts(0, 2)):
        for sample in range(2):
            with client.trajectory(uid, sample, agent="solver", episode=uid) as trajectory:
                trajectory.step([1], [2], step_key="hall")
                trajectory.step([9], [3], reward=float(sample), is_last_step=True)
    shard = next(next(iter(trainer)).mini_batches())
    keys = [key for micro in shard.micro_batches() for key in micro.metadata["step_keys"]]
    assert keys == [["hall"], [""]] * (len(keys) // 2)
    micros = list(shard.micro_batches())
    assert {agent for micro in micros for agent in micro.metadata["agents"]} == {"solver"}
    assert [micro.metadata["episodes"] for micro in micros] == [micro.metadata["uids"] for micro in micros]
    assert sorted({float(one) for one in shard["advantages"].reshape(-1)} - {0.0}) == [-1.0, -0.5, 0.5, 1.0]


def test_components_of_rewards_come_with_the_last_step_and_reach_the_micro_batches(
    client: RolloutClient, trainer: TrainerClient
) -> None:
    client.create_run(CONFIG | {"advantage_estimator": "gdpo", "component_weights": {"correct": 1.0, "format": 0.5}})
    for uid in client.begin_groups(prompts(0, 2), tag="math"):
        for sample in range(2):
            with client.trajectory(uid, sample) as trajectory:
                trajectory.step([1], [2])
                components: dict[str, Any] = {"correct": sample, "format": np.float32(1 - sample)}
                trajectory.step([9], [3], reward=0.5, is_last_step=True, reward_components=components)
    shard = next(next(iter(trainer)).mini_batches())
    last = [micro.metadata for micro in shard.micro_batches()][-1]
    assert last["reward_components"][-1] == {"correct": 1.0, "format": 0.0}
    assert len(last["reward_components"]) == len(last["tags"]) == len(last["uids"])
    assert (shard["advantages"] != 0).all()


def test_warnings_about_settings_are_logged_for_callers_that_ignore_what_create_run_returns(
    service: Service, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        (warning,) = client.create_run(CONFIG | {"gamma": 0.9})
    assert warning.startswith("gamma: 0.9 has no effect")
    assert f"run {run_name!r}: {warning}" in caplog.messages


def test_a_step_of_a_group_that_the_client_did_not_begin_warns_once(
    service: Service, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        RolloutClient(service.grpc_address, run_name) as driver,
        RolloutClient(service.grpc_address, run_name) as worker,
    ):
        driver.create_run(CONFIG)
        assert driver.begin_groups(["p0", "p1"]) == ["p0", "p1"]
        for client, uid in ((worker, "p0"), (driver, "p1"), (driver, "P0"), (driver, "P1")):
            with client.trajectory(uid, 0) as trajectory:
                trajectory.step([1], [2], reward=1.0, is_last_step=True)
    (warning,) = [text for text in caplog.messages if f"run {run_name!r}" in text]
    assert "did not begin uid 'P0' of round 0" in warning


@pytest.mark.parametrize("reward", [float("nan"), [], [[1.0]], [float("inf")]])
def test_a_reward_that_is_none_is_refused(client: RolloutClient, reward: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0: reward is"):
        client.set_reward("a", 0, reward)


def test_the_status_has_every_setting_with_the_defaults_that_the_service_fills_in(client: RolloutClient) -> None:
    columns = [{"name": "teacher", "dtype": "bfloat16", "scope": "response", "fill": -1.0}]
    client.create_run(CONFIG | {"columns": columns})
    config = client.status().config
    assert {name: config[name] for name in CONFIG if name != "micro_batch"} | {"micro_batch": {"size": 1}} == CONFIG
    assert config["micro_batch"]["size"] == 1
    assert (config["dp_size"], config["lambda"], config["max_buffered_batches"]) == (1, 1.0, 4)
    assert specs_of(config["columns"]) == specs_of(columns)


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
    with pytest.raises(AlreadyExistsError, match="uid 'p0' sample 0 step 0: different content"):
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
    assert not second.is_dropped
    assert first.is_dropped
    assert first.step([1, 2, 3], [4]) is False


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("attempt", [{}, {"attempt": 1}])
def test_a_rollout_that_raised_and_is_sampled_again_is_trained(
    service: Service, run_name: str, trainer: TrainerClient, face: str, attempt: dict[str, int]
) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1})
        failing = client.trajectory("p0", 0)
        failing.step([1], [2])
        failing.abort("the engine raised")
        client.trajectory("p0", 0, **attempt).step([1], [7], reward=1.0, is_last_step=True)
        client.trajectory("p0", 1).step([1], [8], reward=0.0, is_last_step=True)
        client.flush()
    assert next(iter(trainer)).plan["rows"] == 2


def test_an_aborted_sample_that_another_process_begins_again_without_a_higher_attempt_is_an_error(
    client: RolloutClient, service: Service, run_name: str
) -> None:
    client.create_run(CONFIG)
    client.begin_groups(["p0"])
    failing = client.trajectory("p0", 0)
    failing.step([1], [2])
    failing.abort("the engine raised")
    with RolloutClient(service.grpc_address, run_name) as other:
        again = other.trajectory("p0", 0)
        again.step([1], [7])
        for report in (other.flush, lambda: again.step([1, 7], [8])):
            with pytest.raises(AlreadyExistsError, match=r"sample 0 step 0: attempt 0 was aborted .*a higher attempt"):
                report()
        other.trajectory("p0", 0, attempt=1).step([1], [7], reward=1.0, is_last_step=True)
        other.trajectory("p0", 1).step([1], [8], reward=0.0, is_last_step=True)
        other.flush()
    assert client.status().groups_complete == 1


def test_a_client_remembers_the_trajectories_that_it_aborted_last(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left 160 bytes for as long as the client lived."""
    monkeypatch.setattr(rollout_core, "_ABORTS", 3)
    client.create_run(CONFIG)
    for uid in ("p0", "p1", "p2", "p3", "p4", "p2"):
        client.begin_groups([uid])
        client.abort_trajectory(uid, 0)
    remembered = [(key.uid, attempt) for key, attempt in client._core._next_attempts.items()]
    assert remembered == [("p3", 1), ("p4", 1), ("p2", 2)]
    client.trajectory("p0", 0).step([1], [2], reward=1.0)
    with pytest.raises(AlreadyExistsError, match=r"attempt 0 was aborted .*a higher attempt"):
        client.flush()


def test_an_attempt_that_comes_too_late_is_refused_where_it_steps(client: RolloutClient) -> None:
    client.create_run(CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1})
    for _ in range(2):
        failing = client.trajectory("p0", 0)
        failing.step([1], [2])
        failing.abort("the engine raised")
    client.trajectory("p0", 1).step([1], [2], reward=0.0, is_last_step=True)
    client.flush()
    for again in (client.trajectory("p0", 0), client.trajectory("p0", 0, attempt=0)):
        with pytest.raises(FailedPreconditionError, match=r"sample 0: attempt \d is too late.*sealed"):
            again.step([1], [2], reward=0.0, is_last_step=True)


@pytest.mark.parametrize("is_delivered", [False, True])
def test_an_abort_of_an_attempt_leaves_a_higher_one_untouched(client: RolloutClient, is_delivered: bool) -> None:
    client.create_run(CONFIG)
    client.trajectory("p0", 0, attempt=1).step([1], [7], reward=1.0, is_last_step=True)
    if is_delivered:
        client.flush()
    with pytest.raises(InvalidArgumentError, match=r"attempt '0'; pass a string, and an integer or None"):
        client.abort_trajectory("p0", 0, attempt="0")  # type: ignore[arg-type]
    assert client.abort_trajectory("p0", 0, reason="lost", attempt=0) is False
    client.trajectory("p0", 1).step([1], [8], reward=0.0, is_last_step=True)
    client.flush()
    assert client.status().groups_complete == 1


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


@pytest.mark.parametrize("steps", [0, 1])
def test_a_group_that_nobody_began_does_not_wait_for_a_sample_that_raised_before_a_row_arrived(
    client: RolloutClient, trainer: TrainerClient, steps: int
) -> None:
    client.create_run(CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1})

    def roll_out() -> None:
        with client.trajectory("p0", 0) as trajectory:
            for _ in range(steps):
                trajectory.step([1], [2])
            raise ConnectionError

    with pytest.raises(ConnectionError):
        roll_out()
    client.trajectory("p0", 1).step([1], [8], reward=0.0, is_last_step=True)
    client.flush()
    assert client.status().batches_sealed == 1
    assert next(iter(trainer)).plan["rows"] == 1


@pytest.mark.parametrize("scores", [[1.0, 0.0], []])
def test_a_row_that_says_that_its_sample_was_aborted_ends_it_and_the_group_goes_on(
    client: RolloutClient, scores: list[float]
) -> None:
    client.create_run(CONFIG | {"n_samples_per_prompt": 3, "train_batch_size": 1, "policy_mini_batch_size": 1})
    rows: list[dict[str, Any]] = [
        {"uid": "p0", "sample": sample, "aborted": "failed"} for sample in range(2, len(scores) - 1, -1)
    ]
    rows += [{**ROW, "uid": "p0", "sample": sample, "reward": score} for sample, score in enumerate(scores)]
    outcomes = [outcome.name for outcome in client.submit(rows)]
    assert outcomes == ["DROPPED"] * (3 - len(scores)) + ["ACCEPTED"] * len(scores)
    (group,) = client.groups()
    assert group.state.name == ("SEALED" if scores else "DROPPED")
    assert client.submit(rows[:1]) == [RowOutcome.DROPPED]


def test_groups_are_answered_by_name_however_many(client: RolloutClient, trainer: TrainerClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, ["p0", "p1"])
    for shard in next(iter(trainer)).mini_batches():
        shard.ack()
    client.begin_groups(["p2"])
    assert [group.uid for group in client.groups()] == ["p2"]
    assert client.status().groups_archived == 2
    uids = prompts(0, 10_000)
    groups = client.groups(iter(uids))
    assert [group.uid for group in groups] == uids
    assert [(group.state.name, group.batch, group.is_consumed) for group in groups[:4]] == [
        ("SEALED", 0, True),
        ("SEALED", 0, True),
        ("OPEN", None, False),
        ("UNKNOWN", None, False),
    ]
    assert client.groups([]) == []
    assert {group.state for group in client.groups(uids[:3], round=1)} == {GroupState.UNKNOWN}
    with pytest.raises(InvalidArgumentError, match="uids is the string 'p0'; pass a list of strings"):
        client.groups("p0")
    with pytest.raises(InvalidArgumentError, match=r"uids is \[7\] and round is 0: .*; pass a list of strings"):
        client.groups([7])  # type: ignore[list-item]


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
        with pytest.raises(InvalidArgumentError, match=r"uid 'a': n_samples 9 is outside of 1\.\.3"):
            client.begin_groups(["a"], n_samples=9)
        with pytest.raises(InvalidArgumentError, match=r"uid 'a': n_samples is 'many'; set the number"):
            client.begin_groups(["a"], n_samples="many")
        assert client.begin_groups(["a", "b"], n_samples={"a": 3}) == ["a", "b"]
        late = client.trajectory("a", 0, policy_version=3)
        with pytest.raises(InvalidArgumentError, match="policy_versions has 1 values, but response_ids has 2"):
            late.step([1], [2, 3], policy_versions=[4])
        late.step([1], [2], policy_versions=[4])
        for uid, samples in (("a", (3, 1, 2)), ("b", (0, 1))):
            for sample in samples:
                client.trajectory(uid, sample).step([1], [2], reward=float(sample), is_last_step=True)
                client.flush()
        late.step([1, 2], [3], reward=1.0, is_last_step=True)
        client.flush()
        assert late.is_dropped
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:
        trained = [shard.tensors["sample"].tolist() for shard in next(iter(trainer)).mini_batches()]
    assert trained == [[1, 2, 3], [0, 1]]


@pytest.mark.parametrize("face", FACES)
def test_a_batch_has_its_share_of_each_task(service: Service, run_name: str, face: str) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG | {"tag_shares": {"math": {"min": 0.5}}, "tag_timeout_s": 60})
        with pytest.raises(InvalidArgumentError, match="uid 'a': tag is 7; set a string that names the environment or"):
            client.begin_groups(["a"], tag=7)
        assert client.begin_groups(["a", "b", "c"], tag={"a": "code", "b": "code"}) == ["a", "b", "c"]
        for uid in "ab":
            client.submit({**ROW, "uid": uid, "sample": sample} for sample in range(2))
        assert client.status().batches_sealed == 0
        client.submit({**ROW, "uid": "c", "sample": sample, "tag": "math"} for sample in range(2))
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:
        assert next(iter(trainer)).plan["tags"] == ["code", "math"]


def test_a_long_wait_for_room_tells_why(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.create_run(CONFIG | {"max_buffered_batches": 1})
    roll_out(client, prompts(0, 2))
    assert client.begin_groups(["late"], wait_s=0.05) == []
    assert not [text for text in caplog.messages if repr(client.run) in text]
    monkeypatch.setattr(requests, "ROOM_NOTICE_S", 0.0)
    assert client.begin_groups(["late"], wait_s=0.05) == []
    assert f"run {client.run!r}: no capacity for groups for 0 s: max_buffered_batches: 1 batches" in caplog.text


def test_waiting_for_room_is_told_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter((0.0, 0.1, 20.0, 40.0, 50.0, 60.0, 80.0, 100.0))
    # Of this module alone: services of this process have threads that ask for the time.
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: next(times)))
    wait = requests.RoomWait("run")
    full = rollout_pb2.BeginGroupsResponse(admissions=[rollout_pb2.GROUP_ADMISSION_NO_ROOM], reason="it is full")
    assert not any(wait.is_over(full) for _ in range(7))
    assert [text.split("for groups for ")[1] for text in caplog.messages if "for groups for " in text] == [
        "40 s: it is full",
        "80 s: it is full",
    ]
    assert wait.is_over(rollout_pb2.BeginGroupsResponse(admissions=[rollout_pb2.GROUP_ADMISSION_ADMITTED]))


def test_rows_of_a_group_without_room_wait_until_there_is_and_a_long_wait_is_logged(
    service: Service,
    client: RolloutClient,
    trainer: TrainerClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.create_run(CONFIG | {"max_buffered_batches": 1})
    roll_out(client, prompts(0, 2))
    late = client.trajectory("late", 0)
    late.step([1], [2], reward=0.0, is_last_step=True)
    for shard in next(iter(trainer)).mini_batches():
        shard.ack()
    client.flush()
    assert not late.is_dropped
    client.begin_groups(["p3"])
    monkeypatch.setattr(sender, "SILENT_S", 0.5)
    with (
        RolloutClient(service.grpc_address, client.run, timeout_s=2.5) as hasty,
        pytest.raises(ResourceExhaustedError, match=r"uid 'p4' .*no capacity for .*gave up after 2\.5 s"),
    ):
        hasty.submit([{"uid": "p4", "sample": 0, "prompt_token_ids": [1], "response_ids": [1], "loss_mask": [1]}])
    (warning,) = [text for text in caplog.messages if "rows have waited for" in text]
    assert "no capacity for" in warning


def test_an_http_port_that_is_given_for_grpc_is_refused_at_once(service: Service) -> None:
    began, address = time.monotonic(), service.http_url.removeprefix("http://")
    with (
        RolloutClient(address, "run", timeout_s=60) as client,
        pytest.raises(InvalidArgumentError, match=f"{address}: the port answers HTTP, not gRPC"),
    ):
        client.status()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("uids", ["p0", ["p0", ""]])
def test_uids_that_are_none_are_refused(client: RolloutClient, uids: str | list[str]) -> None:
    client.create_run(CONFIG)
    with pytest.raises(InvalidArgumentError, match="uid"):
        client.begin_groups(uids)


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


def test_a_trajectory_without_a_version_has_the_one_that_was_announced_when_it_began(
    service: Service, run_name: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run({**CONFIG, "n_samples_per_prompt": 8, "train_batch_size": 1, "policy_mini_batch_size": 1})
        with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:

            def sampled(sample: int, *, announced: int | None = None, **version: Any) -> None:
                trajectory = client.trajectory("p", sample, **version)
                if announced is not None:
                    awaited: Any = trajectory._awaited if isinstance(client, RolloutClient) else trajectory.awaited
                    wait_until(lambda: awaited._writer._policy_version._question.version is not None)
                    trainer.announce_policy_version(announced)
                trajectory.step([1], [2], reward=1.0, is_last_step=True)

            sampled(0)
            trainer.announce_policy_version(3)
            assert client.begin_groups(["p"]) == ["p"]
            sampled(1)
            sampled(2, policy_version=-1)
            trainer.announce_policy_version(4)
            sampled(3)
            monkeypatch.setattr(policy_versions, "_FRESH_S", -1.0)
            sampled(4)
            sampled(5, policy_version=2)
            # Tokens may take long to sample.
            sampled(6, announced=9)
            sampled(7)
            shard = next(next(iter(trainer)).mini_batches())
    versions = dict(zip(shard["sample"].tolist(), shard["policy_version"].tolist(), strict=True))
    assert versions == {0: 0, 1: 3, 2: -1, 3: 3, 4: 4, 5: 2, 6: 4, 7: 9}


def test_a_trajectory_that_begins_while_the_service_is_unreachable_has_the_version_that_was_known(
    service: Service, run_name: str
) -> None:
    client = RolloutClient("127.0.0.1:1", run_name, timeout_s=0.2)
    first, known = client.trajectory("p", 0), client.trajectory("p", 1)
    client._core._versions.learned(6)
    client._core._versions._as_of = 0.0
    later = client.trajectory("p", 2)
    for trajectory, version in ((first, 0), (known, 0), (later, 6)):
        trajectory.step([1], [2])
        assert trajectory._awaited._writer._policy_version == version
    with pytest.raises(UnavailableError):
        client.close()


@pytest.mark.parametrize("stale", ["count", "drop", "mask"])
def test_a_run_that_keeps_stale_tokens_out_refuses_trained_tokens_of_an_unknown_version(
    client: RolloutClient, stale: str
) -> None:
    client.create_run({**CONFIG, "max_staleness": 1, "stale": stale, "n_samples_per_prompt": 8})
    row: Row = {**ROW, "response_ids": [2, 3], "is_last_step": True, "uid": "p"}
    masked, trained = {**row, "loss_mask": [0, 1]}, {**row, "loss_mask": [1, 1]}
    assert client.submit([{**row, "sample": 0, "loss_mask": [0, 0]}])[0].is_stored
    assert client.submit([{**masked, "sample": 1, "policy_versions": [-1, 2]}])[0].is_stored
    unknowns: list[Row] = [{}, {"policy_version": -1}, {"policy_versions": [-1, 2]}]
    for sample, unknown in enumerate(unknowns, 2):
        known = {**trained, "sample": 7, "policy_version": 0}
        if stale == "count":
            assert client.submit([{**trained, "sample": sample, **unknown}])[0].is_stored
            continue
        with pytest.raises(InvalidArgumentError, match=rf"uid 'p' sample {sample}.* policy version -1.*stale: {stale}"):
            client.submit([known, {**trained, "sample": sample, **unknown}])
    assert client.submit([{**trained, "sample": 7, "policy_version": 0}])[0].is_stored


def test_a_run_of_other_settings_is_refused_and_of_wrong_ones_named(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    client.create_run(CONFIG)
    with pytest.raises(AlreadyExistsError, match=client.run):
        client.create_run(CONFIG | {"merge": "none"})
    with pytest.raises(InvalidArgumentError, match="train_batch_sise"):
        client.create_run(CONFIG | {"train_batch_sise": 3})
    with pytest.raises(InvalidArgumentError, match="config is not JSON"):
        client.create_run(CONFIG | {"columns": object()})


def test_more_groups_than_a_request_may_begin_are_begun_by_several(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_GROUPS", 3)
    client.create_run(CONFIG | {"max_samples_per_prompt": 3, "max_buffered_batches": 4})
    uids, sizes = prompts(0, 20), {f"p{one}": 3 for one in range(4)}
    assert client.begin_groups(uids[:7], n_samples=sizes, tag="math") == uids[:7]
    for uid in uids[:5]:
        client.abort_group(uid)
    # Those of the first requests are finished, and there is room for six of the others.
    assert client.begin_groups(uids, tag="math") == uids[5:13]
    assert client.status().tags["math"].open == 8
