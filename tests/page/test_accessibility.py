"""No view breaks a rule of axe-core, in light colours or dark ones."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.monitoring import findings
from gristmill_service.service import Service
from tests.page import axe, stage
from tests.page.conftest import OpenPage


@pytest.fixture(scope="module")
def source() -> str:
    return axe.script()


def rows(*uids: str) -> Any:
    return from_rows([row for uid in uids for row in stage.group(uid)], step_wise=True)


def open_all(page: Any) -> None:
    """Everything that can be opened, and all that comes when it is seen."""
    page.locator("section[aria-label=Shards] canvas").first.wait_for()
    page.locator("section[aria-label=Shards] canvas").first.click(position={"x": 20, "y": 22})
    page.get_by_role("region", name="Tokens of row 0").wait_for()
    page.locator("section[aria-label=Settings] summary").first.click()
    page.locator("section[aria-label=Settings] tr").nth(1).wait_for()
    page.get_by_role("button", name="What other settings would give").click()
    page.get_by_label("Find groups by uid").fill("a")
    page.get_by_role("button", name="Find", exact=True).click()
    page.get_by_role("region", name="Groups that were found").wait_for()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.locator("section[aria-label=Distributions]").scroll_into_view_if_needed()
    page.locator("section[aria-label=Distributions] canvas").first.wait_for()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_breaks_a_rule(
    open_page: OpenPage,
    service: Service,
    run_name: str,
    source: str,
    scheme: str,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(address: str) -> Any:
        page = open_page(address, color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        return page

    page = look("")
    page.get_by_role("heading", name="No runs yet").wait_for()
    assert axe.violations(page, source) == []

    monkeypatch.setattr(findings, "LATE_RANK_S", 0.01)
    run = stage.published(service.runs, run_name, stage.CONFIG, [rows("a", "b")])
    stage.acknowledge(run, 0, 0)
    page = look(f"#/{run_name}")
    page.locator(".findings li.loud").wait_for()
    open_all(page)
    assert axe.violations(page, source) == []

    for rank, mini_batch in ((1, 0), (0, 1), (1, 1)):
        stage.acknowledge(run, rank, mini_batch, commit=True)
    run.finish()
    page = look(f"#/{run_name}")
    page.locator("h1 + .state.finished").wait_for()
    page.locator("section[aria-label=History] figure").first.wait_for()
    assert axe.violations(page, source) == []
