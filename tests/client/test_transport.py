"""Statuses become errors again, retries pause as they should, and a broken stream is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from gristmill import errors
from gristmill._client.connection import retries
from gristmill._client.connection.failures import Failure, failure_of
from gristmill._client.connection.retries import Backoff, Retry, WaitBudget
from gristmill._client.connection.transport import Transport
from gristmill._client.trainer.shards.pull import stream
from gristmill._wire.addresses import ShardAddress
from gristmill._wire.codecs.zstd_frames import compressed
from gristmill.errors import (
    BatchFailedError,
    DeadlineExceededError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill.v1 import trainer_pb2, trainer_pb2_grpc
from tests.client.test_shards import CONFIG, ROWS, shard_bytes


class Status(grpc.RpcError):  # type: ignore[misc]
    """A call's end, as gRPC gives it."""

    def __init__(self, code: str, details: str = "", **trailers: Any) -> None:
        self._end = (getattr(grpc.StatusCode, code), details, tuple(trailers.items()))

    def code(self) -> grpc.StatusCode:
        return self._end[0]

    def details(self) -> str:
        return self._end[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((name.replace("_", "-"), value) for name, value in self._end[2])


ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GristmillError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_of_the_service_is_raised_again_as_itself(kind: type[GristmillError]) -> None:
    failure = failure_of(Status(kind.code, "what and why", gristmill_error=kind.__name__), "here:1")
    assert type(failure.error) is kind
    assert str(failure.error) == "what and why"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", "InvalidArgumentError"),
        ("NOT_FOUND", "NotFoundError"),
        ("ALREADY_EXISTS", "AlreadyExistsError"),
        ("FAILED_PRECONDITION", "FailedPreconditionError"),
        ("RESOURCE_EXHAUSTED", "ResourceExhaustedError"),
        ("DEADLINE_EXCEEDED", "DeadlineExceededError"),
        ("UNAVAILABLE", "UnavailableError"),
        ("CANCELLED", "UnavailableError"),
        ("INTERNAL", "GristmillError"),
        ("UNIMPLEMENTED", "GristmillError"),
        ("UNKNOWN", "GristmillError"),
    ],
)
def test_what_others_answer_is_told_apart_by_its_code(code: str, kind: str) -> None:
    error = failure_of(Status(code, "odd"), "here:1").error
    assert type(error).__name__ == kind


def test_an_unknown_class_of_a_newer_service_falls_back_to_the_code() -> None:
    assert type(failure_of(Status("NOT_FOUND", gristmill_error="ShelfNotFoundError"), "here:1").error) is NotFoundError


def test_a_failed_batch_says_which() -> None:
    error = failure_of(
        Status("FAILED_PRECONDITION", "why", gristmill_error="BatchFailedError", gristmill_batch="7"), "here:1"
    ).error
    assert isinstance(error, BatchFailedError)
    assert error.batch == 7


@pytest.mark.parametrize(
    ("status", "may_retry"),
    [
        (Status("UNAVAILABLE"), True),
        (Status("DEADLINE_EXCEEDED"), True),
        (Status("CANCELLED"), True),
        (Status("RESOURCE_EXHAUSTED", gristmill_error="ResourceExhaustedError", grpc_retry_pushback_ms="500"), True),
        (Status("UNAVAILABLE", grpc_retry_pushback_ms="-1"), False),
        (Status("UNAVAILABLE", grpc_retry_pushback_ms="soon"), False),
        (Status("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)"), False),
        (Status("INVALID_ARGUMENT"), False),
        (Status("INTERNAL"), False),
    ],
)
def test_only_what_passes_is_retried(status: Status, may_retry: bool) -> None:
    assert failure_of(status, "here:1").may_retry is may_retry


def test_the_services_delay_is_told() -> None:
    failure = failure_of(
        Status("RESOURCE_EXHAUSTED", gristmill_error="ResourceExhaustedError", grpc_retry_pushback_ms="1500"), "here:1"
    )
    assert failure.pushback_s == 1.5
    assert isinstance(failure.error, ResourceExhaustedError)
    assert failure.error.retry_after_s == 1.5


