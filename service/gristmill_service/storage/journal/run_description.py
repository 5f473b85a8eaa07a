"""The file `run.json`: which run a directory is of, its identity and its configuration."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gristmill.errors import InvalidArgumentError
from gristmill_service.storage.run_configs import check_config

_FORMAT = 1
FILE_NAME = "run.json"


class RunDescription(NamedTuple):
    run_id: str
    config: bytes


def new_description(name: str, config: bytes) -> bytes:
    """The file of a new run. Raises InvalidArgumentError for a configuration that could not be read again."""
    check_config(name, config)
    description = {"format": _FORMAT, "run": name, "id": uuid.uuid4().hex, "config": orjson.Fragment(config)}
    return orjson.dumps(description) + b"\n"


def read_description(path: Path, name: str) -> RunDescription:
    """Raises InvalidArgumentError where the file is missing, damaged, another run's, or of a newer format."""
    found = _read(path)
    if found["format"] > _FORMAT:
        raise InvalidArgumentError(
            f"{path} has format {found['format']} and this version reads up to {_FORMAT}; use a newer gristmill"
        )
    if found["run"] != name:
        raise InvalidArgumentError(
            f"{path} is of run {found['run']!r}, not of {name!r}; move it back, or remove the run"
        )
    return RunDescription(found["id"], orjson.dumps(found["config"]))


def described_name(path: Path) -> str:
    """The run's name. Raises InvalidArgumentError where the file is missing or damaged."""
    return str(_read(path)["run"])


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads((path / FILE_NAME).read_bytes())
        is_whole = isinstance(found["format"], int) and isinstance(found["run"], str)
        # A newer format may have the rest elsewhere.
        is_whole &= found["format"] > _FORMAT or (isinstance(found["id"], str) and "config" in found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path}: {FILE_NAME} cannot be read ({error}); restore it, or remove the run"
        ) from None
    if not is_whole:
        raise InvalidArgumentError(f"{path}: {FILE_NAME} is damaged; restore it, or remove the run")
    return found
