"""An engine that answers every request with the bytes that a test gives, whatever they are."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.recorder.engine import END, tokens_of


@dataclass
class BrokenEngine:
    """answer: the bytes. holds: whether the connection stays open after them, until the other side closes it. keeps:
    whether it stays open for the next request. heads, requests: heads and bodies of what was asked."""

    url: str = ""
    answer: bytes = b""
    holds: bool = False
    keeps: bool = False
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when the other side has closed a connection that was held."""


def whole(document: Any, headers: str = "content-type: application/json") -> bytes:
    """An answer with this body: bytes as they are, anything else as JSON."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return f"HTTP/1.1 200 OK\r\n{headers}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def streamed(*events: Any, is_ended: bool = True) -> bytes:
    """An answer of these events: bytes as they are, anything else as a chunk. is_ended: whether its end comes."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    parts = [one if isinstance(one, bytes) else b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in parts) + (b"0\r\n\r\n" if is_ended else b"")


def completion(**more: Any) -> dict[str, Any]:
    """A good answer of vLLM, but for what is given: fields of its choice, or of itself where it has them."""
    tokens = [*tokens_of("hi"), END]
    logprobs: Any = {"content": [{"token": "t", "logprob": -0.5} for _ in tokens]}
    choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens, "logprobs": logprobs}
    choice["message"] = {"role": "assistant", "content": "hi"}
    answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "toy", "prompt_token_ids": [1, 2]}
    return {**answer, "choices": [{**choice, **{k: v for k, v in more.items() if k not in _OF_ANSWER}}]} | {
        key: value for key, value in more.items() if key in _OF_ANSWER
    }


_OF_ANSWER = ("choices", "prompt_token_ids", "extra")


def chunk(text: str = "", tokens: Any = (), finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of one choice."""
    logprobs = {"content": [{"token": "t", "logprob": -0.5} for _ in tokens]}
    choice = {"index": 0, "delta": {"content": text}, "token_ids": list(tokens), "logprobs": logprobs}
    choice["finish_reason"] = finish
    return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "toy", "choices": [choice], **more}


@contextmanager
def breaking(tls: ssl.SSLContext | None = None) -> Iterator[BrokenEngine]:
    """The engine in threads of this process."""
    engine = BrokenEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine.url = f"{'https' if tls else 'http'}://localhost:{listener.getsockname()[1]}"
        thread = threading.Thread(target=_serve, args=(listener, engine, tls))
        thread.start()
        try:
            yield engine
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, engine: BrokenEngine, tls: ssl.SSLContext | None) -> None:
    answering = []
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            answering.append(threading.Thread(target=_answer, args=(connection, engine, tls)))
            answering[-1].start()
    for thread in answering:
        thread.join()


def _answer(accepted: socket.socket, engine: BrokenEngine, tls: ssl.SSLContext | None) -> None:
    with (
        suppress(ConnectionError, EOFError, ssl.SSLError),
        accepted,
        accepted if tls is None else tls.wrap_socket(accepted, server_side=True) as connection,
    ):
        _read_request(connection, engine)
        engine.connections += 1
        connection.sendall(engine.answer)
        while engine.keeps:
            _read_request(connection, engine)
            connection.sendall(engine.answer)
        if engine.holds:
            connection.settimeout(60)
            while connection.recv(65536):
                pass
            engine.closed.set()


def _read_request(connection: socket.socket, engine: BrokenEngine) -> None:
    """Takes note of the next one. Raises EOFError where none comes, and after the recorder's question for models."""
    head, _, body = _until(connection, b"", lambda received: b"\r\n\r\n" in received).partition(b"\r\n\r\n")
    if head.startswith(b"GET "):
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        raise EOFError
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    engine.heads.append(head)
    engine.requests.append(_until(connection, body, lambda received: len(received) >= length))


def _until(connection: socket.socket, received: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
    while not is_whole(received):
        if not (part := connection.recv(65536)):
            raise EOFError
        received += part
    return received
