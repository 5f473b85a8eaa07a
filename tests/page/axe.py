"""axe-core, which checks a page's accessibility; fetched once by `make axe`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "build" / "axe" / "axe.min.js"


def script() -> str:
    """Its source. Skips where there is no npm to fetch it, which on CI fails."""
    if not _SCRIPT.exists():
        if shutil.which("npm") is None:
            # What nobody sees skipped is never tested again.
            (pytest.fail if "CI" in os.environ else pytest.skip)("no npm on the PATH to fetch axe-core; install one")
        subprocess.run(["make", "axe"], cwd=_ROOT, check=True, capture_output=True, timeout=120)
    return _SCRIPT.read_text(encoding="utf-8")


def violations(page: Any, source: str) -> list[str]:
    """What is wrong on the page as it is, each with the elements that it is about."""
    page.evaluate(source)
    rules = page.evaluate("axe.run()")["violations"]
    return [
        f"{one['id']}: {one['help']}: {'; '.join(node['html'][:120] for node in one['nodes'][:5])}" for one in rules
    ]
