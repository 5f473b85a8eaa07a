"""Connections to the engine: kept from call to call, and not held against an agent when they are gone."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from gristmill_service.service import Service
from tests.recorder.broken import BrokenEngine, breaking, completion, whole
from tests.recorder.recorders import Recorder, StartRecorder, post

BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def broken() -> Iterator[BrokenEngine]:
    with breaking() as engine:
        engine.answer, engine.keeps = whole(completion()), True
        yield engine


def ask(recorder: Recorder, run: str) -> int:
    return post(f"{recorder.base(run)}/v1/chat/completions", BODY)[0]


def test_a_connection_serves_one_call_after_another(
    start_recorder: StartRecorder, broken: BrokenEngine, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    assert [ask(recorder, run) for _ in range(5)] == [200] * 5
    assert broken.connections == 1
    recorder.kill()


@pytest.mark.parametrize(
    "answer",
    [
        whole(completion()) + b"more",
        whole(completion(), "connection: close"),
        whole(completion(token_ids=[1.5])),
    ],
    ids=["more than asked for", "told so", "an answer that is refused"],
)
def test_a_connection_that_may_have_more_is_not_used_again(
    start_recorder: StartRecorder, broken: BrokenEngine, service: Service, run: str, answer: bytes
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address, "--silence-timeout-s", "0.5")
    broken.answer = answer
    ask(recorder, run)
    broken.answer = whole(completion())
    assert ask(recorder, run) == 200
    # An answer that was read whole leaves its connection as good as new, whatever it said.
    assert broken.connections == (1 if answer == whole(completion(token_ids=[1.5])) else 2)
    recorder.kill()


def test_an_engine_that_was_started_again_is_called_at_the_next_try(
    start_recorder: StartRecorder, broken: BrokenEngine, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address)
    assert ask(recorder, run) == 200
    # It closes the connection when the next call is on its way: nobody knows what became of that one.
    broken.answer, broken.keeps = b"", False
    status, told = post(f"{recorder.base(run)}/v1/chat/completions", BODY)
    assert (status, "closed the connection" in told["error"]["message"]) == (502, True)
    broken.answer = whole(completion())
    assert ask(recorder, run) == 200
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
        status, told = post(f"{stranger.base(run)}/v1/chat/completions", BODY)
        assert (status, "CERTIFICATE_VERIFY_FAILED" in told["error"]["message"]) == (502, True)
        stranger.kill()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        friend = start_recorder(engine.url, service.grpc_address)
        assert ask(friend, run) == 200
        friend.kill()
