"""Reads JSON with integers of more than 64 bits, which orjson rounds to floats."""

from __future__ import annotations

import json
from typing import Any

import orjson

_ZEROS = bytes.maketrans(b"123456789", b"000000000")
# The shortest has 19 digits.
_LONG = b"0" * 19


def loads(data: bytes) -> Any:
    """Parses JSON. Raises JSONDecodeError, and RecursionError if it is nested too deeply."""
    parsed = orjson.loads(data)
    return json.loads(data) if _LONG in data.translate(_ZEROS) else parsed


def written(value: Any) -> orjson.Fragment:
    """Returns a value for orjson, which writes no such integers."""
    return orjson.Fragment(json.dumps(value))
