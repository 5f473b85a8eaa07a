"""Callers take turns over both doors, whatever kind of token they show."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import pytest

from gristmill.v1 import run_pb2, run_pb2_grpc
from gristmill_service import call_threads
from gristmill_service.access import caller
from gristmill_service.access.gate import Gate
from gristmill_service.access.tokens import create_token
from gristmill_service.call_turns import CallTurns
from gristmill_service.service import Service
from tests.access.conftest import Serve
from tests.access.test_tokens import SUBJECT, Issuer
from tests.api.doors import CONFIG
from tests.run.harness import wait_until

T = TypeVar("T")


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The callers whose calls are put into queues, in order: those of services that are started after this."""
    found = list[str]()

    class Recorded(CallTurns[T]):
        def put(self, caller: str, call: T) -> None:
            found.append(caller)
            super().put(caller, call)

    # Not `put` of all: services of other tests may still have clients in this process.
    monkeypatch.setattr(call_threads, "CallTurns", Recorded)
    return found


def over_http(service: Service, token: str, path: str = "/v1/runs") -> int:
    shown = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.get(service.http_url + path, headers=shown, trust_env=False, timeout=60).status_code


def over_grpc(service: Service, token: str) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.ListRuns(run_pb2.ListRunsRequest(), metadata=(("authorization", f"Bearer {token}"),), timeout=60)


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "tokens.yaml"
    return {name: create_token(path, name, ["viewer", "worker"], ["*"], None) for name in ("crowd", "single")}


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_who_sends_many_requests_over_http_keeps_nobody_waiting_at_either_door(
    serve: Serve,
    tmp_path: Path,
    tokens: dict[str, str],
    queued: list[str],
    elsewhere: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever is slow here is at work.
    monkeypatch.setattr(call_threads, "_STUCK_S", 10.0)
    service = serve(tokens_file=tmp_path / "tokens.yaml")
    order, let, visible = list[str](), threading.Event(), Gate.visible

    def slow(self: Gate, runs: Iterable[str]) -> list[str]:
        order.append(caller.current().name)
        assert let.wait(60)
        return visible(self, runs)

    monkeypatch.setattr(Gate, "visible", slow)
    crowd = [elsewhere.submit(over_http, service, tokens["crowd"]) for _ in range(12)]
    wait_until(lambda: len(queued) == 12)
    singles = [elsewhere.submit(door, service, tokens["single"]) for door in (over_http, over_grpc)]
    wait_until(lambda: len(queued) == 14)
    wait_until(lambda: len(order) == 2)
    assert order == ["crowd"] * 2
    assert over_http(service, "", "/healthz") == 200, "probes wait for nobody"
    let.set()
    assert {answered.result(60) for answered in crowd} == {200}
    assert [answered.result(60) for answered in singles] == [200, None]
    assert order[2] == "single"
    assert order[:7].count("single") == 2
    assert queued == ["crowd"] * 12 + ["single"] * 2


def test_a_request_whose_caller_hangs_up_before_its_turn_is_not_answered(
    serve: Serve, queued: list[str], elsewhere: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_threads, "_STUCK_S", 10.0)
    service, answered, let, visible = serve(), list[str](), threading.Event(), Gate.visible

    def slow(self: Gate, runs: Iterable[str]) -> list[str]:
        answered.append("")
        assert let.wait(60)
        return visible(self, runs)

    monkeypatch.setattr(Gate, "visible", slow)
    waiting = [elsewhere.submit(over_http, service, "") for _ in range(2)]
    wait_until(lambda: len(answered) == 2)
    host, _, port = service.http_url.removeprefix("http://").rpartition(":")
    for _ in range(8):
        with socket.create_connection((host, int(port))) as caller_of_one:
            before = len(queued)
            caller_of_one.sendall(f"GET /v1/runs HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
            wait_until(lambda before=before: len(queued) > before)  # type: ignore[misc]
    # Connections are closed one after the other: who asks after them is answered after them.
    assert over_http(service, "", "/healthz") == 200
    let.set()
    assert [one.result(60) for one in waiting] == [200, 200]
    assert over_http(service, "") == 200
    assert len(answered) == 3


def test_a_request_that_waits_for_its_run_keeps_nobody_from_work(
    serve: Serve, tmp_path: Path, tokens: dict[str, str], elsewhere: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_threads, "_STUCK_S", 10.0)
    service = serve(tokens_file=tmp_path / "tokens.yaml")
    service.runs.create("r", CONFIG)
    path = "/v1/runs/r/policy-version?at_least=1&wait_s=25"
    waiting = [elsewhere.submit(over_http, service, tokens["crowd"], path) for _ in range(8)]
    wait_until(lambda: service.long_poll.count == 8)
    assert over_http(service, tokens["single"]) == 200
    service.runs.get("r").announce(1)
    assert {answered.result(60) for answered in waiting} == {200}


def test_a_body_is_decompressed_in_its_callers_turn(
    serve: Serve, tmp_path: Path, tokens: dict[str, str], queued: list[str]
) -> None:
    service = serve(tokens_file=tmp_path / "tokens.yaml")
    service.runs.create("r", CONFIG)
    shown = {"authorization": f"Bearer {tokens['crowd']}", "content-type": "application/json"}
    for body, packing, turns in ((b"", {}, 1), (b"x", {"content-encoding": "gzip"}, 2)):
        queued.clear()
        content = json.dumps({"uids": ["a"]}).encode()
        content = gzip.compress(content) if body else content
        url = f"{service.http_url}/v1/runs/r/groups"
        assert httpx.post(url, headers=shown | packing, content=content, trust_env=False).status_code == 200
        assert queued == ["crowd"] * turns


def test_callers_of_web_tokens_queue_by_their_subject(
    serve: Serve, tmp_path: Path, queued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer, path = Issuer(tmp_path), tmp_path / "tokens.yaml"
    path.write_text("subjects: [{subject: 'system:serviceaccount:rl:*', roles: [trainer]}]")
    service = serve(tokens_file=path, jwks=str(issuer.path), jwt_issuer="https://issuer", jwt_audience="gristmill")
    token = issuer.token()
    over_grpc(service, token)
    over_grpc(service, token)
    assert queued == ["ipv4:127.0.0.1", SUBJECT], "known when it was found valid"
    assert over_http(service, issuer.token(exp=None)) == 401
    assert over_http(service, issuer.token(jti="another")) == 200
    assert queued[2:] == [SUBJECT], "what is refused before takes no turn"
    forged = f"{token.rpartition('.')[0]}.{'A' * 342}"
    with pytest.raises(grpc.RpcError):
        over_grpc(service, forged)
    assert queued[-1] == "ipv4:127.0.0.1"


def test_without_tokens_both_doors_queue_by_machine(serve: Serve, queued: list[str]) -> None:
    service = serve()
    over_grpc(service, "")
    assert over_http(service, "") == 200
    assert queued == ["ipv4:127.0.0.1"] * 2
