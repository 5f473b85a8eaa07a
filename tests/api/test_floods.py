"""Callers who hold on to connections and streams, or send little by little, take nothing from the others."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from gristmill import Credentials, RolloutClient
from gristmill._wire.codecs.submit_codec import Buffer, Submission
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.access.gate import Gate
from gristmill_service.access.tokens import create_token
from gristmill_service.api.http import server
from gristmill_service.api.http.guards import bodies, connections
from gristmill_service.api.rpc import intake, peers
from gristmill_service.service import Service
from gristmill_service.settings import Settings
from tests.api.doors import CONFIG, GrpcDoor, refused, row, rows_message
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

STREAMS = 4
CANCELLED = grpc.StatusCode.CANCELLED
Metadata = tuple[tuple[str, str], ...]


class Silent:
    """The requests of a call that sends none until it is told to end."""

    def __init__(self) -> None:
        self._ends = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self._ends.wait(60)
        yield from ()

    def close(self) -> None:
        self._ends.set()


def serving(**settings: Any) -> Service:
    running = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, **settings))
    running.start()
    return running


def shown(path: Path, name: str) -> Metadata:
    """The metadata of a new caller of this name."""
    return (("authorization", f"Bearer {create_token(path, name, ['worker', 'trainer'], ['*'], None)}"),)


def publish(door: GrpcDoor, metadata: Metadata = ()) -> trainer_pb2.ReadShardRequest:
    """Publishes a batch whose shards are more than gRPC sends ahead of who reads. Returns how one is read."""
    config = json.dumps(CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1, "dp_size": 1})
    rows = rows_message([row("a", sample, prompt_token_ids=[1] * 2_000_000) for sample in range(2)])
    for call, request in (
        (door.runs.CreateRun, run_pb2.CreateRunRequest(run="r", config_json=config)),
        (door.rollouts.SubmitRows, rollout_pb2.SubmitRowsRequest(run="r", rows=rows)),
        (door.trainers.GetBatch, trainer_pb2.GetBatchRequest(run="r", wait_s=20)),
    ):
        call(request, metadata=metadata, timeout=60)
    return trainer_pb2.ReadShardRequest(run="r", model=run_pb2.MODEL_POLICY)


def test_idle_streams_of_one_caller_give_way_to_those_of_another(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    greedy, modest = shown(tokens, "greedy"), shown(tokens, "modest")
    service = serving(max_streams=STREAMS, tokens_file=tokens)
    with ExitStack() as opened:
        opened.callback(service.stop)
        door = opened.enter_context(closing(GrpcDoor(service.grpc_address)))
        request = publish(door, greedy)
        unread = [door.trainers.ReadShard(request, metadata=greedy) for _ in range(STREAMS)]
        for stream in unread:
            opened.callback(stream.cancel)
            next(stream)
        assert list(door.trainers.ReadShard(request, metadata=modest, timeout=20))
        assert [end_of(stream) for stream in unread].count(CANCELLED) == 1


def end_of(stream: Any) -> grpc.StatusCode:
    """With which status a stream ends that is read from now on."""
    with suppress(grpc.RpcError):
        list(stream)
    code: grpc.StatusCode = stream.code()
    return code


def test_streams_beyond_the_limit_are_told_to_retry() -> None:
    service = serving(max_streams=1)
    with ExitStack() as opened:
        opened.callback(service.stop)
        door = opened.enter_context(closing(GrpcDoor(service.grpc_address)))
        request = publish(door)
        stream = door.trainers.ReadShard(request)
        opened.callback(stream.cancel)
        next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            list(door.trainers.ReadShard(request, timeout=20))
        error = refused(caught.value)
        assert (error.code, error.retry_after_s) == ("RESOURCE_EXHAUSTED", 1.0)
        assert "max_streams" in error.message


def test_a_stream_whose_caller_goes_away_leaves_no_line_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    service = serving()
    with ExitStack() as opened, caplog.at_level(logging.WARNING):
        opened.callback(service.stop)
        door = opened.enter_context(closing(GrpcDoor(service.grpc_address)))
        stream = door.trainers.ReadShard(publish(door))
        next(stream)
        stream.cancel()
        silent = opened.enter_context(closing(Silent()))
        unsent = door.channel.stream_unary("/gristmill.v1.RunService/ListRuns", request_serializer=bytes)
        call = unsent.future(iter(silent))
        wait_until(lambda: len(service._grpc._intake._places._taken) == 1)
        call.cancel()
        wait_until(lambda: not service._grpc._intake._places._taken)
        opened.pop_all().close()
    assert not caplog.records


def test_a_call_whose_request_does_not_come_gives_its_place_to_one_whose_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "AT_ONCE", 1)
    monkeypatch.setattr(intake, "_LONGEST_S", 0.5)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        door = opened.enter_context(closing(GrpcDoor(service.grpc_address)))
        silent = opened.enter_context(closing(Silent()))
        # One message of one call, which gRPC lets a client stream to a method that takes just one.
        call = door.channel.stream_unary("/gristmill.v1.RunService/ListRuns", request_serializer=bytes)
        unsent = call.future(iter(silent))
        wait_until(lambda: len(service._grpc._intake._places._taken) == 1)
        time.sleep(0.6)
        assert door.create("r", CONFIG)["created"]
        assert unsent.code() is CANCELLED


# HTTP.


def test_a_connection_over_which_no_request_comes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 1.0)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        wires = []
        for begun in (b"", b"GET /hea", b"POST /v1/runs HTTP/1.1\r\nHost: a\r\n"):
            wires.append(opened.enter_context(connected(service)))
            wires[-1].sendall(begun)
        assert all(map(ended, wires))
        assert httpx.get(f"{service.http_url}/healthz").status_code == 200


def test_where_there_are_too_many_connections_the_longest_idle_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        held = [opened.enter_context(connected(service)) for _ in range(8)]
        assert [httpx.get(f"{service.http_url}/healthz").status_code for _ in range(5)] == [200] * 5
        assert ended(held[0])


def test_a_body_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_LONGEST_S", 0.2)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        wire = opened.enter_context(connected(service))
        wire.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        wire.settimeout(20)
        answer = b"".join(iter(lambda: wire.recv(10_000), b""))
        assert b" 504 " in answer
        assert b"1 bytes of the body came within 0 s" in answer


def test_large_bodies_are_held_a_few_at_a_time_and_small_ones_pass_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_AT_ONCE", 1)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        wire = opened.enter_context(connected(service))
        wire.sendall(b"POST /v1/runs/r/rows HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + bytes(200_000))
        large = {"run": "r", "config": {"x": "y" * 100_000}}
        wait_until(lambda: httpx.post(f"{service.http_url}/v1/runs", json=large).status_code == 429)
        refused = httpx.post(f"{service.http_url}/v1/runs", json=large)
        assert (refused.json()["error"]["type"], refused.headers["retry-after"]) == ("ResourceExhaustedError", "1")
        assert httpx.post(f"{service.http_url}/v1/runs", json={"run": "r", "config": CONFIG}).status_code == 200
        wire.close()
        wait_until(lambda: httpx.post(f"{service.http_url}/v1/runs", json=large).status_code == 422)


def ended(wire: socket.socket) -> bool:
    """Whether the service hangs up, politely or not."""
    wire.settimeout(20)
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True


def connected(service: Service) -> socket.socket:
    where = urlsplit(service.http_url)
    return socket.create_connection((where.hostname, where.port), timeout=10)


@pytest.mark.parametrize(("has_tokens", "queue"), [(False, "ipv4:127.0.0.1"), (True, "team")], ids=["open", "tokens"])
def test_calls_wait_for_a_thread_in_queues_by_who_calls_or_from_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_tokens: bool, queue: str
) -> None:
    queues: list[str] = []

    def noting(gate: Gate) -> Callable[..., str]:
        def noted(*arguments: Any) -> str:
            queues.append(queue_of(*arguments))
            return queues[-1]

        queue_of = peers.queue_of(gate)
        assert queue_of("gRPC", "has", "other arguments") == queue_of() == ""
        return noted

    monkeypatch.setattr("gristmill_service.api.rpc.server.queue_of", noting)
    token = create_token(tmp_path / "tokens.yaml", "team", ["worker"], ["*"], None)
    running = serving(**({"tokens_file": tmp_path / "tokens.yaml"} if has_tokens else {}))
    with RolloutClient(running.grpc_address, "run", credentials=Credentials(token=token)) as client:
        client.create_run(CONFIG)
    running.stop()
    assert set(queues) == {queue}


def test_what_is_refused_is_let_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    came, read = list[weakref.ref[Submission]](), Submission._read

    def noted(self: Submission, data: Buffer) -> None:
        came.append(weakref.ref(self))
        read(self, data)

    monkeypatch.setattr(Submission, "_read", noted)
    running = serving()
    # A service collects seldom, and megabytes count for it as one object.
    gc.disable()
    try:
        with grpc.insecure_channel(running.grpc_address) as channel:
            submit = channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match="is not a message"):
                    submit(bytes(1_000))
        wait_until(lambda: len(came) == 3 and not any(one() for one in came))
    finally:
        gc.enable()
        running.stop()
