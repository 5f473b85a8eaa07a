"""Configurations of runs as the stores take them: JSON that is read again as it was written."""

from __future__ import annotations

import json

import orjson

from gristmill.errors import InvalidArgumentError


def check_config(name: str, config: bytes) -> None:
    """Raises InvalidArgumentError for a configuration that could not be read again."""
    try:
        # The one refuses integers beyond 64 bits, which the other would read as something else.
        orjson.dumps(json.loads(config))
        orjson.loads(config)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"run {name!r}: its configuration cannot be stored as JSON: {error}; integers have at most 64 bits, and "
            "numbers are finite"
        ) from None
