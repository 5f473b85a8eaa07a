"""Unknown callers are throttled by their machine, which a proxy's visitors share, and nobody else is throttled with
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from gristmill.v1 import run_pb2, run_pb2_grpc
from gristmill_service.access.tokens import create_token
from gristmill_service.access.web_tokens import WebTokens
from gristmill_service.api.admission import Slot
from gristmill_service.settings import Settings
from tests.access.issuer import SUBJECT, Issuer
from tests.on_loop import Service, on_loop
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

MACHINE = "127.0.0.1"
USER, ANN = "X-Forwarded-User", "ann@example.org"
SOON_S = 1.0


@dataclass(frozen=True)
class Crowded:
    """A service to which unknown callers of this machine sent many wrong tokens. issuer: of known web tokens."""

    service: Service
    token: str
    issuer: Issuer

    @property
    def admission(self) -> Any:
        return self.service._api.admission

    def get(self, path: str, token: str | None = None, **headers: str) -> int:
        shown = headers | ({} if token is None else {"authorization": f"Bearer {token}"})
        url = self.service.http_url + path
        return httpx.get(url, headers=shown, trust_env=False, timeout=20).status_code

    def list_runs(self, token: str | None, timeout: float = 20) -> str:
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        with grpc.insecure_channel(self.service.grpc_address) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                stub.ListRuns(run_pb2.ListRunsRequest(), metadata=metadata, timeout=timeout)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def exhaust(self, name: str) -> None:
        """As by thousands of wrong tokens."""
        on_loop(self.admission.refused, name, name, "UNAUTHENTICATED", 0, 100.0)

    async def take_slots(self, name: str) -> list[Slot]:
        """As by hundreds of refusals that are delayed."""
        return [await self.admission.enter(name, "stranger") for _ in range(384)]


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Crowded]:
    path, issuer = tmp_path / "tokens.yaml", Issuer(tmp_path)
    subjects = {"subjects": [{"subject": SUBJECT, "roles": ["viewer"]}]}
    path.write_text(yaml.safe_dump(subjects | {"proxy_users": [{"user": ANN, "roles": ["viewer"]}]}))
    token = create_token(path, "worker", ["worker"], ["*"], None)
    issued: dict[str, Any] = {"jwks": str(issuer.path), "jwt_issuer": "https://issuer", "jwt_audience": "gristmill"}
    service = Service(Settings(**FREE_PORTS, store="memory", tokens_file=path, proxy_user_header=USER, **issued))
    with ExitStack() as running:
        running.callback(service.stop)
        service.start()
        crowded = Crowded(service, token, issuer)
        crowded.exhaust(MACHINE)
        yield crowded


def test_wrong_and_missing_tokens_are_delayed_over_both_apis(crowded: Crowded) -> None:
    for token in ("wrong", None, "a.b.c"):
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(
                f"{crowded.service.http_url}/v1/runs",
                headers={} if token is None else {"authorization": f"Bearer {token}"},
                trust_env=False,
                timeout=SOON_S,
            )
        assert crowded.list_runs(token, SOON_S) == "DEADLINE_EXCEEDED"


def test_who_has_a_token_goes_on_while_unknown_callers_of_the_machine_take_all_that_they_may(crowded: Crowded) -> None:
    web_token = crowded.issuer.token()
    assert crowded.get("/v1/runs", web_token) == 200, "verified, although the machine has no allowance left"
    slots = on_loop(crowded.take_slots, MACHINE)
    for token in (crowded.token, web_token):
        assert crowded.get("/v1/runs", token) == 200
        assert crowded.list_runs(token) == "OK"
    assert crowded.get("/v1/runs", **{USER: ANN}) == 200
    assert [crowded.get(path) for path in ("/", "/page/app.js", "/docs", "/healthz", "/readyz")] == [200] * 5
    assert crowded.get("/v1/runs") == 429, "no slot is left for those without a token"
    for slot in slots:
        on_loop(slot.close)


def test_no_signature_is_checked_for_callers_that_leave(crowded: Crowded, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[str]()
    monkeypatch.setattr(WebTokens, "caller", lambda _, token, __: checked.append(token))
    token = crowded.issuer.token()[:-8] + "A" * 8
    url, shown = crowded.service.http_url, {"authorization": f"Bearer {token}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{url}/v1/runs", headers=shown, trust_env=False, timeout=SOON_S)
    assert crowded.list_runs(token, SOON_S) == "DEADLINE_EXCEEDED"
    crowded.exhaust(f"sign-in {MACHINE}")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/session", json={"token": token}, trust_env=False, timeout=SOON_S)
    wait_until(lambda: not crowded.admission.slots)
    assert checked == []


def test_a_person_signs_in_next_to_wrong_tokens_in_calls_and_at_the_sign_in(crowded: Crowded) -> None:
    crowded.exhaust(f"sign-in {MACHINE}")
    on_loop(crowded.take_slots, MACHINE)
    url = f"{crowded.service.http_url}/v1/session"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json={"token": "wrong"}, trust_env=False, timeout=SOON_S)
    answer = httpx.post(url, json={"token": crowded.token}, trust_env=False, timeout=20)
    assert (answer.status_code, "set-cookie" in answer.headers) == (200, True)


def test_wrong_tokens_at_the_sign_in_are_paid_for_apart(crowded: Crowded) -> None:
    accounts = crowded.admission._wrong_of_connection._accounts
    before = accounts[MACHINE]
    url = f"{crowded.service.http_url}/v1/session"
    assert httpx.post(url, json={"token": "wrong"}, trust_env=False, timeout=20).status_code == 401
    assert accounts[MACHINE] == before
    assert f"sign-in {MACHINE}" in accounts


def test_health_is_reported_over_grpc_to_who_has_no_token(crowded: Crowded) -> None:
    with grpc.insecure_channel(crowded.service.grpc_address) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        assert stub.GetHealth(run_pb2.GetHealthRequest(), timeout=20).version


@pytest.mark.parametrize("status", [401, 429])
def test_a_refused_token_has_its_status_also_where_errors_are_preferred_in_the_body(
    crowded: Crowded, status: int
) -> None:
    crowded.exhaust(f"worker {MACHINE}")
    assert crowded.get("/v1/runs", "wrong" if status == 401 else crowded.token, Prefer="errors=body") == status
    assert crowded.list_runs(crowded.token) == "OK", "over gRPC a caller is throttled by its connection"
