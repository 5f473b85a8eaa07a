"""Both rollout clients for one test, and a run with one rank that trains it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill import RolloutClient, TrainerClient
from tests.client.faces import FACES, Connect, connecting
from tests.client.whole_way import trainer_of
from tests.on_loop import Service


@pytest.fixture(params=FACES)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of either kind, with `RolloutClient`'s arguments and calls. Who makes one closes it."""
    with connecting(request.param) as connect:
        yield connect


@pytest.fixture
def client(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        yield client


@pytest.fixture
def trainer(service: Service, client: RolloutClient) -> Iterator[TrainerClient]:
    with trainer_of(service, client) as trainer:
        yield trainer
