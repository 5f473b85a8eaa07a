"""A proxy that people sign in to says who they are; nobody else may."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import yaml

from gristmill.errors import InvalidArgumentError
from gristmill_service.access.tokens import create_token
from gristmill_service.settings import load_settings
from tests.access.conftest import Serve
from tests.access.issuer import SUBJECT, Issuer
from tests.api.apis import CONFIG

USERS = "proxy_users: [{user: '*@example.org', roles: [viewer], runs: ['math-*']}]"
USER = "X-Forwarded-User"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tokens_file = tmp_path / "tokens.yaml"
    tokens_file.write_text(USERS)
    return tokens_file


def test_whom_the_proxy_names_may_what_the_file_says(serve: Serve, path: Path) -> None:
    token = create_token(path, "admin", ["admin"], ["*"], None)
    service = serve(tokens_file=path, proxy_user_header=USER)
    for name in ("math-1", "other"):
        service.runs.create(name, CONFIG)

    def get(run: str, **headers: str) -> int:
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(f"{service.http_url}/v1/runs/{run}", headers=shown, trust_env=False).status_code

    assert get("math-1", X_Forwarded_User="ann@example.org") == 200
    assert get("other", X_Forwarded_User="ann@example.org") == 403
    assert get("math-1", X_Forwarded_User="ann@elsewhere.example") == 401
    assert get("math-1") == 401
    assert get("other", X_Forwarded_User="ann@example.org", Authorization=f"Bearer {token}") == 200, "a token counts"
    assert get("math-1", X_Forwarded_User="ann@example.org", Authorization="Bearer wrong") == 401


def test_the_header_counts_for_nothing_from_other_addresses_or_where_it_is_not_configured(
    serve: Serve, path: Path
) -> None:
    for settings in ({"proxy_user_header": USER, "proxy_addresses": "10.0.0.0/8, ::1"}, {}):
        service = serve(tokens_file=path, **settings)
        service.runs.create("math-1", CONFIG)
        shown = {USER: "ann@example.org", "X-Forwarded-For": "10.0.0.1"}
        assert httpx.get(f"{service.http_url}/v1/runs/math-1", headers=shown, trust_env=False).status_code == 401


def test_a_user_and_a_subject_of_the_same_name_are_apart(serve: Serve, tmp_path: Path) -> None:
    path, issuer = tmp_path / "tokens.yaml", Issuer(tmp_path)
    subjects, users = [{"subject": SUBJECT, "roles": ["admin"]}], [{"user": "ann", "roles": ["viewer"]}]
    path.write_text(yaml.safe_dump({"subjects": subjects, "proxy_users": users}))
    issued = {"jwks": str(issuer.path), "jwt_issuer": "https://issuer", "jwt_audience": "gristmill"}
    service = serve(tokens_file=path, proxy_user_header=USER, **issued)

    def get(**headers: str) -> httpx.Response:
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(f"{service.http_url}/v1/runs", headers=shown, trust_env=False)

    assert get(Authorization=f"Bearer {issuer.token()}").status_code == 200
    assert get(X_Forwarded_User="ann").status_code == 200
    refused = get(X_Forwarded_User=SUBJECT)
    assert (refused.status_code, "add an entry under proxy_users" in refused.text) == (401, True)
    refused = get(Authorization=f"Bearer {issuer.token(sub='ann')}")
    assert (refused.status_code, "add an entry under subjects" in refused.text) == (401, True)


def test_a_request_that_names_two_users_is_refused(serve: Serve, path: Path) -> None:
    service = serve(tokens_file=path, proxy_user_header=USER)
    service.runs.create("math-1", CONFIG)
    shown = [(USER, "ann@example.org"), (USER, "eve@example.org")]
    for headers in (shown, shown[::-1]):
        response = httpx.get(f"{service.http_url}/v1/runs/math-1", headers=headers, trust_env=False)
        assert response.status_code == 401
        assert "2 headers x-forwarded-user" in response.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proxy_user_header": USER}, "proxy_user_header needs tokens_file"),
        ({"proxy_user_header": "a b", "tokens_file": "t"}, "proxy_user_header is 'a b'"),
        ({"proxy_addresses": "10.0.0.1/8"}, "has host bits set"),
    ],
)
def test_settings_of_a_proxy_that_cannot_be_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_settings(settings)
