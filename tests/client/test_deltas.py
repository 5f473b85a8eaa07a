"""Turns cross the wire without what the service has: it makes the same rows of them, whatever happens on the way."""

from __future__ import annotations

import itertools
import zlib

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill import InvalidArgumentError, RolloutClient, RowOutcome
from gristmill._client.connection.failures import failure_of
from gristmill._client.rollout.delivery import Delivery
from gristmill._client.rollout.outbox import Limits, Outbox
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.codecs.row_codec import encode as encode_message
from gristmill._wire.codecs.submit_codec import Submission
from gristmill._wire.rows import from_rows, to_rows
from gristmill.v1 import rollout_pb2
from gristmill_service.run import run as run_module
from gristmill_service.run.rows.declared_prefixes import steps_before
from tests.client.faces import Connect
from tests.on_loop import Service
from tests.rows import make_config, make_row
from tests.serving import StartService
from tests.strategies import Row, rollouts

CONFIG = make_config(micro_batch={"size": 4})
_names = itertools.count()


def conversation(turns: int, uid: str = "a", broken_at: int | None = None) -> list[Row]:
    """Rows of a trajectory whose prompts extend what was before; one may differ in the midst of it."""
    rng = np.random.default_rng(turns)
    prompt, rows = rng.integers(0, 9, 100).tolist(), []
    for step in range(turns):
        response = rng.integers(0, 9, 40).tolist()
        rows.append(
            make_row(
                uid=uid,
                step=step,
                last=step == turns - 1,
                prompt=prompt,
                response=response,
                loss_mask=[1] * 40,
                reward=float(step == turns - 1),
            )
        )
        prompt = prompt + response + rng.integers(0, 9, 20).tolist()
        if step == broken_at:
            prompt[70] += 1
    return rows


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """Requests that the client sent, as the service read them."""
    requests: list[Sent] = []
    read = Submission.rows

    def rows(self: Submission) -> Sent:
        requests.append(read(self))
        return requests[-1]

    monkeypatch.setattr(Submission, "rows", rows)
    return requests


def kept(service: Service, run: str) -> list[Row]:
    """Batch 0's rows, as the service would lay them out again."""
    [*tables] = service.runs.get(run).export(0)
    return [row for table in tables for row in to_rows(table)]


def whole(rows: list[Row]) -> list[Row]:
    return list(to_rows(from_rows(rows)))


def tokens_sent(sent: list[Sent]) -> list[int]:
    return [int(request.steps.tokens.total) for request in sent]


def test_a_trajectory_crosses_the_wire_once(
    service: Service, run_name: str, connect: Connect, sent: list[Sent]
) -> None:
    rows = conversation(6)
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        for row in rows:
            client.submit([row])
        client.seal(0)
    assert tokens_sent(sent) == [140, *[20 + 40] * 5]
    assert kept(service, run_name) == whole(rows)


def test_also_compressed(service: Service, run_name: str, connect: Connect, sent: list[Sent]) -> None:
    rows = conversation(6)
    with connect(service.grpc_address, run_name, compression="zstd") as client:
        client.create_run(CONFIG)
        for row in rows:
            client.submit([row])
        client.seal(0)
    assert tokens_sent(sent) == [140, *[20 + 40] * 5]
    assert kept(service, run_name) == whole(rows)
    with pytest.raises(InvalidArgumentError, match="compression is 'gzip'; expected None or 'zstd'"):
        connect(service.grpc_address, run_name, compression="gzip")


def test_also_within_one_message(service: Service, run_name: str, connect: Connect, sent: list[Sent]) -> None:
    rows = conversation(6)
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        client.submit(rows)
        client.seal(0)
    assert tokens_sent(sent) == [140 + 5 * 60]
    assert kept(service, run_name) == whole(rows)


def test_a_broken_prefix_sends_from_the_first_token_that_differs(
    service: Service, run_name: str, connect: Connect, sent: list[Sent]
) -> None:
    rows = conversation(3, broken_at=1)
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        for row in rows:
            client.submit([row])
        client.seal(0)
    assert tokens_sent(sent) == [140, 60, 260 - 70]
    assert kept(service, run_name) == whole(rows)


def test_a_service_that_has_not_got_the_step_before_is_sent_the_row_whole(
    service: Service, run_name: str, connect: Connect, sent: list[Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, find = conversation(4), steps_before
    # As after a failover, when a new owner has rows that it did not take itself.
    forgets = iter([False, True])
    monkeypatch.setattr(run_module, "steps_before", lambda *given: {} if next(forgets, False) else find(*given))
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        outcomes = [client.submit([row]) for row in rows]
        client.seal(0)
    assert outcomes == [[RowOutcome.ACCEPTED]] * 4
    assert tokens_sent(sent) == [140, 60, 60, 260, 60], "refused once, sent whole, and shortened again"
    assert kept(service, run_name) == whole(rows)


def test_rows_of_another_attempt_are_not_what_a_turn_extends(
    service: Service, run_name: str, connect: Connect, sent: list[Sent]
) -> None:
    rows = conversation(3)
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        client.submit(rows[:1])
        for row in rows:
            client.submit([row | {"attempt": 1}])
        client.seal(0)
    assert tokens_sent(sent) == [140, 140, 60, 60]
    assert kept(service, run_name) == whole([row | {"attempt": 1} for row in rows])


def test_a_turn_that_is_repeated_is_a_duplicate_however_it_comes(
    service: Service, run_name: str, connect: Connect, sent: list[Sent]
) -> None:
    rows = conversation(2)
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"n_samples_per_prompt": 2})
        client.submit(rows[:1])
        assert client.submit(rows[1:]) == [RowOutcome.ACCEPTED]
        assert client.submit(rows[1:]) == [RowOutcome.DUPLICATE], "sent whole: it was the last"
        assert client.submit(rows) == [RowOutcome.DUPLICATE] * 2, "the second without the first's tokens"
    assert tokens_sent(sent) == [140, 60, 200, 140 + 60]


