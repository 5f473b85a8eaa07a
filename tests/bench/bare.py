"""Bare gRPC: what the machine and grpcio allow, without a word of ours. Raw bytes in, a few bytes out.

python -m tests.bench.bare    serves, and prints its port
"""

from __future__ import annotations

import subprocess
import sys
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
DISCARD = "/bare/Discard"


class _Discard(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, call: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"ok") if call.method == DISCARD else None


class Bare:
    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._discard = self._channel.unary_unary(DISCARD)

    def send(self, messages: Sequence[bytes]) -> None:
        """One after another, each answered."""
        for message in messages:
            self._discard(message)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def bare() -> Iterator[Bare]:
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.bare"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        client = Bare(f"127.0.0.1:{process.stdout.readline().strip()}")
        yield client
        client.close()
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(8), handlers=(_Discard(),), options=OPTIONS)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
