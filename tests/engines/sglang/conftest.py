"""An SGLang with a tiny random model, on the CPU by torch alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.fixtures import config, flags, folder, rollout
from tests.engines.rollout import MODEL
from tests.engines.servers import served

__all__ = ["config", "flags", "folder", "rollout"]

PARSER = ("--tool-call-parser", "qwen")
_FLAGS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-overlap-schedule"),
    *("--max-total-tokens", "8192", "--context-length", "2048", "--mem-fraction-static", "0.3", "--skip-server-warmup"),
)
_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path(__file__).parent / "absent")}


@pytest.fixture(scope="session")
def api() -> str:
    return "sglang"


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[str]:
    """The URL of an SGLang."""
    with running(folder, *PARSER) as url:
        yield url


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[str]:
    """An SGLang that serves the model in the folder."""
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *_FLAGS, *flags]
    with served([*command, "--model-path", str(folder)], folder / "engine.log", _ENVIRONMENT) as url:
        yield url
