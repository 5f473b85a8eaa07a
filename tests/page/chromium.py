"""Debian's Chromium, or whichever is on the PATH, without what it does by itself over the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = f"no Chromium on the PATH ({', '.join(_NAMES)}); install one, such as by apt-get install chromium"

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def executable() -> str | None:
    """Returns the path of the browser's executable, or nothing where none is installed."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def launched() -> Iterator[Any]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable(), args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()
