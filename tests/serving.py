"""A `gristmill serve` of a test's own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FREE_PORTS: dict[str, Any] = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}


@dataclass(frozen=True)
class ServiceProcess:
    """One that is ready."""

    process: subprocess.Popen[str]
    grpc_address: str
    http_url: str
    announced: Path

    @property
    def log(self) -> Path:
        return self.announced.with_suffix(".log")

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


StartService = Callable[..., ServiceProcess]
