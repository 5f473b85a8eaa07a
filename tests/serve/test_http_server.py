"""The HTTP server by itself: what becomes of its start."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest
from fastapi import FastAPI

from gristmill.errors import UnavailableError
from gristmill_service.api.http.server import HttpServer
from tests.on_loop import on_loop


def test_it_answers_once_it_has_started() -> None:
    server = on_loop(HttpServer, FastAPI(), "127.0.0.1:0", 1.0)
    on_loop(server.start)
    try:
        assert httpx.get(f"{server.url}/openapi.json").status_code == 200
    finally:
        server.refuse_new_calls()
        on_loop(server.wait_until_idle)


def test_a_start_that_fails_is_reported_and_keeps_nobody_waiting() -> None:
    server = on_loop(HttpServer, FastAPI(), "127.0.0.1:0", 1.0)
    server.close()
    with pytest.raises(UnavailableError, match=r"the HTTP server at http://127\.0\.0\.1:\d+ cannot start"):
        on_loop(server.start)
    server.refuse_new_calls()
    on_loop(server.wait_until_idle)


def test_a_server_that_never_started_keeps_nobody_waiting() -> None:
    server = on_loop(HttpServer, FastAPI(), "127.0.0.1:0", 1.0)
    with closing(server):
        on_loop(server.wait_until_idle)
