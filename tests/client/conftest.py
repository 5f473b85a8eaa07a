"""Both rollout clients for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.faces import FACES, Connect, connecting


@pytest.fixture(params=FACES)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of either kind, with `RolloutClient`'s arguments and calls. Who makes one closes it."""
    with connecting(request.param) as connect:
        yield connect
