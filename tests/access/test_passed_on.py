"""Replicas pass calls on to each other as peers: they are believed where a caller called from, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import yaml
from fastapi.routing import APIRoute
from google.protobuf.descriptor import MethodDescriptor

from gristmill import RolloutClient
from gristmill.errors import InvalidArgumentError
from gristmill_service.access.passed_on import CAME_FROM, MARK
from gristmill_service.access.roles import OPEN_CALLS, ROLES
from gristmill_service.access.tokens import create_token
from gristmill_service.api import admission
from gristmill_service.api.allowance import Allowance
from gristmill_service.settings import Settings, load_settings
from gristmill_service.storage.redis.scripts import Owner
from tests.access.conftest import Guarded, Serve
from tests.access.test_calls import FILLED, METHODS, ROUTES, call_of, status
from tests.api.apis import CONFIG
from tests.on_loop import Service
from tests.redis.servers import RedisServer
from tests.serving import FREE_PORTS, StartService

USER, ANN = "X-Forwarded-User", "ann@example.org"
PROXY, ELSEWHERE = "127.0.0.2", "127.0.0.3"
"""Addresses of this machine that programs call from only when they say so."""


@dataclass(frozen=True)
class Replicas:
    """Two services on one Redis, the first of which owns the run 'r', the other one 's'. secret: what the first one
    wants its peers to show; other_secret: what the other one does."""

    owner: Service
    other: Service
    tokens: dict[str, str]
    secret: str
    other_secret: str

    def passed_on(self, came_from: str, **headers: str) -> dict[str, str]:
        """The headers of a call that a peer passes on to the owner."""
        return {MARK: self.secret, CAME_FROM: came_from} | headers


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    directory = tmp_path_factory.mktemp("replicas")
    path = directory / "tokens.yaml"
    path.write_text(yaml.safe_dump({"proxy_users": [{"user": "*@example.org", "roles": ["viewer"]}]}))
    tokens: dict[str, str] = {role: create_token(path, role, [role], ["*"], None) for role in ROLES}
    with ExitStack() as running:
        redis = running.enter_context(RedisServer(directory / "redis", appendonly="no"))
        services = []
        for _ in range(2):
            service = Service(
                Settings(
                    **FREE_PORTS,
                    store="redis",
                    redis_url=redis.url,
                    tokens_file=path,
                    proxy_user_header=USER,
                    proxy_addresses=PROXY,
                    shutdown_grace_s=5,
                )
            )
            running.callback(service.stop)
            service.start()
            services.append(service)
        services[0].runs.create("r", CONFIG)
        services[1].runs.create("s", CONFIG)
        yield Replicas(services[0], services[1], tokens, secret_of(redis, "r"), secret_of(redis, "s"))


def secret_of(redis: RedisServer, run: str) -> str:
    """The secret that the run's owner shares with its peers."""
    content = redis.client().get(f"{{gristmill:{run}}}:owner")
    assert isinstance(content, bytes)
    return msgspec.json.decode(content, type=Owner).secret


