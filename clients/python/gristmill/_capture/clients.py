"""Installs the capture in the HTTP clients that can be imported. Without a block it does nothing."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from threading import Lock
from types import ModuleType

from gristmill._capture import httpx_calls
from gristmill.errors import FailedPreconditionError

_lock = Lock()


def install() -> None:
    """Installs it once. Raises FailedPreconditionError if there is no client."""
    with _lock:
        _install()


@cache
def _install() -> None:
    # httpx2 is httpx with another name; newer versions of the openai package use it. One may be an alias of the other.
    clients = {module.Client: module for name in ("httpx", "httpx2") if (module := _imported(name))}
    for module in clients.values():
        httpx_calls.install(module)
    if aiohttp := _imported("aiohttp"):
        from gristmill._capture import aiohttp_calls

        aiohttp_calls.install()
    if not (clients or aiohttp):
        raise FailedPreconditionError(
            "gristmill.capture records calls of httpx and aiohttp, and neither can be imported; install the one that "
            "the agent uses, or use the recorder"
        )


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None
