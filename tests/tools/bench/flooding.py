"""A caller that floods a service in one of several ways, until its standard input ends.

`python -m tests.tools.bench.flooding WAY GRPC_ADDRESS HTTP_URL TOKEN` says "ready" when it has begun.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

import grpc

from gristmill.v1 import rollout_pb2, rows_pb2

RUN = "flooded"
THREADS, CONNECTIONS, STREAMS = 8, 400, 400
_MOST_ROWS = 60_000
_ROW = (
    '{"uid":"a%d","sample":0,"step":%d,"is_last_step":false,'
    '"prompt_token_ids":[1],"response_ids":[1],"loss_mask":[1],"reward":0}'
)


class Flood:
    def __init__(self, address: str, url: str, token: str) -> None:
        self._address, self._where, self._token = address, urlsplit(url), token
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._ended = threading.Event()
        self._held: list[object] = []

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "connections": self._connections,
            "streams": self._streams,
            "wrong_bodies": lambda: self._post(
                "groups", gzip.compress(b'{"uids":[' + b"1," * (2 << 20) + b"1]}"), "gzip"
            ),
            "tiny_rows": lambda: self._post("rows", self._tiny_rows()),
            "large_rows": self._large_rows,
            "repeated_rows": self._repeated_rows,
            "groups": self._groups,
            "refused": lambda: self._post("rows", b"{}", token="nobody's"),
        }

    def _connections(self) -> None:
        """Some say nothing, some begin a request, some begin a large body."""
        large = b"POST /v1/runs/r/rows HTTP/1.1\r\nHost: a\r\nContent-Length: 15000000\r\nAuthorization: Bearer "
        begun = (b"", b"GET /hea", large + self._token.encode() + b"\r\n\r\n" + bytes(1 << 18))
        for number in range(CONNECTIONS):
            with suppress(OSError):
                wire = socket.create_connection((self._where.hostname or "", self._where.port or 0), timeout=5)
                wire.sendall(begun[number % len(begun)])
                self._held.append(wire)

    def _streams(self) -> None:
        """Calls whose request does not come."""
        channel = grpc.insecure_channel(self._address)
        submit = channel.stream_unary("/gristmill.v1.RolloutService/SubmitRows", request_serializer=bytes)

        def nothing() -> Iterator[bytes]:
            self._ended.wait()
            yield from ()

        for _ in range(STREAMS):
            self._held.append(submit.future(nothing(), metadata=self._metadata))

    def _post(self, call: str, body: bytes, encoding: str = "identity", token: str = "") -> None:
        headers = {
            "content-type": "application/json",
            "content-encoding": encoding,
            "authorization": f"Bearer {token or self._token}",
        }

        def post() -> None:
            connection = http.client.HTTPConnection(self._where.netloc, timeout=60)
            connection.request("POST", f"/v1/runs/{RUN}/{call}", body, headers)
            connection.getresponse().read()
            connection.close()

        self._over_and_over(post)

    @staticmethod
    def _tiny_rows() -> bytes:
        return ('{"rows":[' + ",".join(_ROW % (row % 7, row) for row in range(_MOST_ROWS)) + "]}").encode()

    def _large_rows(self) -> None:
        """More than the service takes, again and again."""
        table, submit, steps = _one_row("big", 3 << 20), self._submit(), iter(range(1 << 30))

        def send() -> None:
            table.steps[:] = [next(steps)]
            submit(rollout_pb2.SubmitRowsRequest(run=RUN, rows=table).SerializeToString())

        self._over_and_over(send)

    def _repeated_rows(self) -> None:
        """Rows that the service takes, and then has: each request is answered well and costs as much as the first."""
        table, submit = _one_row("repeated", 1 << 20), self._submit()
        data = rollout_pb2.SubmitRowsRequest(run=RUN, rows=table).SerializeToString()
        self._over_and_over(lambda: submit(data))

    def _submit(self) -> Callable[[bytes], bytes]:
        """Sends a request of rows, and gives the answer."""
        channel = grpc.insecure_channel(self._address, (("grpc.max_send_message_length", -1),))
        call = channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
        return partial(call, metadata=self._metadata, timeout=60)

    def _groups(self) -> None:
        channel = grpc.insecure_channel(self._address)
        begin = channel.unary_unary("/gristmill.v1.RolloutService/BeginGroups")
        numbers = iter(range(1 << 30))

        def ask() -> None:
            first = next(numbers)
            uids = [f"{first}-{number}" for number in range(_MOST_ROWS)]
            request = rollout_pb2.BeginGroupsRequest(run=RUN, uids=uids, wait_s=1.0)
            begin(request.SerializeToString(), metadata=self._metadata, timeout=60)

        self._over_and_over(ask)

    def _over_and_over(self, once: Callable[[], object]) -> None:
        def keep_on() -> None:
            while not self._ended.is_set():
                with suppress(OSError, http.client.HTTPException, grpc.RpcError):
                    once()

        for _ in range(THREADS):
            threading.Thread(target=keep_on, daemon=True).start()


def _one_row(uid: str, tokens: int) -> rows_pb2.Rows:
    return rows_pb2.Rows(
        uids=[uid],
        samples=[0],
        steps=[0],
        is_last_steps=[False],
        prompt_lengths=[1],
        response_lengths=[tokens - 1],
        tokens=b"\x01\0\0\0" * tokens,
        rewards=[0.0],
    )


def main() -> None:
    way, *where = sys.argv[1:]
    # In life it is another machine.
    os.nice(19)
    flood = Flood(*where)
    flood.ways()[way]()
    print(json.dumps("ready"), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
