"""A request that does not come whole is not used: sent over a bare socket, and cut before its end."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import load, save

from gristmill.v1 import rows_pb2
from tests.api.apis import CONFIG, HttpApi, group, row, rows_message
from tests.on_loop import Service

PROTOBUF = "application/x-protobuf"


@pytest.fixture
def run(http_api: HttpApi, run_name: str) -> str:
    http_api.create(run_name, CONFIG)
    return run_name


@pytest.fixture
def wire(service: Service) -> Iterator[socket.socket]:
    where = urlsplit(service.http_url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as opened:
        yield opened


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


def cut(wire: socket.socket, data: bytes, *, half_closed: bool) -> None:
    """Sends the data and no more. Half closed, the sender still listens, and reads until the service hangs up."""
    wire.sendall(data)
    if half_closed:
        wire.shutdown(socket.SHUT_WR)
        wire.settimeout(10)
        while wire.recv(4096):
            pass
    else:
        time.sleep(0.1)
        wire.close()


def settled(api: HttpApi, run: str) -> dict[str, object]:
    """The run's state once the service has seen that the caller is gone."""
    time.sleep(0.3)
    return api.get(run)


@pytest.mark.parametrize("half_closed", [True, False], ids=["half_closed", "closed"])
class TestNothingOfACutRequestIsUsed:
    @pytest.mark.parametrize("sent", [b"", b'{"batch"'], ids=["nothing", "a_part"])
    def test_seal_without_its_body_seals_nothing(
        self, http_api: HttpApi, run: str, wire: socket.socket, half_closed: bool, sent: bytes
    ) -> None:
        http_api.submit(run, group("a"))
        headers = ("Content-Type: application/json", "Content-Length: 11")
        cut(wire, head(f"/v1/runs/{run}/seal", *headers) + sent, half_closed=half_closed)
        assert settled(http_api, run)["batches_sealed"] == 0

    @pytest.mark.parametrize("kind", ["declared", "chunked", "chunked_after_a_chunk"])
    def test_rows_cut_before_their_masks_are_not_taken_and_come_whole_later(
        self, http_api: HttpApi, run: str, wire: socket.socket, half_closed: bool, kind: str
    ) -> None:
        whole = rows_message([row("p", 0, loss_mask=[1, 0])])
        tail = rows_pb2.Rows(loss_mask=whole.loss_mask).SerializeToString()
        whole.ClearField("loss_mask")
        first = whole.SerializeToString()
        path = f"/v1/runs/{run}/rows"
        if kind == "declared":
            request = head(path, f"Content-Type: {PROTOBUF}", f"Content-Length: {len(first) + len(tail)}") + first
        else:
            chunk = b"%x\r\n%s\r\n" % (len(first), first)
            rest = b"%x\r\n" % len(tail) if kind == "chunked" else b""
            request = head(path, f"Content-Type: {PROTOBUF}", "Transfer-Encoding: chunked") + chunk + rest
        cut(wire, request, half_closed=half_closed)
        assert settled(http_api, run)["rows_accepted"] == 0
        answer = http_api.client.post(path, content=first + tail, headers={"content-type": PROTOBUF})
        assert (answer.status_code, answer.json()) == (200, {"outcomes": ["accepted"]})

    def test_whole_rows_of_a_body_that_is_not_whole_are_not_taken(
        self, http_api: HttpApi, run: str, wire: socket.socket, half_closed: bool
    ) -> None:
        body = json.dumps({"rows": group("a")}).encode()
        headers = ("Content-Type: application/json", f"Content-Length: {len(body) + 1}")
        cut(wire, head(f"/v1/runs/{run}/rows", *headers) + body, half_closed=half_closed)
        assert settled(http_api, run)["rows_accepted"] == 0

    def test_columns_of_a_body_that_is_not_whole_are_not_written(
        self, http_api: HttpApi, run_name: str, wire: socket.socket, half_closed: bool
    ) -> None:
        columns = [{"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}]
        http_api.create(run_name, {**CONFIG, "advantage_estimator": "gae", "columns": columns})
        for uid in "ab":
            http_api.submit(run_name, group(uid))
        before = http_api.batch(run_name, 0, wait_s=20.0)
        mask = load(http_api.read(run_name, 0, 0, 0))["response_mask"]
        body = save({"values": mask.astype(np.float32)})
        path = f"/v1/runs/{run_name}/batches/0/policy/0/0?incarnation=1"
        headers = ("Content-Type: application/octet-stream", f"Content-Length: {len(body) + 1}")
        cut(wire, head(path, *headers, method="PUT") + body, half_closed=half_closed)
        settled(http_api, run_name)
        assert http_api.batch(run_name, 0) == before
        assert http_api.write(run_name, (0, 0, 0), 1, body) == len(before["awaits"]) - 1


def test_a_gzip_body_that_ends_early_or_goes_on_is_refused(http_api: HttpApi, run: str) -> None:
    packed = gzip.compress(json.dumps({"rows": group("a")}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for body, reason in (
        (packed[:-1], "is incomplete: it ends after"),
        (packed + gzip.compress(b" "), "bytes after its end"),
    ):
        answer = http_api.client.post(f"/v1/runs/{run}/rows", content=body, headers=headers)
        assert answer.status_code == 422
        assert reason in answer.json()["error"]["message"]
    assert http_api.get(run)["rows_accepted"] == 0
    answer = http_api.client.post(f"/v1/runs/{run}/rows", content=packed, headers=headers)
    assert answer.json() == {"outcomes": ["accepted"] * 4}
