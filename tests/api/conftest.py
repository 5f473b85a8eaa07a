"""Each test that takes `door` is put to gRPC and to HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.api.doors import CONFIG, Door, GrpcDoor, HttpDoor

if TYPE_CHECKING:
    from tests.on_loop import Service


@pytest.fixture
def grpc_door(service: Service) -> Iterator[GrpcDoor]:
    opened = GrpcDoor(service.grpc_address)
    yield opened
    opened.close()


@pytest.fixture
def http_door(service: Service) -> Iterator[HttpDoor]:
    opened = HttpDoor(service.http_url)
    yield opened
    opened.close()


@pytest.fixture(params=["grpc", "http"])
def door(request: pytest.FixtureRequest) -> Door:
    found: Door = request.getfixturevalue(f"{request.param}_door")
    return found


@pytest.fixture
def run(door: Door, run_name: str) -> str:
    """A run of two groups of two samples a batch, two ranks."""
    door.create(run_name, CONFIG)
    return run_name
