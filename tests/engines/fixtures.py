"""What the tests of all engines share: a model, and a recorder in front of the engine.

The conftest of an engine has `engine`, the URL of one that serves the model, and `api`, its name for the recorder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import tiny_model
from tests.engines.rollout import Rollout
from tests.engines.witness import Witness
from tests.on_loop import Service
from tests.recorder.engine import serving
from tests.recorder.recorders import create_run, end, start


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save(folder)
    return folder


@pytest.fixture
def flags() -> tuple[str, ...]:
    """More arguments of the recorder."""
    return ()


@pytest.fixture
def config() -> dict[str, Any]:
    """More settings of the run."""
    return {"merge": "none"}


@pytest.fixture
def rollout(
    engine: str,
    api: str,
    folder: Path,
    service: Service,
    tmp_path: Path,
    run_name: str,
    flags: tuple[str, ...],
    config: dict[str, Any],
) -> Iterator[Rollout]:
    create_run(service.grpc_address, run_name, **config)
    flags = ("--engine", api, "--journal", str(tmp_path / "journal"), *flags)
    with serving(Witness(engine)) as witness:
        recorder = start(tmp_path / "log", witness.url, service.grpc_address, *flags)
        yield Rollout(run_name, recorder, service, witness, tiny_model.load(folder))
        end(recorder)
