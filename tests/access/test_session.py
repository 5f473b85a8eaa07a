"""A person signs in to the page with a token, which no script of the page can read; what was done is logged."""

from __future__ import annotations

import httpx
import pytest
import structlog

from tests.access.conftest import Guarded


@pytest.fixture
def browser(guarded: Guarded) -> httpx.Client:
    return httpx.Client(base_url=guarded.service.http_url, trust_env=False)


def test_a_browser_signs_in_and_out(guarded: Guarded, browser: httpx.Client) -> None:
    with browser:
        assert browser.get("/v1/overview").status_code == 401
        answer = browser.post("/v1/session", json={"token": guarded.tokens["viewer"]})
        assert answer.json() == {"name": "viewer", "roles": ["viewer"]}
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert browser.get("/v1/overview").status_code == 200
        assert browser.delete("/v1/runs/r").status_code == 403
        assert browser.delete("/v1/session").status_code == 204
        assert browser.get("/v1/overview").status_code == 401


def test_a_wrong_token_signs_nobody_in(browser: httpx.Client) -> None:
    with browser:
        answer = browser.post("/v1/session", json={"token": "guess"})
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


def test_another_sites_page_cannot_use_a_browser_that_signed_in(guarded: Guarded, browser: httpx.Client) -> None:
    with browser:
        browser.post("/v1/session", json={"token": guarded.tokens["admin"]})
        foreign = browser.delete("/v1/runs/r", headers={"origin": "https://elsewhere", "sec-fetch-site": "cross-site"})
        assert foreign.status_code == 403
        assert "another site" in foreign.text


def test_the_page_itself_is_shown_to_anyone(browser: httpx.Client) -> None:
    with browser:
        assert browser.get("/").status_code == 200
        assert browser.get("/page/app.js").status_code == 200


def test_who_ended_or_took_something_is_logged_and_who_was_refused(guarded: Guarded) -> None:
    url = f"{guarded.service.http_url}/v1/runs/math-9"
    with structlog.testing.capture_logs() as lines:
        for name in ("admin", "viewer"):
            httpx.delete(url, headers={"authorization": f"Bearer {guarded.tokens[name]}"}, trust_env=False)
    told = [(line["event"], line["caller"], line["call"], line["target"]) for line in lines if "caller" in line]
    assert told == [("allowed", "admin", "delete_run", "math-9"), ("refused", "viewer", "delete_run", "math-9")]
    assert not any(token in str(lines) for token in guarded.tokens.values())
