"""What a caller's runs may hold, beside what everyone's may."""

from __future__ import annotations

from pathlib import Path

import httpx
import yaml

from gristmill_service.access.tokens import create_token
from gristmill_service.service import Service
from tests.access.conftest import Serve
from tests.api.doors import CONFIG, group


def limited(path: Path, name: str, runs: str, **quota: object) -> dict[str, str]:
    """The header of a caller who may have this much."""
    token = create_token(path, name, ["worker"], [runs], None)
    document = yaml.safe_load(path.read_text())
    document["tokens"][-1] |= quota
    path.write_text(yaml.safe_dump(document))
    return {"authorization": f"Bearer {token}"}


def post(service: Service, path: str, body: object, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{service.http_url}/v1/runs{path}", json=body, headers=headers, trust_env=False)


def test_a_caller_has_no_more_runs_than_its_token_says(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    team, other = limited(path, "team", "team-*", max_runs=2), limited(path, "other", "*")
    service = serve(tokens_file=path)
    for name in ("team-1", "team-2", "team-1"):
        assert post(service, "", {"run": name, "config": CONFIG}, team).status_code == 200, "again is no other run"
    refused = post(service, "", {"run": "team-3", "config": CONFIG}, team)
    assert refused.status_code == 429
    assert "team may have 2 runs of the names team-*, and there are 2" in refused.json()["error"]["message"]
    assert post(service, "", {"run": "free", "config": CONFIG}, other).status_code == 200


def test_a_caller_brings_no_more_rows_than_its_token_says(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    team, other = limited(path, "team", "team-*", max_row_bytes="4KiB"), limited(path, "other", "free")
    service = serve(tokens_file=path)
    for name, headers in (("team-1", team), ("team-2", team), ("free", other)):
        post(service, "", {"run": name, "config": CONFIG}, headers)
    assert post(service, "/team-1/rows", {"rows": [*group("a"), *group("b")]}, team).status_code == 200
    for call, body in (("rows", {"rows": group("c")}), ("groups", {"uids": ["d"]})):
        refused = post(service, f"/team-2/{call}", body, team)
        assert refused.status_code == 429
        assert "raise max_row_bytes of the token" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert post(service, f"/free/{call}", body, other).status_code == 200


def test_a_service_has_no_more_runs_than_it_is_told(serve: Serve) -> None:
    service = serve(max_runs=1)
    for _ in range(2):
        assert post(service, "", {"run": "a", "config": CONFIG}, {}).status_code == 200
    refused = post(service, "", {"run": "b", "config": CONFIG}, {})
    assert "there are 1 runs and max_runs allows 1" in refused.json()["error"]["message"]
    httpx.delete(f"{service.http_url}/v1/runs/a")
    assert post(service, "", {"run": "b", "config": CONFIG}, {}).status_code == 200
