"""Measures for how long the event loop answers nobody while it gets the largest requests of every method and route."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
import httpx

from gristmill.v1 import run_pb2
from gristmill_service.access.tokens import digest_of
from tests.tools.bench import largest
from tests.tools.bench.figures import Figure
from tests.tools.bench.heartbeats import Beating, Beats, beating
from tests.tools.bench.largest import MESSAGE_BYTES, Request

_NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_CALLERS = 500


class Stall(NamedTuple):
    request: Request
    beats: Beats
    status: str


class Sender:
    """Sends requests to a service, each as a caller that was never refused, so that none is throttled."""

    def __init__(self, service: Beating, tokens: Sequence[str]) -> None:
        self._service, self._tokens, self._number = service, tokens, count()
        self._where = urlsplit(service.http_url).netloc

    def send(self, request: Request) -> str:
        """Returns the status."""
        token = self._tokens[next(self._number) % len(self._tokens)]
        return self._post(request, token) if request.url else self._call(request, token)

    def _call(self, request: Request, token: str) -> str:
        with grpc.insecure_channel(self._service.grpc_address, _NO_LIMIT) as channel:
            is_stream = largest.methods()[request.way].server_streaming
            call: Any = (channel.unary_stream if is_stream else channel.unary_unary)(request.way)
            try:
                answer = call(request.body, timeout=60, metadata=(("authorization", f"Bearer {token}"),))
                if is_stream:
                    list(answer)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def _post(self, request: Request, token: str) -> str:
        connection = http.client.HTTPConnection(self._where, timeout=60)
        headers = {"authorization": f"Bearer {token}"} | ({"content-type": request.kind} if request.body else {})
        try:
            connection.request(request.way.partition(" ")[0], request.url, request.body or None, headers)
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except OSError as error:
            return type(error).__name__
        finally:
            connection.close()


def _entry(token: str) -> dict[str, Any]:
    roles = ["worker", "trainer", "data_reader", "scraper"]
    return {"name": token, "sha256": digest_of(token), "roles": roles, "runs": ["*"]}


class Stalls:
    """A service, and what its loop does. Use it as a context manager."""

    def __init__(self, message_bytes: int = MESSAGE_BYTES) -> None:
        self._message_bytes = message_bytes

    def __enter__(self) -> Stalls:
        self._opened = ExitStack()
        path = Path(self._opened.enter_context(tempfile.TemporaryDirectory())) / "tokens.yaml"
        tokens = [f"token-{number}" for number in range(_CALLERS)]
        path.write_text(json.dumps({"tokens": [_entry(token) for token in tokens]}))
        settings = {"tokens_file": path, "max_message_bytes": self._message_bytes, "max_row_bytes": 4 << 30}
        self.service = self._opened.enter_context(beating(settings))
        self.sender = Sender(self.service, tokens)
        create = run_pb2.CreateRunRequest(run=largest.RUN, config_json=json.dumps(largest.SETTINGS))
        way = "/gristmill.v1.RunService/CreateRun"
        assert self.sender.send(Request(way, "", create.SerializeToString())) == "OK"
        self.description = httpx.get(
            f"{self.service.http_url}/openapi.json",
            headers={"authorization": f"Bearer {tokens[0]}"},
            trust_env=False,
            timeout=60,
        ).json()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def refused(self) -> Iterator[Request]:
        for path in largest.methods():
            yield from largest.refused_messages(path)
        for way, operation in largest.routes(self.description):
            yield from largest.refused_documents(way, operation, self.description)

    def accepted(self, number: int) -> Iterator[Request]:
        paths = {path.rpartition("/")[2]: path for path in largest.methods()}
        for name in largest.ACCEPTED:
            yield from largest.accepted_messages(paths[name], number)

    def of(self, request: Request) -> Stall:
        self.service.read()
        status = self.sender.send(request)
        return Stall(request, self.service.read(), status)

    def at_once(self, requests: Sequence[Request]) -> Beats:
        return _at_once(self.service, self.sender, requests)


def _at_once(service: Beating, sender: Sender, requests: Sequence[Request]) -> Beats:
    service.read()
    threads = [threading.Thread(target=sender.send, args=(one,)) for one in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return service.read()


# --- Figures

_AT_ONCE, _LARGE_BYTES = 8, 64 * largest.MIB


def figures() -> Iterator[Figure]:
    """The longest gap is of processor time, so that a busy machine does not count; the elapsed time is next to it."""
    with Stalls() as stalls:
        alone = [*map(stalls.of, stalls.accepted(1))]
        at_once = [*map(stalls.at_once, zip(*map(stalls.accepted, range(2, 2 + _AT_ONCE)), strict=True))]
        for request in stalls.refused():
            alone.append(stalls.of(request))
            if alone[-1].beats.computed_s > 0.01:
                at_once.append(stalls.at_once([request] * _AT_ONCE))
    yield _gap("stalls.gap_ms", [stall.beats for stall in alone], 50.0)
    yield _gap("stalls.gap_of_eight_ms", at_once, 150.0)
    for name, reach, is_json in (("stalls.memory_ratio", 8.0, False), ("stalls.memory_of_json_rows_ratio", 12.0, True)):
        of_kind = [stall for stall in alone if stall.request.way.endswith("/rows") is is_json]
        ratios = [stall.beats.added / max(len(stall.request.body), 16 * largest.MIB) for stall in of_kind]
        yield Figure(name, max(ratios), "x bytes", reach)
    yield from _large()


def _gap(name: str, beats: Sequence[Beats], reach: float) -> Figure:
    worst = max(beats, key=lambda one: one.computed_s)
    return Figure(name, 1e3 * worst.computed_s, "ms", reach, 1e3 * worst.gap_s, "ms elapsed")


def _large() -> Iterator[Figure]:
    """Yields the gaps of messages of 64 MiB, and bodies, compared with a server that drops them."""
    with Stalls(_LARGE_BYTES) as stalls, beating(None) as bare:
        dropping = Sender(bare, ["nobody"])
        for count in (1, _AT_ONCE):
            for name, requests in largest.large(_LARGE_BYTES, count):
                gaps = [
                    [_at_once(service, sender, requests).computed_s for _ in range(3)]
                    for service, sender in ((stalls.service, stalls.sender), (bare, dropping))
                ]
                ours, theirs = map(min, gaps)
                yield Figure(f"stalls.{name}_of_{count}_over_bare", ours / theirs, "x bare", 1.3, 1e3 * theirs, "ms")
