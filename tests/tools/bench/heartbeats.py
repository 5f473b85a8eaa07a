"""A service whose event loop has a heartbeat, in a process of its own, and a bare one that drops what it receives.

`python -m tests.tools.bench.heartbeats SETTINGS_AS_JSON` prints its addresses; null is for the bare one. For each line
of its standard input it prints the longest gap between two beats since the line before, and the memory that the process
took meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

EVERY_S = 0.002


class Beats(NamedTuple):
    """gap_s: the longest time in which the loop answered nobody. computed_s: the longest such time in which the process
    computed, so that a busy machine does not count. added: bytes of memory at most, beyond those before."""

    gap_s: float
    computed_s: float
    added: int


class Beating:
    """A service with a heartbeat."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.grpc_address, self.http_url = self._answer()

    def read(self) -> Beats:
        """Returns what was measured since the last call."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return Beats(*self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                return json.loads(line)
        raise RuntimeError(f"the service ended with {self._process.wait()}")


@contextmanager
def beating(settings: dict[str, Any] | None) -> Iterator[Beating]:
    command = [sys.executable, "-m", "tests.tools.bench.heartbeats", json.dumps(settings, default=str)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Beating(process)
        finally:
            process.terminate()


async def _serve(settings: dict[str, Any] | None) -> None:
    from gristmill_service.process_tuning import spare_what_is_there, tune_process

    tune_process()
    addresses = await (_bare() if settings is None else _service(settings))
    spare_what_is_there()
    print(json.dumps(addresses), flush=True)
    longest, lines = [0.0, 0.0], asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    beats = asyncio.create_task(_beat(longest))
    before = _memory("VmRSS")
    while await lines.readline():
        # A gap counts when it has ended.
        await asyncio.sleep(5 * EVERY_S)
        print(json.dumps([*longest, max(0, _memory("VmHWM") - before)]), flush=True)
        Path("/proc/self/clear_refs").write_text("5")
        longest[:], before = [0.0, 0.0], _memory("VmRSS")
    beats.cancel()


async def _service(settings: dict[str, Any]) -> list[str]:
    from gristmill_service.api.meter import MeteredPool
    from gristmill_service.logs import configure_logs
    from gristmill_service.process_tuning import started_pool
    from gristmill_service.service import Service
    from gristmill_service.settings import Settings
    from tests.serving import FREE_PORTS

    configure_logs("info", "json")
    asyncio.get_running_loop().set_default_executor(started_pool(16, "pool", MeteredPool))
    service = Service(Settings(**{**FREE_PORTS, "store": "memory", "shutdown_grace_s": 0.1, **settings}))
    await service.start()
    _running.append(service)
    return [service.grpc_address, service.http_url]


async def _bare() -> list[str]:
    """grpc.aio and uvicorn without a word of ours."""
    import grpc
    import uvicorn

    async def drop(requests: Any, context: Any) -> bytes:
        async for _ in requests:
            pass
        return b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: Any) -> Any:
            return grpc.stream_unary_rpc_method_handler(drop)

    server = grpc.aio.server(handlers=(Handlers(),), options=[("grpc.max_receive_message_length", -1)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http = uvicorn.Server(uvicorn.Config(app, port=0, http="h11", lifespan="off", log_level="critical"))
    _running.extend((server, asyncio.create_task(http.serve())))
    while not http.started:
        await asyncio.sleep(0.01)
    return [f"127.0.0.1:{port}", f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"]


_running: list[object] = []
"""What is served, so that it is not collected."""


async def _beat(longest: list[float]) -> None:
    while True:
        began, spent = time.monotonic(), time.process_time()
        await asyncio.sleep(EVERY_S)
        gap, computed = time.monotonic() - began - EVERY_S, time.process_time() - spent
        longest[:] = max(longest[0], gap), max(longest[1], min(gap, computed))


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
