"""Callers who hold on to connections and streams, or send little by little, take nothing from the others."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from gristmill._wire.codecs.submit_codec import Buffer, Submission
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.access.tokens import create_token
from gristmill_service.api import admission
from gristmill_service.api.http import server
from gristmill_service.api.http.guards import bodies, connections
from gristmill_service.api.rpc import probes
from gristmill_service.settings import Settings
from tests.api.apis import CONFIG, GrpcApi, hangs_up, refused, row, rows_message
from tests.on_loop import Service, on_loop
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

STREAMS = 4
Metadata = tuple[tuple[str, str], ...]


class Silent:
    """The requests of a call that sends none until it is asked to end."""

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


def publish(api: GrpcApi, metadata: Metadata = ()) -> trainer_pb2.ReadShardRequest:
    """Publishes a batch whose shards are more than gRPC sends ahead of who reads. Returns how one is read."""
    config = json.dumps(CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1, "dp_size": 1})
    rows = rows_message([row("a", sample, prompt_token_ids=[1] * 2_000_000) for sample in range(2)])
    for call, request in (
        (api.runs.CreateRun, run_pb2.CreateRunRequest(run="r", config_json=config)),
        (api.rollouts.SubmitRows, rollout_pb2.SubmitRowsRequest(run="r", rows=rows)),
        (api.trainers.GetBatch, trainer_pb2.GetBatchRequest(run="r", wait_s=20)),
    ):
        call(request, metadata=metadata, timeout=60)
    return trainer_pb2.ReadShardRequest(run="r", model=run_pb2.MODEL_POLICY)


def test_streams_of_one_caller_leave_some_to_another(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    greedy, modest = shown(tokens, "greedy"), shown(tokens, "modest")
    service = serving(max_streams=STREAMS, tokens_file=tokens)
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        request = publish(api, greedy)
        unread = [api.trainers.ReadShard(request, metadata=greedy) for _ in range(STREAMS)]
        for stream in unread:
            opened.callback(stream.cancel)
        for stream in unread[:-1]:
            next(stream)
        assert end_of(unread[-1]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(api.trainers.ReadShard(request, metadata=modest, timeout=20))


def end_of(stream: Any) -> grpc.StatusCode:
    """With which status a stream ends that is read from now on."""
    with suppress(grpc.RpcError):
        list(stream)
    code: grpc.StatusCode = stream.code()
    return code


def test_a_stream_that_nobody_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        stream = api.trainers.ReadShard(publish(api))
        opened.callback(stream.cancel)
        monkeypatch.setattr(admission, "SEND_S", 0.5)
        next(stream)
        wait_until(lambda: not service._api.admission.slots)
        assert service._api.admission.answers.total == 0
        # gRPC's server holds on to the last call until another one comes.
        api.runs.ListRuns(run_pb2.ListRunsRequest(), timeout=20)
        assert end_of(stream) is grpc.StatusCode.CANCELLED


def test_a_request_that_does_not_come_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REQUEST_S", 0.5)
    service = serving()
    on_loop(setattr, service._api.admission, "limits", service._api.admission.limits._replace(request_s=0.5))
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        call = api.channel.stream_unary("/gristmill.v1.RunService/ListRuns", request_serializer=bytes)
        silent = opened.enter_context(closing(Silent()))
        with pytest.raises(grpc.RpcError) as caught:
            call(iter(silent), timeout=20)
        error = refused(caught.value)
        assert (error.code, error.kind) == ("DEADLINE_EXCEEDED", "DeadlineExceededError")
        wait_until(lambda: not service._api.admission.slots)


def test_health_and_reflection_are_bounded_and_nobody_is_kept_from_calling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REQUEST_S", 0.5)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        for number in range(48):
            # A connection has few probes.
            if number % 8 == 0:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = opened.enter_context(grpc.insecure_channel(service.grpc_address, options))
                watch = channel.unary_stream("/grpc.health.v1.Health/Watch", request_serializer=bytes)
            watching = watch(b"")
            opened.callback(watching.cancel)
            next(watching)
        assert end_of(watch(b"")) is grpc.StatusCode.RESOURCE_EXHAUSTED
        api.runs.ListRuns(run_pb2.ListRunsRequest(), timeout=20)
        watching.cancel()
        wait_until(lambda: len(service._api.admission.slots) == 47)
        reflect = api.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        silent = opened.enter_context(closing(Silent()))
        assert end_of(reflect(iter(silent), timeout=20)) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_streams_beyond_the_limit_are_asked_to_retry() -> None:
    service = serving(max_streams=1)
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        request = publish(api)
        stream = api.trainers.ReadShard(request)
        opened.callback(stream.cancel)
        next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            list(api.trainers.ReadShard(request, timeout=20))
        error = refused(caught.value)
        assert (error.code, error.retry_after_s) == ("RESOURCE_EXHAUSTED", 1.0)
        assert "max_streams" in error.message


def test_a_stream_whose_caller_goes_away_leaves_no_line_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    service = serving()
    with ExitStack() as opened, caplog.at_level(logging.WARNING):
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        stream = api.trainers.ReadShard(publish(api))
        next(stream)
        stream.cancel()
        silent = opened.enter_context(closing(Silent()))
        unsent = api.channel.stream_unary("/gristmill.v1.RunService/ListRuns", request_serializer=bytes)
        call = unsent.future(iter(silent))
        wait_until(lambda: len(service._api.admission.coming) == 1)
        call.cancel()
        wait_until(lambda: not service._api.admission.slots)
        opened.pop_all().close()
    assert not caplog.records


def test_a_request_that_does_not_come_leaves_its_place_to_another_caller(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    greedy, modest = shown(tokens, "greedy"), shown(tokens, "modest")
    service = serving(tokens_file=tokens)
    allow_large_requests(service, 2)
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        # One message of one call, which gRPC lets a client stream to a method that takes just one.
        call = api.channel.stream_unary("/gristmill.v1.RolloutService/SubmitRows", request_serializer=bytes)
        silent = [opened.enter_context(closing(Silent())) for _ in range(2)]
        unsent = [call.future(iter(one), metadata=greedy) for one in silent]
        wait_until(lambda: len(service._api.admission.coming) == 2)
        api.runs.ListRuns(run_pb2.ListRunsRequest(), metadata=greedy, timeout=10)
        assert not any(one.done() for one in unsent), "a call that is never large takes nothing from them"
        with pytest.raises(grpc.RpcError, match="run 'r' does not exist"):
            api.rollouts.SubmitRows(rollout_pb2.SubmitRowsRequest(run="r"), metadata=modest, timeout=10)
        wait_until(lambda: any(one.done() for one in unsent))
        assert [one.code() for one in unsent if one.done()] == [grpc.StatusCode.DEADLINE_EXCEEDED]


def test_the_request_of_a_call_that_is_never_large_is_refused_unparsed_if_it_is(service: Service) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        acknowledge = channel.unary_unary("/gristmill.v1.TrainerService/Acknowledge")
        with pytest.raises(
            grpc.RpcError, match="the request has 2000000 bytes, and the limit of Acknowledge is 1048576; send less"
        ):
            acknowledge(bytes(2_000_000), timeout=20)


def test_rows_that_are_refused_alone_cost_their_caller_like_a_refused_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, refused = tmp_path / "tokens.yaml", list[tuple[str, str]]()
    metadata = shown(tokens, "worker")

    def note(admission: object, caller: str, connection: str, code: str, nbytes: int, spent_s: float) -> float:
        assert 0 < spent_s < 10
        refused.append((caller, code))
        return 0.0

    monkeypatch.setattr(admission.Admission, "refused", note)
    service = serving(tokens_file=tokens)
    with ExitStack() as opened:
        opened.callback(service.stop)
        api = opened.enter_context(closing(GrpcApi(service.grpc_address)))
        api.runs.CreateRun(run_pb2.CreateRunRequest(run="r", config_json=json.dumps(CONFIG)), metadata=metadata)
        rows = [row("a", 0), row("b", -1)]
        request = rollout_pb2.SubmitRowsRequest(run="r", rows=rows_message(rows), refuse_by_row=True)
        assert len(api.rollouts.SubmitRows(request, metadata=metadata, timeout=20).refused) == 1
        answer = httpx.post(
            f"{service.http_url}/v1/runs/r/rows",
            json={"rows": rows, "refuse_by_row": True},
            headers=dict(metadata),
            trust_env=False,
        )
        assert (answer.status_code, len(answer.json()["refused"])) == (200, 1)
        assert refused == [("worker", "INVALID_ARGUMENT")] * 2


def allow_large_requests(service: Service, count: int) -> None:
    """Lets the service read that many at once, also of one caller."""
    requests = service._api.admission.requests
    requests.most = requests._most_each = count


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
        assert all(map(hangs_up, wires))
        assert httpx.get(f"{service.http_url}/healthz").status_code == 200


def test_where_there_are_too_many_connections_the_longest_idle_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        idle = [opened.enter_context(connected(service)) for _ in range(8)]
        for wire in idle:
            # Connections are accepted in order when their first bytes are there.
            wire.sendall(b"GET")
        assert [httpx.get(f"{service.http_url}/healthz").status_code for _ in range(5)] == [200] * 5
        assert hangs_up(idle[0])


def test_a_body_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "REQUEST_S", 0.2)
    service = serving()
    with ExitStack() as opened:
        opened.callback(service.stop)
        wire = opened.enter_context(connected(service))
        wire.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        wire.settimeout(20)
        answer = b"".join(iter(lambda: wire.recv(10_000), b""))
        assert b" 504 " in answer
        assert b"1 bytes of the body arrived within 0 s" in answer


def test_large_bodies_are_held_a_few_at_a_time_and_small_ones_pass_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REQUEST_S", 0.5)
    service = serving()
    allow_large_requests(service, 1)
    with ExitStack() as opened:
        opened.callback(service.stop)
        wire = opened.enter_context(connected(service))
        wire.sendall(b"POST /v1/runs/r/rows HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + bytes(300_000))
        large = {"run": "r", "config": {"x": "y" * 300_000}}
        wait_until(lambda: httpx.post(f"{service.http_url}/v1/runs", json=large).status_code == 429)
        refused = httpx.post(f"{service.http_url}/v1/runs", json=large)
        assert (refused.json()["error"]["type"], refused.headers["retry-after"]) == ("ResourceExhaustedError", "1")
        assert httpx.post(f"{service.http_url}/v1/runs", json={"run": "r", "config": CONFIG}).status_code == 200
        wire.close()
        wait_until(lambda: httpx.post(f"{service.http_url}/v1/runs", json=large).status_code == 422)


def test_bytes_of_answers_that_nobody_reads_are_bounded() -> None:
    service = serving()
    # One answer takes all of it, for as long as some of it is unread.
    answers = service._api.admission.answers
    answers.most = answers._most_each = 100_000
    with ExitStack() as opened:
        opened.callback(service.stop)
        client = opened.enter_context(httpx.Client(base_url=service.http_url, trust_env=False))
        client.post("/v1/runs", json={"run": "r", "config": CONFIG | {"max_buffered_batches": 1000}})
        uids = [f"{number}-{'u' * 900}" for number in range(1000)]
        assert client.post("/v1/runs/r/groups", json={"uids": uids}).json()["admissions"] == ["admitted"] * 1000
        wire = opened.enter_context(connected(service))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(b"GET /v1/runs/r/groups HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: answers.total > 0)
        with pytest.raises(httpx.ReadTimeout):
            client.get("/v1/runs/r/groups", timeout=1)
        assert client.get("/v1/runs/r").json()["groups_open"] == 1000
        wire.close()
        groups = client.get("/v1/runs/r/groups").json()["groups"]
        assert [group["uid"] for group in groups] == uids


def connected(service: Service) -> socket.socket:
    where = urlsplit(service.http_url)
    return socket.create_connection((where.hostname, where.port), timeout=10)


def test_what_is_refused_is_released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
