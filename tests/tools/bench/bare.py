"""Bare gRPC: what the machine and grpcio allow, without a word of ours. Raw bytes in, a few bytes out.

`python -m tests.tools.bench.bare THREADS` serves, and prints its port. It discards what it is sent, and holds who waits
until someone releases them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
)
DISCARD, WAIT, RELEASE = "/bare/Discard", "/bare/Wait", "/bare/Release"
_LONGEST_WAIT_S = 60


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self) -> None:
        self._released = threading.Event()
        answers = {DISCARD: lambda request, context: b"ok", WAIT: self._wait, RELEASE: self._release}
        self._handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in answers.items()}

    def service(self, call: Any) -> Any:
        return self._handlers.get(call.method)

    def _wait(self, request: bytes, context: Any) -> bytes:
        self._released.wait(_LONGEST_WAIT_S)
        return b"ok"

    def _release(self, request: bytes, context: Any) -> bytes:
        """Wakes all waiting callers; later ones wait again."""
        released, self._released = self._released, threading.Event()
        released.set()
        return b"ok"


class Bare:
    def __init__(self, address: str, pid: int) -> None:
        self.address, self.pid = address, pid
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._discard = self._channel.unary_unary(DISCARD)
        self._release = self._channel.unary_unary(RELEASE)

    def send(self, messages: Sequence[bytes]) -> None:
        """One after another, each answered."""
        for message in messages:
            self._discard(message)

    def release(self) -> None:
        self._release(b"")

    def close(self) -> None:
        self._channel.close()


@contextmanager
def bare(threads: int = 8) -> Iterator[Bare]:
    command = [sys.executable, "-m", "tests.tools.bench.bare", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        client = Bare(f"127.0.0.1:{process.stdout.readline().strip()}", process.pid)
        yield client
        client.close()
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main(threads: int) -> None:
    server = grpc.server(ThreadPoolExecutor(threads), handlers=(_Handlers(),), options=OPTIONS)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]))
