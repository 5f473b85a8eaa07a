"""A real Chromium, driven as a person drives one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.on_loop import Service
from tests.page.chromium import MISSING, executable, launched

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Of a module, not of the session: the driver runs an event loop in this thread, which others' tests need.
    if executable() is None:
        # What nobody sees skipped is never tested again.
        (pytest.fail if "CI" in os.environ else pytest.skip)(MISSING)
    with launched() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any, service: Service) -> Iterator[OpenPage]:
    """Opens the page at this address, in a window of its own. Whatever Chromium complains of fails the test; all runs
    go with it."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def opened(address: str = "", **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(f"{service.http_url}/{address}")
        return page

    yield opened
    for context in contexts:
        context.close()
    # Not before: a page that asks for a run that is gone is answered so.
    for name in service.runs.names():
        service.runs.delete(name)
    assert not complaints
