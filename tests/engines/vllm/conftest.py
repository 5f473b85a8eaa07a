"""A vLLM with a tiny random model. Nothing is fetched from anywhere."""

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

_FLAGS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-scale-out",
)
# One core computes as many tokens as are sampled here.
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def api() -> str:
    return "vllm"


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[str]:
    """The URL of a vLLM."""
    with running(folder, "--max-model-len", "2048") as url:
        yield url


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[str]:
    """A vLLM that serves the model in the folder."""
    # Not `vllm serve`, which asks for the version of a package that is called vllm.
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *_FLAGS, *flags]
    with served([*command, "--model", str(folder)], folder / "engine.log", _ENVIRONMENT) as url:
        yield url
