"""Starts the server of an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def served(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of the server that the command starts on a free port. It runs until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            assert process.poll() is None, log.read_text(errors="replace")[-5000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
        return answer.status == 200
    return False