@given(st.integers(1, 40), st.one_of(st.none(), st.floats(0, 100)))
def test_pauses_grow_with_full_jitter_after_what_the_service_asks(attempts: int, pushback_s: float | None) -> None:
    backoff = Backoff()
    pauses = [backoff.pause_s(pushback_s) - (pushback_s or 0.0) for _ in range(attempts)]
    assert all(-1e-9 <= pause <= min(5.0, 0.05 * 2**attempt) + 1e-9 for attempt, pause in enumerate(pauses))


def test_a_call_ends_with_the_error_of_its_last_attempt() -> None:
    retry = Retry(0.0)
    with pytest.raises(
        UnavailableError, match=r"away \(gave up after 1 attempts in 0\.0 s; raise timeout_s to retry for longer\)"
    ):
        retry.pause_s(Failure(UnavailableError("away"), True))
    with pytest.raises(NotFoundError, match=r"^gone$"):
        retry.pause_s(Failure(NotFoundError("gone")))


def test_a_call_that_is_tried_for_long_says_once_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0])
    # Of this module alone: services of this process have threads that ask for the time.
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: next(times)))
    retry = Retry(60.0)
    for _ in range(3):
        retry.pause_s(failure_of(Status("UNAVAILABLE", "away"), "here:1"))
    [message] = [text for text in caplog.messages if "here:1" in text]
    assert message.startswith("here:1: the service cannot be reached (away)")
    assert message.endswith("; retrying for 54 s more")


@given(
    st.floats(0.5, 200),
    st.lists(st.tuples(st.floats(0, 20), st.one_of(st.none(), st.floats(0, 300))), min_size=1),
    st.integers(1, 3),
)
def test_a_call_is_retried_until_its_time_is_over_and_the_last_attempt_is_at_its_end(
    timeout_s: float, attempts: list[tuple[float, float | None]], replicas: int
) -> None:
    """attempts: how long each took, and the pause that the service asked for; the last ones repeat."""
    clock, number = 1000.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: clock))
        retry = Retry(timeout_s, replicas)
        with suppress(UnavailableError):
            while True:
                took_s, pushback_s = attempts[min(number, len(attempts) - 1)]
                clock, number = clock + min(took_s, retry.attempt_s()), number + 1
                clock += retry.pause_s(Failure(UnavailableError("away"), True, pushback_s, is_of_replica=True))
    assert timeout_s - 1e-6 <= clock - 1000.0 <= timeout_s + 0.2 + 1e-6


def test_time_in_which_the_service_may_wait_is_not_time_of_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    away = Failure(UnavailableError("away"), True)
    waiting = Retry(10.0, wait_s=20.0)
    waiting.attempt_s()
    clock[0] = 15.0
    assert waiting.pause_s(away) < 1.0, "the service was there for 15 s, and is restarted"
    waiting.attempt_s()
    clock[0] = 24.0
    assert waiting.pause_s(away) <= 1.0
    waiting.attempt_s()
    clock[0] = 25.0
    with pytest.raises(UnavailableError, match="gave up after 3 attempts"):
        waiting.pause_s(away)
    streaming = Retry(10.0)
    clock[0] = 125.0
    streaming.pause_s(Failure(UnavailableError("away"), True, progress_s=99.0))
    clock[0] = 134.0
    with pytest.raises(UnavailableError):
        streaming.pause_s(away)


def test_an_attempt_that_is_cut_short_does_not_hide_why_the_others_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    retry = Retry(1.0)
    clock[0] = 0.5
    retry.pause_s(Failure(ResourceExhaustedError("it is full"), True))
    clock[0] = 1.2
    with pytest.raises(ResourceExhaustedError, match="it is full"):
        retry.pause_s(Failure(DeadlineExceededError("late"), True))


def test_what_grpc_raised_is_not_shown_beside_the_error() -> None:
    def asked() -> None:
        try:
            raise Status("NOT_FOUND", "no run")
        except grpc.RpcError as call:
            Retry(1.0).pause_s(failure_of(call, "here:1"))

    with pytest.raises(NotFoundError) as raised:
        asked()
    assert raised.value.__suppress_context__


def test_a_wait_is_made_of_parts_and_not_asked_without_pause() -> None:
    budget = WaitBudget(1000.0)
    assert budget.next_wait_s() == 20.0
    assert budget.pause_s() > 0.1
    assert not budget.is_over()
    assert WaitBudget(0.0).is_over()