@pytest.mark.parametrize(
    ("length", "checksum", "message"),
    [(100, 1, "does not begin with the 100 omitted tokens"), (150, 0, "does not begin with the 150 omitted tokens")],
)
def test_a_prefix_that_the_step_before_has_not_is_refused_by_name(
    service: Service, run_name: str, length: int, checksum: int, message: str
) -> None:
    rows = conversation(2)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        client.submit(rows[:1])
        request = rollout_pb2.SubmitRowsRequest(run=run_name, rows=encode_message(from_rows(rows[1:])))
        request.rows.tokens = request.rows.tokens[4 * length :]
        request.rows.prefix_lengths.append(length)
        request.rows.prefix_checksums.append(checksum)
        with pytest.raises(grpc.RpcError) as refused:
            client._transport.submit_rows(request.SerializeToString(), timeout=60)
        failure = failure_of(refused.value, "the service")
        assert type(failure.error).__name__ == "PrefixUnknownError"
        assert not failure.may_retry
        assert f"uid 'a' sample 0 step 1: the previous step {message}" in str(failure.error)
        assert client.submit(rows[1:]) == [RowOutcome.ACCEPTED], "nothing of it was kept"


def test_what_a_few_bytes_ask_for_is_no_more_than_a_request_may_be(start_service: StartService, run_name: str) -> None:
    address = start_service("--max-message-bytes", "1MB").grpc_address
    [row] = conversation(1)
    long = row | {"prompt_token_ids": [1] * 100_000, "is_last_step": False}
    prefix = np.ones(100_000, np.int32).tobytes()
    with RolloutClient(address, run_name) as client:
        client.create_run(CONFIG)
        client.submit([long])
        table = from_rows([long | {"step": step, "is_last_step": step == 3} for step in (1, 2, 3)])
        message = encode_message(table)
        message.tokens = b"".join(array[100_000:].tobytes() for array in table.tokens.arrays())
        message.prefix_lengths.extend([100_000] * 3)
        message.prefix_checksums.extend([zlib.crc32(prefix)] * 3)
        request = rollout_pb2.SubmitRowsRequest(run=run_name, rows=message).SerializeToString()
        assert len(request) < 5_000
        with pytest.raises(grpc.RpcError, match="max_message_bytes is 1000000"):
            client._transport.submit_rows(request, timeout=60)


def test_a_client_remembers_no_more_than_it_is_told_to() -> None:
    encoder, outbox = RequestEncoder("run", False, most_bytes=2_000), Outbox(Limits(1, 1 << 20, 0.0), 10.0)

    def shortened(row: Row) -> bool:
        outbox.add(from_rows([row]), Delivery(), 0.0)
        entries = outbox.next_message(0.0)
        outbox.on_outcomes(entries, [RowOutcome.ACCEPTED], 0.0)
        encoder.encode(entries)
        return any(entry.prefix.length for entry in entries if entry.prefix)

    trajectories = [conversation(2, uid) for uid in "abcde"]
    # 560 bytes each.
    assert [shortened(first) for first, _ in trajectories] == [False] * 5
    assert [shortened(second) for _, second in trajectories] == [False, False, True, True, True]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=rollouts(most_prompts=2, samples=2), data=st.data())
def test_the_service_makes_the_rows_that_were_given(
    service: Service, monkeypatch: pytest.MonkeyPatch, batch: list[Row], data: st.DataObject
) -> None:
    """Rows as short as these are shortened as well, in requests of any number of steps, some of which are forgotten."""
    monkeypatch.setattr("gristmill._client.rollout.prefix_dedup._LEAST_TOKENS", 1)
    run = f"deltas-{next(_names)}"
    prompts = len({row["uid"] for row in batch})
    find = steps_before
    forgets = iter(data.draw(st.lists(st.booleans(), max_size=4)))
    monkeypatch.setattr(run_module, "steps_before", lambda *given: {} if next(forgets, False) else find(*given))
    with RolloutClient(service.grpc_address, run) as client:
        client.create_run(CONFIG | {"train_batch_size": prompts, "n_samples_per_prompt": 2})
        rest = list(batch)
        while rest:
            count = data.draw(st.integers(1, 4))
            client.submit(rest[:count])
            rest = rest[count:]
        samples = {(row["uid"], row["sample"]) for row in batch}
        for uid in {row["uid"] for row in batch}:
            for sample in range(2):
                if (uid, sample) not in samples:
                    client.abort_trajectory(uid, sample)
        client.seal(0)
    expected = {(row["uid"], row["sample"], row["step"]): row for row in whole(batch)}
    stored = {(row["uid"], row["sample"], row["step"]): row for row in kept(service, run)}
    assert stored == expected
