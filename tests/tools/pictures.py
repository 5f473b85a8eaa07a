"""`make pictures`: every view in light and dark colors and on a phone, into build/pictures to look at.

The two that the documents show go into docs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.page.chromium import launched
from tests.page.views import VIEWS, Services, breaks_of_agents, staged

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "pictures"
_SHOWN = {"stuck-light": "page-light", "agents-dark": "page-dark"}
_PICTURED = {**VIEWS, "agents": breaks_of_agents}
_LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("light", 390)}


def main() -> None:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, staged(Path(folder), trained=10) as services, launched() as browser:
        for view in _PICTURED:
            for look in _LOOKS:
                _take(browser, services, view, look)
    for picture, name in _SHOWN.items():
        shutil.copyfile(_FOLDER / f"{picture}.png", _ROOT / "docs" / f"{name}.png")


def _take(browser: Any, services: Services, view: str, look: str) -> None:
    scheme, width = _LOOKS[look]
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)

    def open_(url: str) -> Any:
        page = context.new_page()
        page.goto(url)
        return page

    page = _PICTURED[view](services, open_)
    page.wait_for_timeout(300)
    page.screenshot(path=_FOLDER / f"{view}-{look}.png")
    page.screenshot(path=_FOLDER / f"{view}-{look}-whole.png", full_page=True)
    context.close()


if __name__ == "__main__":
    main()
