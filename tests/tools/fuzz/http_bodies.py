"""Bodies of the HTTP API, as its own description has them, given to the application without a network."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from random import Random
from typing import Any

from fastapi import FastAPI

from gristmill.errors import InvalidArgumentError
from gristmill_service.access.gate import Gate
from gristmill_service.api.admission import Admission, Limits
from gristmill_service.api.context import ApiContext
from gristmill_service.api.http.app import make_app
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.settings import load_settings
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import Runs, on_loop
from tests.rows import make_row
from tests.tools.fuzz.configurations import _BASE
from tests.tools.fuzz.mutate import changed_bytes, changed_document
from tests.tools.fuzz.targets import Target

_ROW = make_row(response=[3], rollout_logprobs=[-0.5], policy_versions=[1])
_PLACE = {"batch": 0, "epoch": 0, "mini_batch": 0}
_BODIES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/runs", {"run": "r", "config": _BASE}),
    ("POST", "/v1/runs/r/groups", {"uids": ["a", "b"], "n_samples": [2, 2], "tag": ["x", "y"], "round": 1}),
    ("POST", "/v1/runs/r/rows", {"rows": [_ROW, _ROW | {"sample": 1}]}),
    ("POST", "/v1/runs/r/rewards", {"rewards": [{"uid": "a", "sample": 0, "step": 0, "reward": [1.0]}]}),
    ("POST", "/v1/runs/r/trajectories:abort", {"trajectories": [{"uid": "a", "sample": 0}], "reason": "x"}),
    ("POST", "/v1/runs/r/groups:abort", {"uids": ["b"], "round": 0, "reason": "x"}),
    ("POST", "/v1/runs/r/seal", {"batch": 0}),
    ("PUT", "/v1/runs/r/policy-version", {"version": 1}),
    ("POST", "/v1/runs/r/ack", {"model": "policy", "rank": 0, "position": _PLACE, "incarnation": 0, "commit": True}),
    ("POST", "/v1/runs/r/commit", {"model": "policy", "position": _PLACE}),
    ("POST", "/v1/runs/r/resume", {"position": _PLACE, "launch": "l", "dp_size": 2, "give_up_reason": "x"}),
    ("POST", "/v1/session", {"token": "x"}),
    ("GET", "/v1/runs/r/shards?rank=0&batch=0&epoch=0&mini_batch=0&wait_s=0", None),
    ("GET", "/v1/runs/r/timeline?seconds=5", None),
    ("GET", "/v1/runs/r/batches/0/policy/0/0", None),
    ("DELETE", "/v1/runs/r", None),
]


def _seeds() -> list[bytes]:
    return [f"{method} {path}\n".encode() + json.dumps(body).encode() for method, path, body in _BODIES]


def _change(random: Random, data: bytes) -> bytes:
    line, _, body = data.partition(b"\n")
    if b"?" in line or random.random() < 0.1:
        method, _, path = line.partition(b" ")
        changed = bytes(one for one in changed_bytes(random, path[1:]) if 32 < one < 127)
        return method + b" /" + changed + b"\n" + body
    if random.random() < 0.1:
        return line + b"\n" + changed_bytes(random, body)
    return line + b"\n" + json.dumps(changed_document(random, json.loads(body))).encode()


class _Service:
    """The application, with a run in memory."""

    def __init__(self) -> None:
        self._runs = Runs(MemoryShardStore(), max_row_bytes=1 << 26, make_monitor=Monitor)
        self._app = on_loop(self._make)
        self._count = 0

    def _make(self) -> FastAPI:
        runs, settings = self._runs._target, load_settings({})
        gate, admission = Gate(settings, runs), Admission(Limits(waits=4))
        return make_app(ApiContext(runs, admission, LongPoll(), Metrics(), 1 << 20, gate, not_ready=""))

    def answer(self, method: str, path: str, body: bytes) -> int:
        """The status."""
        self._count += 1
        if self._count % 500 == 1:
            for name in self._runs.names():
                self._runs.delete(name)
        if "r" not in self._runs.names():
            self._runs.create("r", _BASE | {"max_buffered_bytes": 1 << 24})
        status: int = on_loop(self._answer, method, path, body)
        return status

    async def _answer(self, method: str, path: str, body: bytes) -> int:
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }
        sent = [{"type": "http.request", "body": body, "more_body": False}]
        status = 0

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()
            raise AssertionError("waits for ever")

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await self._app(scope, receive, send)
        return status


@cache
def _service() -> _Service:
    return _Service()


def _read(data: bytes) -> None:
    line, _, body = data.partition(b"\n")
    method, _, path = line.decode("ascii").partition(" ")
    status = _service().answer(method, path, body if method in ("POST", "PUT") else b"")
    assert status < 500 or status == 503, f"answered {status}"
    if status >= 400:
        raise InvalidArgumentError(f"answered {status}")


BODIES = Target("http_bodies", _seeds, _change, _read)
