"""Each test that takes `api` is put to gRPC and to HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.api.apis import CONFIG, Api, GrpcApi, HttpApi

if TYPE_CHECKING:
    from tests.on_loop import Service


@pytest.fixture
def grpc_api(service: Service) -> Iterator[GrpcApi]:
    opened = GrpcApi(service.grpc_address)
    yield opened
    opened.close()


@pytest.fixture
def http_api(service: Service) -> Iterator[HttpApi]:
    opened = HttpApi(service.http_url)
    yield opened
    opened.close()


@pytest.fixture(params=["grpc", "http"])
def api(request: pytest.FixtureRequest) -> Api:
    fixture: Api = request.getfixturevalue(f"{request.param}_api")
    return fixture


@pytest.fixture
def run(api: Api, run_name: str) -> str:
    """A run of two groups of two samples a batch, two ranks."""
    api.create(run_name, CONFIG)
    return run_name
