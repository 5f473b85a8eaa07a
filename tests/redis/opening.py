"""Clients of a Redis that tests open, and what calls of them raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.errors import GristmillError
from gristmill_service.storage.redis.connection import (
    Client,
    translated,
)

Open = Callable[..., Client]
SECRET = "s3cret/?#@ %41"


def failure(client: Client, *command: str | int) -> GristmillError:
    """What a command raises, translated."""
    with pytest.raises(GristmillError) as caught, translated(client):
        client.execute_command(*command)  # type: ignore[no-untyped-call]
    return caught.value
