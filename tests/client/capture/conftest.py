"""Engines, and a rollout client and an agent of each test."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from gristmill import RolloutClient
from tests.on_loop import Service
from tests.recorder.engine import Engine, serving
from tests.recorder.recorders import create_run


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serving(Engine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def sglang() -> Iterator[Engine]:
    with serving(Engine(is_sglang=True)) as engine:
        yield engine


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    """A run in which each trajectory is a batch."""
    create_run(service.grpc_address, run_name)
    return run_name


@pytest.fixture
def rollouts(service: Service, run: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run, timeout_s=20) as client:
        yield client


@pytest.fixture
def agent(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        yield client
