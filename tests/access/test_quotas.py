"""What a caller's runs, and any one run, may store, in addition to the limits for everyone: over both APIs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
import yaml

from gristmill import Credentials, RolloutClient
from gristmill.v1 import rollout_pb2
from gristmill_service.access.tokens import create_token
from tests.access.conftest import Serve
from tests.api.apis import CONFIG, Api, GrpcApi, HttpApi, Refused, group, row, rows_message
from tests.metrics.scraping import Scrape
from tests.on_loop import Service

ROW_BYTES = 768 + 4 * 5 + 2
APIS = [lambda service: HttpApi(service.http_url), lambda service: GrpcApi(service.grpc_address)]
either_api = pytest.mark.parametrize("open_api", APIS, ids=["http", "grpc"])


def limited(path: Path, name: str, runs: str, **quota: object) -> dict[str, str]:
    """The header of a caller who may have this much."""
    token = create_token(path, name, ["worker", "scraper"], [runs], None)
    document = yaml.safe_load(path.read_text())
    document["tokens"][-1] |= quota
    path.write_text(yaml.safe_dump(document))
    return {"authorization": f"Bearer {token}"}


def post(service: Service, path: str, body: object, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{service.http_url}/v1/runs{path}", json=body, headers=headers, trust_env=False)


def quotas(service: Service, headers: dict[str, str] | None = None) -> dict[tuple[str, str], tuple[float, float]]:
    """Of each quota and whose it is: what is taken, and what it allows."""
    scraped = Scrape(httpx.get(f"{service.http_url}/metrics", headers=headers, trust_env=False).text)
    used, limit = (
        {
            (sample.labels["quota"], sample.labels.get("run") or sample.labels["caller"]): sample.value
            for family in scraped.families
            for sample in family.samples
            if sample.name == name
        }
        for name in ("gristmill_quota_used", "gristmill_quota_limit")
    )
    return {key: (used[key], limit[key]) for key in used}


def test_a_caller_has_no_more_runs_than_its_token_says(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    team, other = limited(path, "team", "team-*", max_runs=2), limited(path, "other", "*")
    service = serve(tokens_file=path)
    for name in ("team-1", "team-2", "team-1"):
        assert post(service, "", {"run": name, "config": CONFIG}, team).status_code == 200, "again is no other run"
    refused = post(service, "", {"run": "team-3", "config": CONFIG}, team)
    assert refused.status_code == 429
    assert "2 runs named team-* exist, and max_runs of the token team is 2" in refused.json()["error"]["message"]
    assert post(service, "", {"run": "free", "config": CONFIG}, other).status_code == 200


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        (
            {"max_rows": 5},
            "the rows before it: the runs of team (team-*) store 4 rows, and max_rows of the token is 5",
        ),
        ({"max_row_bytes": "4KiB"}, "store 3176 bytes of rows, and max_row_bytes of the token is 4096"),
    ],
    ids=["rows", "bytes"],
)
def test_a_caller_brings_no_more_rows_than_its_token_says(
    serve: Serve, tmp_path: Path, quota: dict[str, object], message: str
) -> None:
    path = tmp_path / "tokens.yaml"
    team, other = limited(path, "team", "team-*", **quota), limited(path, "other", "free")
    service = serve(tokens_file=path)
    for name, headers in (("team-1", team), ("team-2", team), ("free", other)):
        post(service, "", {"run": name, "config": CONFIG}, headers)
    rows = group("a")
    assert post(service, "/team-1/rows", {"rows": rows}, team).status_code == 200
    refused = post(service, "/team-2/rows", {"rows": group("c")}, team)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert message in refused.json()["error"]["message"]
    assert post(service, "/team-1/rows", {"rows": rows}, team).json()["outcomes"] == ["duplicate"] * 4
    assert post(service, "/team-2/rows", {"rows": [row("d", 0)]}, team).status_code == 200, "that much still fits"
    api = GrpcApi(service.grpc_address)
    request = rollout_pb2.SubmitRowsRequest(run="team-2", rows=rows_message(group("e")))
    with pytest.raises(grpc.RpcError, match=r"and max_row.* of the token is"):
        api.rollouts.SubmitRows(request, metadata=tuple(team.items()))
    api.close()
    kept = httpx.get(f"{service.http_url}/v1/runs/team-2/groups", headers=team, trust_env=False).json()["groups"]
    assert [one["uid"] for one in kept] == ["d"], "nothing is kept of what was refused"
    assert post(service, "/free/rows", {"rows": group("c")}, other).status_code == 200


def test_a_caller_begins_no_more_groups_than_its_token_says(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    team = limited(path, "team", "team-*", max_groups=3)
    service = serve(tokens_file=path)
    for name in ("team-1", "team-2"):
        post(service, "", {"run": name, "config": CONFIG}, team)
    assert post(service, "/team-1/groups", {"uids": ["a", "b"]}, team).json()["admissions"] == ["admitted"] * 2
    # It is answered at once: another run's groups make room, of which this one does not hear.
    some = post(service, "/team-2/groups", {"uids": ["c", "d"], "wait_s": 30}, team).json()
    assert some["admissions"] == ["admitted", "no_room"]
    assert (
        "the runs of team (team-*) store 2 prompt groups, and max_groups of the token is 3; wait until batches "
        "are freed, abort groups, or raise max_groups of the token"
    ) in some["reason"]
    token = team["authorization"].split()[1]
    with RolloutClient(service.grpc_address, "team-2", credentials=Credentials(token=token)) as client:
        assert client.begin_groups(["c", "d"], wait_s=0) == ["c"], "what has begun may be asked for again"
        assert client.begin_groups(["e"], wait_s=0) == []
        refused = post(service, "/team-2/rows", {"rows": group("f")}, team)
        assert refused.status_code == 429
        assert "max_groups of the token is 3" in refused.json()["error"]["message"]
        assert quotas(service, team) == {("max_groups", "team"): (3, 3)}
        post(service, "/team-1/groups:abort", {"uids": ["a"], "reason": "none"}, team)
        assert client.begin_groups(["e"], wait_s=5) == ["e"]


@either_api
@pytest.mark.parametrize(
    ("setting", "value", "held"),
    [("max_run_groups", 2, 2), ("max_run_rows", 6, 4), ("max_run_row_bytes", 7 * ROW_BYTES, 4 * ROW_BYTES)],
)
def test_a_run_holds_no_more_than_the_service_lets_any(
    serve: Serve, open_api: Callable[[Service], Api], setting: str, value: int, held: int
) -> None:
    service = serve(**{setting: value})
    api = open_api(service)
    for name in ("one", "other"):
        api.create(name, {**CONFIG, "dp_size": 1})
    api.submit("one", [one for uid in ("a", "b") for one in group(uid, steps=1)])
    with pytest.raises(Refused, match=rf"run 'one' stores {held} .*service's {setting} is {value}; .* or raise the"):
        api.submit("one", [one for uid in ("c", "d") for one in group(uid, steps=1)])
    assert [one["uid"] for one in api.groups("one")] == ["a", "b"], "nothing is kept of what was refused"
    assert api.submit("one", group("a", steps=1)) == ["duplicate"] * 2
    assert quotas(service)[setting, "one"] == (held, value)
    assert api.submit("other", group("c", steps=1)) == ["accepted"] * 2
    shard = api.shard("one", 0, wait_s=30)
    api.acknowledge("one", 0, shard["position"])
    last = api.shard("one", 0, wait_s=30)
    api.acknowledge("one", 0, last["position"], commit=True)
    assert api.begin("one", ["c", "d"], wait_s=30) == ["admitted"] * 2, "the batch is freed"
    api.close()


@either_api
def test_a_run_and_a_caller_have_no_more_calls_in_flight_than_they_may(
    serve: Serve, open_api: Callable[[Service], Api]
) -> None:
    service = serve(max_run_requests=1)
    api, second = open_api(service), open_api(service)
    for name in ("one", "other"):
        api.create(name, CONFIG)
    waits = threading.Thread(target=lambda: second.policy_version("one", at_least=1, wait_s=30))
    waits.start()
    while not quotas(service):
        pass
    with pytest.raises(Refused, match="1 calls of run 'one' are in progress, and the service's max_run_requests is 1"):
        api.get("one")
    assert api.get("other")["policy_version"] == 0
    service.runs.get("one").announce(1)
    waits.join()
    assert api.get("one")["policy_version"] == 1
    for one in (api, second):
        one.close()


def test_calls_of_one_caller_in_flight_are_counted_over_both_apis(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    team, other = limited(path, "team", "*", max_requests=1), limited(path, "other", "*")
    service = serve(tokens_file=path)
    post(service, "", {"run": "run", "config": CONFIG}, team)
    token = team["authorization"].split()[1]
    with RolloutClient(service.grpc_address, "run", credentials=Credentials(token=token)) as client:
        waits = threading.Thread(target=lambda: client.wait_policy_version(1, timeout_s=30))
        waits.start()
        while quotas(service, other)["max_requests", "team"] != (1, 1):
            pass
        refused = httpx.get(f"{service.http_url}/v1/runs/run", headers=team, trust_env=False)
        assert refused.status_code == 429
        assert "calls of caller 'team' are in progress" in refused.json()["error"]["message"]
        assert httpx.get(f"{service.http_url}/v1/runs/run", headers=other, trust_env=False).status_code == 200
        assert httpx.get(f"{service.http_url}/healthz", trust_env=False).status_code == 200
        service.runs.get("run").announce(1)
        waits.join()
    assert quotas(service, other)["max_requests", "team"] == (0, 1)


def test_a_service_has_no_more_runs_than_it_is_configured_for(serve: Serve) -> None:
    service = serve(max_runs=1)
    for _ in range(2):
        assert post(service, "", {"run": "a", "config": CONFIG}, {}).status_code == 200
    refused = post(service, "", {"run": "b", "config": CONFIG}, {})
    assert "1 runs exist, and max_runs is 1" in refused.json()["error"]["message"]
    httpx.delete(f"{service.http_url}/v1/runs/a")
    assert post(service, "", {"run": "b", "config": CONFIG}, {}).status_code == 200