class Streams(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers ReadShard with the next of these pieces; an exception among them breaks the stream there."""

    def __init__(self, *answers: Iterable[bytes | grpc.StatusCode], are_zstd: bool) -> None:
        self.answers, self.are_zstd = list(answers), are_zstd

    def ReadShard(
        self, request: trainer_pb2.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[trainer_pb2.ReadShardResponse]:
        for piece in self.answers.pop(0):
            if not isinstance(piece, bytes):
                context.abort(piece, "broken")
            assert request.accepts_zstd or not self.are_zstd
            yield trainer_pb2.ReadShardResponse(data=piece, is_zstd=self.are_zstd)


Read = Callable[..., tuple[dict[str, torch.Tensor], dict[str, Any]]]


@pytest.fixture
def read() -> Iterator[Read]:
    """Reads a shard from a service that answers so."""
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    transport = Transport(f"127.0.0.1:{port}", 20.0, "TrainerClient")

    def read(
        size: int, *answers: Iterable[bytes | grpc.StatusCode], are_zstd: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Streams(*answers, are_zstd=are_zstd), server)  # type: ignore[no-untyped-call]
        server.start()
        return stream(transport, ShardAddress("run", "policy", 0, 0, 0), size)

    yield read
    transport.close()
    server.stop(None).wait()


def test_a_stream_that_breaks_is_made_again_from_its_start(read: Read) -> None:
    (data,) = shard_bytes(ROWS, CONFIG)
    tensors, metadata = read(
        len(data), [data[:100], grpc.StatusCode.UNAVAILABLE], [grpc.StatusCode.UNAVAILABLE], [data[:7], data[7:]]
    )
    assert len(tensors["sequences"]) == len(metadata["uids"]) == 6


def test_a_stream_that_ends_early_is_an_error(read: Read) -> None:
    (data,) = shard_bytes(ROWS, CONFIG)
    with pytest.raises(UnavailableError, match=rf"received 100 bytes instead of {len(data)}"):
        read(len(data), [data[:100]])


def in_frames(data: bytes) -> list[bytes]:
    return [compressed(data[at : at + 1000]) for at in range(0, len(data), 1000)]


def test_a_shard_that_comes_compressed_is_the_file(read: Read) -> None:
    (data,) = shard_bytes(ROWS, CONFIG)
    frames = in_frames(data)
    tensors, metadata = read(len(data), [frames[0], grpc.StatusCode.UNAVAILABLE], frames, are_zstd=True)
    assert len(metadata["uids"]) == 6
    for name, tensor in load(data).items():
        assert np.array_equal(tensors[name].numpy(), tensor)


def test_a_compressed_shard_that_ends_early_is_an_error(read: Read) -> None:
    (data,) = shard_bytes(ROWS, CONFIG)
    with pytest.raises(UnavailableError, match=rf"received 1000 bytes instead of {len(data)}"):
        read(len(data), in_frames(data)[:1], are_zstd=True)


@pytest.mark.parametrize("bomb", [compressed(bytes(1 << 26)), compressed(b"x")[:-1]], ids=["too much", "cut"])
def test_a_frame_that_does_not_fit_has_the_shard_asked_for_as_it_is(bomb: bytes) -> None:
    (data,) = shard_bytes(ROWS, CONFIG)

    class Damaged(trainer_pb2_grpc.TrainerServiceServicer):
        def ReadShard(
            self, request: trainer_pb2.ReadShardRequest, context: grpc.ServicerContext
        ) -> Iterator[trainer_pb2.ReadShardResponse]:
            yield trainer_pb2.ReadShardResponse(
                data=bomb if request.accepts_zstd else data, is_zstd=request.accepts_zstd
            )

    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Damaged(), server)  # type: ignore[no-untyped-call]
    transport = Transport(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", 20.0, "TrainerClient")
    server.start()
    tensors, _ = stream(transport, ShardAddress("run", "policy", 0, 0, 0), len(data))
    assert len(tensors["sequences"]) == 6
    transport.close()
    server.stop(None).wait()


def test_bytes_that_are_no_shard_are_an_error(read: Read) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a shard of gristmill"):
        read(100, [b"x" * 100])


def test_a_freed_batch_is_not_asked_for_again(read: Read) -> None:
    with pytest.raises(NotFoundError):
        read(100, [grpc.StatusCode.NOT_FOUND])
