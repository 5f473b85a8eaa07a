"""Connections to the engine: kept from call to call, and not held against an agent when they are gone."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.on_loop import Service
from tests.recorder.broken import BrokenEngine, breaking, chunk, completion, streamed, whole
from tests.recorder.engine import END
from tests.recorder.recorders import Recorder, StartRecorder, post

BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def broken() -> Iterator[BrokenEngine]:
    with breaking() as engine:
        engine.answer, engine.keeps = whole(completion()), True
        yield engine


def ask(recorder: Recorder, run: str) -> int:
    return post(f"{recorder.base(run)}/v1/chat/completions", BODY)[0]


def resident(recorder: Recorder) -> int:
    """Bytes of memory."""
    return int(Path(f"/proc/{recorder.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_connection_serves_one_call_after_another(
    broken: BrokenEngine, start_recorder: StartRecorder, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    assert [ask(recorder, run) for _ in range(5)] == [200] * 5
    assert broken.connections == 1
    recorder.kill()


def test_an_agent_that_asks_first_is_answered_to_send_its_call(
    broken: BrokenEngine, start_recorder: StartRecorder, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    where, body = urlsplit(f"{recorder.base(run)}/v1/chat/completions"), json.dumps(BODY).encode()
    head = f"POST {where.path} HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1 << 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 200 OK\r\n")
    recorder.kill()


def test_a_query_reaches_the_engine_as_the_agent_wrote_it(
    broken: BrokenEngine, start_recorder: StartRecorder, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    query = "note=a%20b%0d%0ax-forged:%201&n=%26"
    assert post(f"{recorder.base(run)}/v1/chat/completions?{query}", BODY)[0] == 200
    line, *headers = broken.heads[0].split(b"\r\n")
    assert line.decode() == f"POST /v1/chat/completions?{query} HTTP/1.1"
    assert not [header for header in headers if header.startswith(b"x-forged")]
    recorder.kill()


@pytest.mark.parametrize(
    "answer",
    [
        whole(completion()) + b"more",
        whole(completion(), "connection: close"),
        whole(completion(token_ids=[1.5])),
    ],
    ids=["more than asked for", "closed", "an answer that is refused"],
)
def test_a_connection_that_may_have_more_is_not_used_again(
    broken: BrokenEngine, start_recorder: StartRecorder, service: Service, run: str, answer: bytes
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    broken.answer = answer
    ask(recorder, run)
    broken.answer = whole(completion())
    assert ask(recorder, run) == 200
    # An answer that was read whole leaves its connection as good as new, whatever it said.
    assert broken.connections == (1 if answer == whole(completion(token_ids=[1.5])) else 2)
    recorder.kill()


def test_an_engine_that_was_started_again_is_called_at_the_next_try(
    broken: BrokenEngine, start_recorder: StartRecorder, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    assert ask(recorder, run) == 200
    # It closes the connection when the next call is on its way: nobody knows what became of that one.
    broken.answer, broken.keeps = b"", False
    status, document = post(f"{recorder.base(run)}/v1/chat/completions", BODY)
    assert (status, "Server disconnected" in document["error"]["message"]) == (502, True)
    broken.answer = whole(completion())
    assert ask(recorder, run) == 200
    recorder.kill()


def test_an_agent_that_reads_slowly_holds_its_engine_back_and_gets_all(
    broken: BrokenEngine, start_recorder: StartRecorder, service: Service, run: str
) -> None:
    texts = [f"{number:06}" * 2000 for number in range(4000)]
    chunks = [chunk(text, [7]) for text in texts]
    broken.answer = streamed(chunk(prompt_token_ids=[1]), *chunks, chunk("", [END], "stop"), b"data: [DONE]\n\n")
    recorder = start_recorder(broken.url, service.grpc_address)
    before = resident(recorder)
    where = urlsplit(recorder.base(run))
    connection = http.client.HTTPConnection(where.netloc, timeout=60)
    connection.request("POST", f"{where.path}/v1/chat/completions", json.dumps({**BODY, "stream": True}))
    with connection.getresponse() as answer:
        time.sleep(1)
        held = resident(recorder) - before
        events = answer.read().split(b"\n\n")
    connection.close()
    texts_sent = [
        json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events if event.startswith(b"data: {")
    ]
    assert texts_sent == ["", *texts, ""]
    assert held < 20 << 20, "of 48 MB"
    assert recorder.finish(run)["steps"] == 1
    recorder.kill()


def test_an_engine_behind_tls_is_called_if_its_certificate_is_trusted(
    start_recorder: StartRecorder, service: Service, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with breaking(context) as engine:
        engine.answer = whole(completion())
        stranger = start_recorder(engine.url, service.grpc_address)
        status, document = post(f"{stranger.base(run)}/v1/chat/completions", BODY)
        assert (status, "CERTIFICATE_VERIFY_FAILED" in document["error"]["message"]) == (502, True)
        stranger.kill()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        friend = start_recorder(engine.url, service.grpc_address)
        assert ask(friend, run) == 200
        friend.kill()
