"""A caller whose calls are refused again and again is read seldom, and no other caller notices it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import grpc
import httpx
import pytest

from gristmill.errors import ResourceExhaustedError
from gristmill.v1 import run_pb2
from gristmill_service.access import debts
from gristmill_service.access.debts import Debts
from gristmill_service.access.tokens import create_token
from gristmill_service.service import Service
from tests.access.conftest import Serve
from tests.api.doors import CONFIG, GrpcDoor

MIB = 1 << 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_few_refusals_are_free() -> None:
    found = Debts(Clock())
    for _ in range(100):
        found.charge("a", "INVALID_ARGUMENT", 1_000)
    assert found.wait_s("a") == 0.0
    found.check("a")


def test_many_are_waited_for_as_long_as_they_cost_two_hundred_times_and_then_are_forgiven() -> None:
    clock = Clock()
    found = Debts(clock)
    for _ in range(1_000):
        found.charge("a", "INVALID_ARGUMENT", 0)
    # Half a second of the service's time, of which a quarter is free.
    assert found.wait_s("a") == pytest.approx(0.25 * 200)
    with pytest.raises(ResourceExhaustedError, match="retry in 50 s"):
        found.check("a")
    clock.now = 50.0
    found.check("a")


def test_nobody_owes_so_much_that_it_waits_for_longer_than_a_minute() -> None:
    found = Debts(Clock())
    for _ in range(10_000):
        found.charge("a", "UNAUTHENTICATED", 64 * MIB)
    assert found.wait_s("a") < 60


def test_others_do_not_wait() -> None:
    found = Debts(Clock())
    for _ in range(1_000):
        found.charge("a", "INVALID_ARGUMENT", 0)
    assert found.wait_s("b") == 0.0


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS"])
def test_what_good_callers_are_refused_too_costs_only_its_bytes(code: str) -> None:
    found = Debts(Clock())
    for _ in range(10_000):
        found.charge("a", code, 10_000)
    assert found.wait_s("a") == 0.0
    for _ in range(40):
        found.charge("a", code, 12 * MIB)
    assert found.wait_s("a") > 0.0


def test_what_the_service_cannot_do_is_not_the_callers_debt() -> None:
    found = Debts(Clock())
    for code in ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
        for _ in range(1_000):
            found.charge("a", code, MIB)
    assert found.wait_s("a") == 0.0


def test_debts_of_callers_without_number_take_no_memory_without_bound() -> None:
    found = Debts(Clock())
    for number in range(3 * debts._MOST_CALLERS):
        found.charge(str(number), "UNAUTHENTICATED", 0)
    assert len(found._paid_at) <= debts._MOST_CALLERS


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    # Four calls are free, however long they take here.
    monkeypatch.setattr(debts, "_FREE_S", 0.2)
    monkeypatch.setattr(debts, "_CALL_S", 0.05)
    monkeypatch.setattr(debts, "_LONGEST_WAIT_S", 0.05)
    path = tmp_path / "tokens.yaml"
    return path, {name: create_token(path, name, ["worker"], ["*"], None) for name in ("greedy", "modest")}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_over_http_wrong_requests_are_soon_not_read_any_more(serve: Serve, tokens: tuple[Path, dict[str, str]]) -> None:
    path, of = tokens
    service = serve(tokens_file=path)
    with httpx.Client(base_url=service.http_url) as client:
        statuses = [
            client.post("/v1/runs", json={"run": 1, "config": {}}, headers=bearer(of["greedy"])) for _ in range(10)
        ]
        assert [found.status_code for found in statuses[:3]] == [422] * 3
        last = statuses[-1]
        assert (last.status_code, last.json()["error"]["type"]) == (429, "ResourceExhaustedError")
        assert int(last.headers["retry-after"]) >= 1
        made = client.post("/v1/runs", json={"run": "r", "config": CONFIG}, headers=bearer(of["modest"]))
        assert made.status_code == 200


def test_over_http_unknown_tokens_wait_for_their_refusal(
    serve: Serve, tokens: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    before = Debts.wait_s

    def noted(self: Debts, who: str) -> float:
        waited.append(before(self, who))
        return waited[-1]

    monkeypatch.setattr(Debts, "wait_s", noted)
    path, of = tokens
    service = serve(tokens_file=path)
    with httpx.Client(base_url=service.http_url) as client:
        found = [client.get("/v1/runs", headers=bearer("nobody's")).status_code for _ in range(10)]
        assert found == [401] * 10, "what is wrong is told nevertheless"
        assert waited[0] == 0.0
        assert max(waited) > 0.0
        assert client.get("/v1/runs", headers=bearer(of["modest"])).status_code == 200


def last_status(service: Service, token: str, request: bytes) -> grpc.StatusCode:
    """Of ten calls that bring these rows."""
    with grpc.insecure_channel(service.grpc_address) as channel:
        call = channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
        found = []
        for _ in range(10):
            try:
                call(request, metadata=tuple(bearer(token).items()), timeout=20)
            except grpc.RpcError as error:
                found.append(error.code())
        return found[-1]


def test_over_grpc_wrong_requests_of_a_connection_are_soon_not_read_any_more(
    serve: Serve, tokens: tuple[Path, dict[str, str]]
) -> None:
    path, of = tokens
    service = serve(tokens_file=path)
    assert last_status(service, of["greedy"], b"\xff" * 100) is grpc.StatusCode.RESOURCE_EXHAUSTED
    with closing(GrpcDoor(service.grpc_address)) as door:
        # Another connection of the same caller, as another worker has.
        assert not door.runs.ListRuns(run_pb2.ListRunsRequest(), metadata=tuple(bearer(of["greedy"]).items())).runs


def test_over_grpc_unknown_tokens_are_told_so_nevertheless(serve: Serve, tokens: tuple[Path, dict[str, str]]) -> None:
    path, of = tokens
    service = serve(tokens_file=path)
    assert last_status(service, "nobody's", b"") is grpc.StatusCode.UNAUTHENTICATED
    with closing(GrpcDoor(service.grpc_address)) as door:
        request = run_pb2.ListRunsRequest()
        assert not door.runs.ListRuns(request, metadata=tuple(bearer(of["modest"]).items())).runs