def get(service: Service, path: str, headers: dict[str, Any], address: str = "127.0.0.1") -> httpx.Response:
    """Calls from this address of the machine."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), trust_env=False) as client:
        return client.get(service.http_url + path, headers=headers)


@pytest.mark.parametrize("mark", [b"1", b"", b"x" * 43, "é".encode()])
def test_a_mark_that_no_peer_made_is_refused_from_any_caller(guarded: Guarded, service: Service, mark: bytes) -> None:
    shown = {MARK: mark, "authorization": f"Bearer {guarded.tokens['admin']}".encode()}
    for target in (guarded.service, service):
        for path in ("/v1/runs", "/metrics", "/openapi.json", "/v1/runs/r"):
            response = get(target, path, shown)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "UNAVAILABLE")
        method = next(method for method in METHODS if method.name == "ListRuns")
        with grpc.insecure_channel(target.grpc_address) as channel:
            if mark.isascii():
                assert status(channel, method, guarded.tokens["admin"], {MARK: mark.decode()}) == "UNAVAILABLE"
            # The next call of the same connection, and perhaps of the same thread.
            assert status(channel, method, guarded.tokens["admin"]) == "OK"


def test_where_a_call_came_from_is_believed_of_peers_alone(replicas: Replicas) -> None:
    asked = {USER: ANN, CAME_FROM: PROXY}
    for service in (replicas.owner, replicas.other):
        assert get(service, "/v1/runs/r", asked).status_code == 401
        assert get(service, "/v1/runs/r", asked | {MARK: "1"}).status_code == 503
    assert get(replicas.owner, "/v1/runs/r", replicas.passed_on(PROXY, **{USER: ANN})).status_code == 200
    assert get(replicas.owner, "/v1/runs/r", replicas.passed_on(ELSEWHERE, **{USER: ANN})).status_code == 401


def test_who_signed_in_at_a_proxy_sees_the_runs_of_every_replica(replicas: Replicas) -> None:
    for service in (replicas.owner, replicas.other):
        assert get(service, "/v1/runs/r", {USER: ANN}, PROXY).status_code == 200
        assert get(service, "/v1/runs/r", {USER: ANN}, ELSEWHERE).status_code == 401
        assert get(service, "/v1/runs/r", {USER: ANN, CAME_FROM: PROXY}, ELSEWHERE).status_code == 401


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_over_grpc_a_peer_may_no_more_than_its_caller(replicas: Replicas, method: MethodDescriptor) -> None:
    marked = replicas.passed_on("ipv4:10.0.0.7:5123")
    if call_of(method) in OPEN_CALLS:
        return
    with grpc.insecure_channel(replicas.owner.grpc_address) as channel:
        assert status(channel, method, None, marked) == "UNAUTHENTICATED"
        assert status(channel, method, replicas.secret, marked) == "UNAUTHENTICATED", "it is no token"
        assert status(channel, method, replicas.tokens["scraper"], marked) == "PERMISSION_DENIED"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_over_http_a_peer_may_no_more_than_its_caller(replicas: Replicas, route: APIRoute) -> None:
    if route.name in OPEN_CALLS:
        return
    method, path = next(iter(route.methods or ())), route.path_format.format(**FILLED)
    for token, expected in ((None, 401), (replicas.secret, 401), (replicas.tokens["scraper"], 403)):
        # Refused calls of one machine together are throttled.
        came_from = f"10.0.0.{ROUTES.index(route)}"
        shown = replicas.passed_on(came_from) | ({"authorization": f"Bearer {token}"} if token else {})
        response = httpx.request(
            method, replicas.owner.http_url + path, headers=shown, json={"run": "r"}, trust_env=False
        )
        assert response.status_code == expected


def test_a_call_is_passed_on_once(replicas: Replicas) -> None:
    viewer, method = replicas.tokens["viewer"], next(method for method in METHODS if method.name == "GetRun")
    assert get(replicas.other, "/v1/runs/r", {"authorization": f"Bearer {viewer}"}).status_code == 200
    # As it comes from a peer that took this replica for the owner.
    marked = {MARK: replicas.other_secret, CAME_FROM: "10.0.0.7"}
    response = get(replicas.other, "/v1/runs/r", marked | {"authorization": f"Bearer {viewer}"})
    assert response.status_code == 503
    assert "the run is moving to another replica" in response.json()["error"]["message"]
    with grpc.insecure_channel(replicas.other.grpc_address) as channel:
        assert status(channel, method, viewer) == "OK"
        assert status(channel, method, viewer, marked) == "UNAVAILABLE"


def test_callers_whose_calls_a_peer_passes_on_make_up_for_their_own_refusals_alone(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four calls are free, however long they take here.
    for name, value in (("_UNMEASURED_S", 0.05), ("_LONGEST_DELAY_S", 0.05)):
        monkeypatch.setattr(admission, name, value)
    slots = replicas.owner._api.admission
    monkeypatch.setattr(slots, "_wrong_of_connection", Allowance(1 / 200, 0.2, 0.5, 0.05))
    monkeypatch.setattr(slots, "_wrong_of_caller", Allowance(1, 100, 100))
    viewer = replicas.tokens["viewer"]
    shown = {"authorization": f"Bearer {viewer}"}
    with httpx.Client(base_url=replicas.owner.http_url, trust_env=False) as client:
        greedy = replicas.passed_on("10.0.0.7", **shown)
        statuses = [client.post("/v1/runs/r/finish", headers=greedy).status_code for _ in range(10)]
        assert (statuses[0], statuses[-1]) == (403, 429)
        assert client.get("/v1/runs/r", headers=replicas.passed_on("10.0.0.8", **shown)).status_code == 200
    finish, look = ({method.name: method for method in METHODS}[name] for name in ("FinishRun", "GetRun"))
    with grpc.insecure_channel(replicas.owner.grpc_address) as channel:
        greedy = replicas.passed_on("ipv4:10.0.0.7:1")
        codes = [status(channel, finish, viewer, greedy) for _ in range(10)]
        assert (codes[0], codes[-1]) == ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
        assert status(channel, look, viewer, replicas.passed_on("ipv4:10.0.0.7:2")) == "OK"


def test_a_request_is_passed_on_byte_for_byte(replicas: Replicas) -> None:
    headers = [
        (b"authorization", f"Bearer {replicas.tokens['viewer']}".encode()),
        (b"x-twice", b"first"),
        (b"x-twice", b"second"),
        (b"x-note", b"\xe9\xff"),
        (b"x-request-id", b"mine-1"),
        (b"sec-fetch-site", b"same-origin"),
    ]
    for service in (replicas.owner, replicas.other):
        response = httpx.get(f"{service.http_url}/v1/runs/r", headers=headers, trust_env=False)
        assert (response.status_code, response.headers["x-request-id"]) == (200, "mine-1")


def test_what_a_page_of_the_service_sends_is_passed_on(replicas: Replicas) -> None:
    asked = {"authorization": f"Bearer {replicas.tokens['admin']}", "sec-fetch-site": "same-origin"}
    for service in (replicas.owner, replicas.other):
        origin = {"origin": service.http_url, **asked}
        body = {"round": 0, "uids": ["nobody"], "reason": "test"}
        response = httpx.post(f"{service.http_url}/v1/runs/r/groups:abort", headers=origin, json=body, trust_env=False)
        assert response.status_code == 404, "it reached the run, which has no such group"
        foreign = {**origin, "origin": "https://elsewhere.example"}
        response = httpx.post(f"{service.http_url}/v1/runs/r/groups:abort", headers=foreign, json=body, trust_env=False)
        assert response.status_code == 403


def test_replicas_without_tokens_reach_each_other_under_the_name_that_they_advertise(
    serve: Serve, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis", appendonly="no") as redis:
        settings = {"store": "redis", "redis_url": redis.url, "http_host_names": "*.example.org"}
        owner = serve(**settings, advertise_http_url="http://one.localtest.example:1")
        assert owner.http_url
        for host, expected in (("one.localtest.example", 404), ("two.localtest.example", 421)):
            assert get(owner, "/v1/runs/none", {"host": host}).status_code == expected


@pytest.mark.parametrize("url", ["gristmill:8080", "http://", "http://[x", "ftp://a"])
def test_a_url_to_advertise_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="advertise_http_url"):
        load_settings({"advertise_http_url": url})


def test_the_secret_of_a_replica_is_in_no_log(start_service: StartService, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendonly="no") as redis:
        flags = ["--store", "redis", "--redis-url", redis.url, "--log-level", "debug"]
        owner, other = start_service(*flags), start_service(*flags)
        with RolloutClient(owner.grpc_address, "r") as client:
            client.create_run(CONFIG)
        with RolloutClient(other.grpc_address, "r") as client:
            assert client.begin_groups(["a"], wait_s=0) == ["a"]
        assert httpx.get(f"{other.http_url}/v1/runs/r", trust_env=False).status_code == 200
        secret = secret_of(redis, "r")
        assert [service.stop() for service in (owner, other)] == [0, 0]
    assert len(secret) > 40
    assert not any(secret in service.log.read_text() for service in (owner, other))
