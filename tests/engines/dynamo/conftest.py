"""A Dynamo whose workers are scripted. Nothing is fetched from anywhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.fixtures import folder

__all__ = ["folder"]

MODELS = {"toy": "2", "large": "1000", "bare": "3"}
"""How many tokens the worker of each model sends at once."""


@pytest.fixture(scope="session")
def dynamo(folder: Path) -> Iterator[str]:
    """The URL of a frontend."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
    commands = [["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *planes]]
    commands += [
        ["-m", "tests.engines.dynamo.worker", str(folder), name, size, "hermes"] for name, size in MODELS.items()
    ]
    environment = {**os.environ, "DYN_FILE_KV": str(folder / "kv"), "HF_HUB_OFFLINE": "1"}
    log = (folder / "dynamo.log").open("w")
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", *command], env=environment, stdout=log, stderr=log)
        for command in commands
    ]
    url = f"http://127.0.0.1:{port}"
    try:
        while not _has_all(url):
            assert all(process.poll() is None for process in processes), (folder / "dynamo.log").read_text()[-5000:]
            time.sleep(0.5)
        yield url
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
        log.close()


def _has_all(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models") as answer:
        return {model["id"] for model in json.load(answer)["data"]} == {*MODELS}
    return False
