"""A person signs in to the page with a token, which no script of the page can read; what was done is logged."""

from __future__ import annotations

import gzip
import time
from typing import Any

import grpc
import httpx
import pytest
import structlog

from gristmill.v1 import run_pb2, run_pb2_grpc
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
        # Nobody else of these tests is refused this: like lines within a second are counted, not written.
        for name in ("admin", "scraper"):
            httpx.delete(url, headers={"authorization": f"Bearer {guarded.tokens[name]}"}, trust_env=False)
    logged = [(line["event"], line["caller"], line["call"], line["target"]) for line in lines if "target" in line]
    assert logged == [("allowed", "admin", "delete_run", "math-9"), ("refused", "scraper", "delete_run", "math-9")]
    assert not any(token in str(lines) for token in guarded.tokens.values())


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/healthz", "/readyz"])
def test_a_browser_whose_token_was_withdrawn_still_reaches_the_page(browser: httpx.Client, path: str) -> None:
    with browser:
        assert browser.get(path, headers={"cookie": "gristmill_token=withdrawn"}).status_code == 200
        assert browser.get(path, headers={"authorization": "Bearer withdrawn"}).status_code == 200


def test_a_browser_whose_token_was_withdrawn_signs_in_and_out_again(guarded: Guarded, browser: httpx.Client) -> None:
    stale = {"cookie": "gristmill_token=withdrawn"}
    with browser:
        assert browser.get("/v1/overview", headers=stale).status_code == 401
        assert browser.post("/v1/session", headers=stale, json={"token": guarded.tokens["viewer"]}).status_code == 200
        assert browser.delete("/v1/session", headers=stale).status_code == 204


def test_cookies_of_other_programs_are_passed_over(guarded: Guarded, browser: httpx.Client) -> None:
    cookie = f'{{"a": 1}}=b; c="d; gristmill_token={guarded.tokens["viewer"]}'
    with browser:
        assert browser.get("/v1/overview", headers={"cookie": cookie}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/v1/overview"])
@pytest.mark.parametrize("name", ["other", "gristmill_token"])
def test_cookies_take_no_time_however_they_are_quoted(browser: httpx.Client, name: str, path: str) -> None:
    cookie = name + '="' + '\\"' * 25_000 + '"'
    began = time.process_time()
    with browser:
        browser.get(path, headers={"cookie": cookie})
    assert time.process_time() - began < 1.0, "it is quadratic in some versions of Python, and took 5 s"


@pytest.mark.parametrize(
    "content", [b'"gristmill_misplaced"', b"token=gristmill_misplaced", b'{"token": ["gristmill_misplaced"]}']
)
def test_a_token_in_the_wrong_place_is_not_repeated(browser: httpx.Client, content: bytes) -> None:
    with browser, structlog.testing.capture_logs() as lines:
        response = browser.post("/v1/session", content=content)
    assert response.status_code == 422
    assert "misplaced" not in response.text
    assert "misplaced" not in str(lines)


@pytest.mark.parametrize("is_packed", [False, True])
def test_of_callers_who_are_not_known_little_is_read(browser: httpx.Client, is_packed: bool) -> None:
    content = b" " * 100_000
    headers = {"content-encoding": "gzip"} if is_packed else {}
    with browser:
        response = browser.post(
            "/v1/session", content=gzip.compress(content) if is_packed else content, headers=headers
        )
    assert response.status_code == 413
    assert "the limit for a caller without a valid token" in response.text


def test_a_name_of_megabytes_is_cut_in_the_log(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.service.grpc_address) as channel, structlog.testing.capture_logs() as lines:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        shown = (("authorization", f"Bearer {guarded.tokens['viewer']}"),)
        with pytest.raises(grpc.RpcError):
            stub.CreateRun(run_pb2.CreateRunRequest(run="x" * 1_000_000), metadata=shown)
    (refused,) = [line for line in lines if line["event"] == "refused"]
    assert refused["target"] == "x" * 200
    assert len(str(refused)) < 1000
