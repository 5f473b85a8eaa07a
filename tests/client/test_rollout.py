"""Both rollout clients against a service that fails on request: nothing lost, nothing twice, every error raised."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    RolloutClient,
    RowOutcome,
    Trajectory,
    UnavailableError,
)
from gristmill.converters import from_skyrl
from tests.client.faces import FACES, Connect, connecting
from tests.client.faulty import Fault, FaultyService, refuse, serving, unavailable
from tests.run.harness import wait_until
from tests.strategies import Row


@pytest.fixture
def faulty() -> FaultyService:
    return FaultyService()


@pytest.fixture
def client(faulty: FaultyService, connect: Connect) -> Iterator[RolloutClient]:
    with serving(faulty) as address, connect(address, "run", timeout_s=20) as client:
        yield client


def row(uid: str, sample: int = 0, step: int = 0, **more: Any) -> Row:
    made = {"uid": uid, "sample": sample, "step": step, "is_last_step": True, "reward": 1.0, "loss_mask": [1, 1]}
    return made | {"prompt_token_ids": [1, 2], "response_ids": [3, 4], **more}


def step(client: RolloutClient, uid: str, sample: int = 0, **more: Any) -> tuple[Trajectory, bool]:
    trajectory = client.trajectory(uid, sample)
    return trajectory, trajectory.step([1, 2], [3, 4], is_last_step=True, reward=1.0, **more)


# Batching.


def test_many_small_steps_share_few_messages(faulty: FaultyService, client: RolloutClient) -> None:
    # However slowly steps are taken here, those behind the first find no message on its way that has room.
    faulty.gate.clear()
    for index in range(500):
        step(client, f"u{index}")
    faulty.gate.set()
    client.flush()
    assert len(faulty.rows) == 500
    assert len(faulty.calls) < 100


def test_a_row_arrives_without_a_flush(faulty: FaultyService, client: RolloutClient) -> None:
    step(client, "a")
    assert faulty.entered.wait(60)


def test_closing_sends_what_is_left(faulty: FaultyService, connect: Connect) -> None:
    with serving(faulty) as address, connect(address, "run") as client:
        step(client, "a")
    assert faulty.arrivals == [("a", 0, 0)]


def test_a_client_that_is_forgotten_sends_what_it_took(faulty: FaultyService) -> None:
    with serving(faulty) as address:
        client = RolloutClient(address, "run")
        step(client, "a")
        del client
        gc.collect()
    assert faulty.arrivals == [("a", 0, 0)]


def test_a_forgotten_client_logs_what_it_could_not_send(caplog: pytest.LogCaptureFixture) -> None:
    client = RolloutClient("127.0.0.1:1", "run", timeout_s=0.1)
    step(client, "a")
    del client
    gc.collect()
    assert "a RolloutClient was not closed: rows were not accepted: uid 'a' sample 0" in caplog.text


def test_an_answer_that_does_not_fit_the_rows_is_told(
    faulty: FaultyService, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty, "_keep", lambda rows: [])
    with pytest.raises(GristmillError, match="the service returned 0 outcomes for 1 rows"):
        client.submit([row("a")])


def test_what_the_caller_changes_after_a_step_changes_nothing_sent(
    faulty: FaultyService, client: RolloutClient
) -> None:
    faulty.gate.clear()
    prompt, response = np.array([1, 2], np.int32), [3, 4]
    client.trajectory("a", 0).step(prompt, response)
    prompt[:], response[:] = 9, [9, 9]
    faulty.gate.set()
    client.flush()
    (tokens,) = faulty.rows.values()
    assert np.frombuffer(tokens, np.int32).tolist() == [1, 2, 3, 4]


def test_too_much_under_way_blocks_the_producer(faulty: FaultyService, connect: Connect) -> None:
    faulty.gate.clear()
    with serving(faulty) as address, connect(address, "run", max_batch_rows=1) as client:
        done = threading.Event()

        def produce() -> None:
            for index in range(30):
                step(client, f"u{index}")
            done.set()

        producer = threading.Thread(target=produce)
        producer.start()
        assert faulty.entered.wait(60)
        assert not done.wait(0.2)
        faulty.gate.set()
        producer.join()
    assert len(faulty.rows) == 30


def test_many_threads_share_a_client(faulty: FaultyService, client: RolloutClient) -> None:
    def produce(sample: int) -> None:
        with client.trajectory("a", sample) as trajectory:
            for index in range(50):
                trajectory.step([1], [2], is_last_step=index == 49)

    threads = [threading.Thread(target=produce, args=(sample,)) for sample in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.flush()
    assert len(faulty.arrivals) == 400
    for sample in range(8):
        assert [step for _, arrived, step in faulty.arrivals if arrived == sample] == list(range(50))


def test_large_messages_of_a_generator_output_are_under_way_together(
    faulty: FaultyService, client: RolloutClient
) -> None:
    tokens = np.zeros(1 << 19, np.int32)
    output = {
        "prompt_token_ids": [tokens] * 6,
        "response_ids": [[1, 2]] * 6,
        "trajectory_ids": [(f"u{index}", 0) for index in range(6)],
        "rewards": [1.0] * 6,
    }
    faulty.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        submitted = threads.submit(client.submit, from_skyrl(output))
        deadline = time.monotonic() + 25
        while faulty.under_way < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        together = faulty.under_way
        faulty.gate.set()
        assert submitted.result() == [RowOutcome.ACCEPTED] * 6
    assert together == 3
    assert len(faulty.calls) > 3


def test_rows_that_are_added_while_a_large_message_is_under_way_do_not_wait_for_its_answer(
    faulty: FaultyService, client: RolloutClient
) -> None:
    def submit(uid: str) -> list[RowOutcome]:
        return client.submit([row(uid, prompt_token_ids=np.zeros(1 << 19, np.int32), response_ids=[1], loss_mask=[1])])

    faulty.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(submit, "first")
        wait_until(lambda: faulty.under_way == 1)
        # The worker has nothing else to send by now, and waits.
        time.sleep(0.2)
        second = threads.submit(submit, "second")
        try:
            wait_until(lambda: faulty.under_way == 2)
        finally:
            faulty.gate.set()
        assert [first.result(), second.result()] == [[RowOutcome.ACCEPTED]] * 2


def test_the_first_tables_are_sent_before_the_last_ones_are_made(
    faulty: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(faulty) as address, RolloutClient(address, "run", max_batch_bytes=1 << 20) as client:
        sender = client._core.sender
        add, added = sender._add, 0

        async def add_when_the_one_before_is_sent(*arguments: Any) -> bool:
            nonlocal added
            deadline = time.monotonic() + 60
            while len(faulty.calls) < added and time.monotonic() < deadline:
                time.sleep(0.001)
            assert len(faulty.calls) == added
            added += 1
            return await add(*arguments)

        monkeypatch.setattr(sender, "_add", add_when_the_one_before_is_sent)
        prompt = np.zeros(1 << 19, np.int32)
        client.submit(
            row(f"u{index}", prompt_token_ids=prompt, response_ids=[1, 2], loss_mask=[1, 1]) for index in range(6)
        )
        assert added == 6


# Faults.


def test_a_lost_reply_is_asked_for_again_and_the_row_is_kept_once(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.after.append(unavailable)
    assert client.submit([row("a"), row("b")]) == [RowOutcome.DUPLICATE] * 2
    assert faulty.arrivals == [("a", 0, 0), ("b", 0, 0)]


@pytest.mark.parametrize("face", FACES)
@settings(deadline=None, max_examples=20)
@given(
    before=st.lists(st.sampled_from([None, unavailable]), max_size=4),
    after=st.lists(st.sampled_from([None, unavailable]), max_size=4),
    batch_rows=st.integers(1, 7),
)
def test_retries_after_lost_replies_keep_each_row_exactly_once(
    face: str, before: list[Fault | None], after: list[Fault | None], batch_rows: int
) -> None:
    faulty = FaultyService()
    faulty.before.extend(before)
    faulty.after.extend(after)
    with (
        connecting(face) as connect,
        serving(faulty) as address,
        connect(address, "run", max_batch_rows=batch_rows) as client,
    ):
        for index in range(5):
            with client.trajectory("a", index) as trajectory:
                assert trajectory.step([1], [2], reward=0.0)
                assert trajectory.step([1, 2], [3], reward=1.0, is_last_step=True)
    assert sorted(faulty.arrivals) == [("a", sample, step) for sample in range(5) for step in range(2)]
    for sample in range(5):
        assert [step for _, own, step in faulty.arrivals if own == sample] == [0, 1], "in their trajectory's order"


def test_the_service_says_when_to_retry(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.before.append(refuse(ResourceExhaustedError("full"), "150"))
    client.submit([row("a")])
    assert len(faulty.calls) == 2


def test_a_negative_pushback_means_not_to_retry(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.before.append(refuse(UnavailableError("for good"), "-1"))
    with pytest.raises(UnavailableError, match="for good"):
        client.submit([row("a")])
    assert len(faulty.calls) == 1


def test_a_group_without_room_holds_up_nobody_else(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.full_uids.add("full")
    trajectory, _ = step(client, "full")
    assert faulty.entered.wait(60)
    for index in range(20):
        assert client.submit([row(f"u{index}")]) == [RowOutcome.ACCEPTED]
    assert not trajectory.is_dropped
    faulty.full_uids.clear()
    client.flush()
    assert len(faulty.rows) == 21


def test_rows_that_cannot_be_delivered_in_time_are_told_of_by_name(faulty: FaultyService, connect: Connect) -> None:
    with serving(faulty) as address:
        faulty.before.extend([unavailable] * 1000)
        client = connect(address, "run", timeout_s=0.3)
        step(client, "a", 3)
        with pytest.raises(UnavailableError, match=r"rows were not accepted: uid 'a' sample 3: .*restarting.*gave up"):
            client.flush()
        client.close()
    assert not faulty.rows


def test_an_error_is_told_once(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.refused_uids["a"] = AlreadyExistsError("uid 'a' sample 0 step 0: other content")
    step(client, "a")
    with pytest.raises(AlreadyExistsError):
        client.flush()
    client.flush()


def test_a_bad_trajectory_does_not_harm_those_that_share_its_message(
    faulty: FaultyService, client: RolloutClient
) -> None:
    faulty.refused_uids["u7"] = InvalidArgumentError("uid 'u7' sample 0: sample is out of range")
    for index in range(20):
        step(client, f"u{index}")
    with pytest.raises(
        InvalidArgumentError, match=r"^rows were not accepted: uid 'u7' sample 0: sample is out of range$"
    ):
        client.flush()
    assert len(faulty.rows) == 19


def test_the_next_step_raises_what_happened_to_the_one_before(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.refused_uids["a"] = InvalidArgumentError("no")
    trajectory = client.trajectory("a", 0)
    trajectory.step([1], [2])
    with pytest.raises(InvalidArgumentError):
        client.flush()
    with pytest.raises(InvalidArgumentError, match="no"):
        trajectory.step([1, 2, 3], [4])


def test_messages_smaller_than_the_service_takes_are_found(faulty: FaultyService, connect: Connect) -> None:
    with serving(faulty, max_message_bytes=20_000) as address, connect(address, "run") as client:
        outcomes = client.submit([row(f"u{index}", prompt_token_ids=[1] * 1000) for index in range(20)])
        assert outcomes == [RowOutcome.ACCEPTED] * 20
        with pytest.raises(InvalidArgumentError, match=r"were not accepted|larger than max"):
            client.submit([row("big", prompt_token_ids=[1] * 10_000)])


def test_sealing_without_a_number_is_not_repeated(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.before.append(unavailable)
    with pytest.raises(UnavailableError):
        client.seal()
    assert len(faulty.calls) == 1
    faulty.before.append(unavailable)
    assert client.seal(batch=0) == (0, 1)


def test_a_policy_version_that_does_not_come_is_a_deadline(client: RolloutClient) -> None:
    assert client.wait_policy_version(7, 10) == 7
    with pytest.raises(DeadlineExceededError, match=r"the policy version is 7 after 0\.01 s, not 8"):
        client.wait_policy_version(8, 0.01)


# Trajectories.


def test_a_dropped_trajectory_tells_its_worker_to_stop(faulty: FaultyService, client: RolloutClient) -> None:
    faulty.dropped_uids.add("a")
    with client.trajectory("a", 0) as trajectory:
        trajectory.step([1], [2])
        client.flush()
        assert trajectory.is_dropped
        assert trajectory.step([1, 2, 3], [4]) is False
    assert len(faulty.calls) == 1


def test_an_exception_aborts_the_trajectory_with_its_reason(faulty: FaultyService, client: RolloutClient) -> None:
    def roll_out() -> None:
        with client.trajectory("a", 0) as trajectory:
            trajectory.step([1], [2])
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        roll_out()
    assert faulty.dropped_uids == {"a"}
    assert faulty.reasons == "ZeroDivisionError: division by zero"


def test_a_block_that_forgets_the_last_step_is_an_error(faulty: FaultyService, client: RolloutClient) -> None:
    without = pytest.raises(FailedPreconditionError, match="the block ended without a last step")
    with without, client.trajectory("a", 0) as trajectory:
        trajectory.step([1], [2])
    assert faulty.dropped_uids == {"a"}


def test_giving_up_on_purpose_is_not(faulty: FaultyService, client: RolloutClient) -> None:
    with client.trajectory("a", 0) as trajectory:
        trajectory.abort("environment crashed")
    assert faulty.reasons == "environment crashed"


def test_steps_after_the_last_are_refused(client: RolloutClient) -> None:
    trajectory, _ = step(client, "a")
    with pytest.raises(FailedPreconditionError, match="uid 'a' sample 0: the trajectory ended with step 0"):
        trajectory.step([1], [2])


def test_a_trajectory_is_extended_by_what_is_new(faulty: FaultyService, client: RolloutClient) -> None:
    trajectory = client.trajectory("a", 0)
    trajectory.step([1, 2], [3])
    trajectory.extend([4, 5], [6], loss_mask=[1])
    trajectory.extend([], [7])
    trajectory.step([1, 2, 3, 4, 5, 6, 7, 8], [9], reward=1.0, is_last_step=True)
    client.flush()
    assert [np.frombuffer(tokens, np.int32).tolist() for tokens in faulty.rows.values()] == [
        [1, 2, 3],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ([-1], r"step 1: observation_ids\[0\] is -1"),
        (["a"], "step 1: observation_ids contains strings; pass token ids"),
    ],
)
def test_an_observation_is_refused_by_name(client: RolloutClient, observation: list[Any], message: str) -> None:
    trajectory = client.trajectory("a", 0)
    trajectory.step([1, 2], [3])
    with pytest.raises(InvalidArgumentError, match=message):
        trajectory.extend(observation, [4])
    trajectory.extend([5], [4], is_last_step=True)


def test_what_has_no_step_yet_cannot_be_extended(client: RolloutClient) -> None:
    with pytest.raises(FailedPreconditionError, match=r"its first step with step\(prompt_token_ids, response_ids\)"):
        client.trajectory("a", 0).extend([4], [5])


def test_a_refused_argument_does_not_use_up_a_step(faulty: FaultyService, client: RolloutClient) -> None:
    trajectory = client.trajectory("a", 0)
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0 step 0: response_ids is empty"):
        trajectory.step([1], [])
    trajectory.step([1], [2])
    client.flush()
    assert faulty.arrivals == [("a", 0, 0)]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_lists_arrays_and_tensors_say_the_same(
    faulty: FaultyService, client: RolloutClient, make: Callable[[object], Any]
) -> None:
    trajectory = client.trajectory("a", 0)
    trajectory.step(make([1, 2]), make([3]), loss_mask=make([1]), rollout_logprobs=make([-0.5]), reward=make([1])[0])
    client.flush()
    (tokens,) = faulty.rows.values()
    assert np.frombuffer(tokens, np.int32).tolist() == [1, 2, 3]


def test_a_tensor_that_numpy_cannot_read_is_refused_by_name(client: RolloutClient) -> None:
    logprobs = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=r"uid 'a' sample 0 step 0: rollout_logprobs cannot .*\.float\(\)"):
        client.trajectory("a", 0).step([1], [2], rollout_logprobs=logprobs)


def test_a_reward_of_the_wrong_form_names_the_setting(client: RolloutClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"reward is one per token, .*token_rewards=False"):
        client.trajectory("a", 0).step([1], [2], reward=[1.0])


# Misuse.


@pytest.mark.parametrize("limit", [{"max_batch_rows": 0}, {"max_batch_bytes": 0}, {"max_batch_bytes": 1 << 30}])
def test_limits_out_of_range_are_refused(limit: dict[str, Any], connect: Connect) -> None:
    (name,) = limit
    with pytest.raises(InvalidArgumentError, match=name):
        connect("127.0.0.1:1", "run", **limit)


def test_a_closed_client_says_so(client: RolloutClient) -> None:
    client.close()
    client.close()
    for call in (lambda: step(client, "a"), client.policy_version):
        with pytest.raises(FailedPreconditionError, match=r"this (Async)?RolloutClient is closed"):
            call()


def test_closing_raises_what_was_not_told(faulty: FaultyService, connect: Connect) -> None:
    with serving(faulty) as address:
        faulty.refused_uids["a"] = NotFoundError("no run 'run'")
        with pytest.raises(NotFoundError, match="no run 'run'"), connect(address, "run") as client:
            step(client, "a")


def test_an_exception_in_the_block_is_not_masked_by_closing(faulty: FaultyService, connect: Connect) -> None:
    def work(address: str) -> None:
        with connect(address, "run") as client:
            step(client, "a")
            _ = 1 / 0

    faulty.refused_uids["a"] = NotFoundError("no run 'run'")
    with serving(faulty) as address, pytest.raises(ZeroDivisionError) as caught:
        work(address)
    assert re.search("closing the (Async)?RolloutClient: rows were not accepted: uid 'a'", caught.value.__notes__[0])


# In an interpreter of its own: forking this one would disturb the gRPC servers and loops of other tests.
FORK = """
import os, sys
import gristmill

client = gristmill.RolloutClient("127.0.0.1:1", "run")
made_in = os.getpid()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
for use in (client.policy_version, client.flush, lambda: client.trajectory("a", 0).step([1], [2])):
    try:
        use()
    except gristmill.FailedPreconditionError as error:
        assert f"was created in process {made_in} and is used in its fork {os.getpid()}" in str(error)
        print("refused", flush=True)
client.close()
"""


def test_a_client_used_in_a_fork_says_so_instead_of_hanging() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 3), done.stderr


def test_a_stream_may_take_longer_than_a_call_as_long_as_messages_arrive(
    faulty: FaultyService, connect: Connect
) -> None:
    """All groups of a run, or all rows of a batch, over a slow link: 3 s at `timeout_s=1.5`."""
    with serving(faulty) as address, connect(address, "run", timeout_s=1.5) as client:
        assert [group.uid for group in client.groups()] == [str(page) for page in range(12)]
        faulty.gate.clear()
        began = time.monotonic()
        with pytest.raises(
            DeadlineExceededError, match=r"no message of the stream for 1\.5 s.*gave up after 1 attempts"
        ):
            client.groups()
        assert time.monotonic() - began < 20
        faulty.gate.set()
