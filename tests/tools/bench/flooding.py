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
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import grpc

from gristmill.v1 import rollout_pb2, rows_pb2, run_pb2, trainer_pb2
from tests.tools.bench.streams import Connection, message

RUN, BATCHES = "flooded", "flooded-batches"
"""BATCHES has a published batch."""
THREADS, CONNECTIONS, STREAMS, SLOW_STREAMS = 8, 400, 400, 1500
_SUBMIT = "/gristmill.v1.RolloutService/SubmitRows"
_READ_SHARD = "/gristmill.v1.TrainerService/ReadShard"
_MOST_ROWS, _LARGE_BYTES = 1024, 15 << 20
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
            "slow_bytes": self._slow_bytes,
            "unread_shards": lambda: self._many(
                4, 100, _READ_SHARD, trainer_pb2.ReadShardRequest(run=BATCHES, model=run_pb2.MODEL_POLICY)
            ),
            "unread_answers": lambda: self._many(
                4, 500, "/gristmill.v1.TrainerService/GetBatch", trainer_pb2.GetBatchRequest(run=BATCHES)
            ),
            "refused_rows": lambda: self._many(4, 256, _SUBMIT, _wrong_rows(1)),
            "costly_rows": lambda: self._many(4, 16, _SUBMIT, _wrong_rows(_MOST_ROWS)),
            "rows_refused_alone": lambda: self._many(4, 16, _SUBMIT, _wrong_rows(1000, by_row=True)),
            "refused_tokens": lambda: self._many(4, 256, _SUBMIT, _wrong_rows(1), token="nobody's"),
            "health_watches": self._health_watches,
            "large_acknowledgements": self._large_acknowledgements,
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

    def _slow_bytes(self) -> None:
        """Calls that send their message byte by byte, one a second."""
        for _ in range(SLOW_STREAMS // 500):
            threading.Thread(target=self._send_slowly, args=(500,), daemon=True).start()

    def _send_slowly(self, count: int) -> None:
        while not self._ended.is_set():
            connection = Connection(self._address, dict(self._metadata))
            with suppress(OSError), closing(connection):
                while not self._ended.is_set():
                    for stream in connection.running:
                        connection.send(stream, b"\0")
                    while len(connection.running) < count:
                        connection.begin(_SUBMIT, b"\0\0\0\1\0", ends=False)
                    connection.flush()
                    due = time.monotonic() + 1
                    while (left := due - time.monotonic()) > 0:
                        connection.read(left)

    def _many(self, connections: int, streams: int, path: str, request: Any, token: str = "") -> None:
        """So many calls at a time over each connection. The next one begins when one ends; long answers stay unread."""
        data, metadata = message(request.SerializeToString()), {"authorization": f"Bearer {token or self._token}"}
        for _ in range(connections):
            threading.Thread(target=self._call, args=(streams, path, data, metadata), daemon=True).start()

    def _call(self, streams: int, path: str, data: bytes, metadata: dict[str, str], *, resets: bool = False) -> None:
        while not self._ended.is_set():
            connection = Connection(self._address, metadata, resets=resets)
            with suppress(OSError), closing(connection):
                while not self._ended.is_set():
                    while len(connection.running) < streams and not connection.is_spent:
                        connection.begin(path, data)
                    connection.flush()
                    connection.read(1.0)

    def _health_watches(self) -> None:
        """Each is opened, answered and closed."""
        for _ in range(40):
            args = (100, "/grpc.health.v1.Health/Watch", message(b""), dict[str, str]())
            threading.Thread(target=self._call, args=args, kwargs={"resets": True}, daemon=True).start()

    def _large_acknowledgements(self) -> None:
        channel = grpc.insecure_channel(self._address, (("grpc.max_send_message_length", -1),))
        acknowledge = channel.unary_unary("/gristmill.v1.TrainerService/Acknowledge")
        request = trainer_pb2.AcknowledgeRequest(run="r" * _LARGE_BYTES).SerializeToString()
        self._over_and_over(lambda: acknowledge(request, metadata=self._metadata, timeout=60))

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


def _wrong_rows(count: int, *, by_row: bool = False) -> rollout_pb2.SubmitRowsRequest:
    """Rows whose samples are negative."""
    rows = rows_pb2.Rows(
        uids=[f"w{row}" for row in range(count)],
        samples=[-1] * count,
        steps=[0] * count,
        is_last_steps=[True] * count,
        prompt_lengths=[1] * count,
        response_lengths=[1] * count,
        tokens=b"\x01\0\0\0" * 2 * count,
        loss_mask=b"\1" * count,
        rewards=[0.0] * count,
    )
    return rollout_pb2.SubmitRowsRequest(run=RUN, rows=rows, refuse_by_row=by_row)


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
