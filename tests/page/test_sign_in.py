"""The page of a service that asks for tokens, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill._wire.rows import from_rows
from gristmill_service.access.tokens import create_token
from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.page import stage
from tests.serving import FREE_PORTS


def test_a_person_signs_in_with_a_token_and_sees_the_runs(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    token = create_token(path, "a person", ["viewer"], ["*"], None)
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, tokens_file=path))
    context = browser.new_context()
    try:
        service.start()
        rows = [row for uid in ("a", "b") for row in stage.group(uid)]
        stage.published(service.runs, "math-1", stage.CONFIG, [from_rows(rows, step_wise=True)])
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{service.http_url}/docs")
        page.get_by_text("requires a token").wait_for()
        page.goto(service.http_url)
        asked = page.get_by_role("dialog", name="Sign in")
        asked.get_by_label("Token").fill("a-guess")
        asked.get_by_role("button", name="Sign in").click()
        asked.get_by_text("the token is unknown").wait_for()
        asked.get_by_label("Token").fill(token)
        asked.get_by_role("button", name="Sign in").click()
        page.locator("section[aria-label=Shards] canvas").first.wait_for()
        assert page.locator("h1").inner_text() == "math-1"
        assert page.evaluate("document.cookie") == ""
        page.goto(f"{service.http_url}/docs")
        page.get_by_text("/v1/runs/{run}/groups").first.wait_for()
    finally:
        context.close()
        service.stop()
