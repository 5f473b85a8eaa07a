"""Tokens as text where merging broke, by a tokenizer from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.monitoring.views.tokens import TokenTexts
from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.page import stage
from tests.serving import FREE_PORTS


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The word of token 13 is "w13"; 99 is beyond its words."""
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({f"w{number}": number for number in range(20)}, unk_token="w0")).save(str(path))
    return path


@pytest.mark.parametrize("is_directory", [False, True])
def test_tokens_are_shown_as_text_where_merging_broke(browser: Any, tokenizer: Path, is_directory: bool) -> None:
    path = tokenizer.parent if is_directory else tokenizer
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, tokenizer=path))
    service.start()
    page = browser.new_page()
    try:
        rows = [row for uid in ("a", "b") for row in stage.group(uid)]
        stage.published(service.runs, "r", stage.CONFIG, [from_rows(rows, step_wise=True)])
        breaks = httpx.get(f"{service.http_url}/v1/runs/r/batches/0/breaks", trust_env=False, timeout=60).json()
        assert breaks["texts"]["13"] == "w13"
        assert "99" not in breaks["texts"]
        row = httpx.get(f"{service.http_url}/v1/runs/r/batches/0/rows/0", trust_env=False, timeout=60).json()
        assert row["texts"]["5"] == "w5"
        page.goto(f"{service.http_url}/#/r")
        broken = page.locator("section[aria-label='Where merging broke']")
        page.locator("section[aria-label=Shards] canvas").first.wait_for()
        broken.scroll_into_view_if_needed()
        broken.locator("tbody tr").first.wait_for()
        line = broken.locator("tbody tr").first.inner_text()
        assert "w10w11w12 w13 (13) w14" in line
        assert "99" in line
    finally:
        page.close()
        service.stop()


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nothing\.json cannot be read: .*; set it to the tokenizer"):
        TokenTexts(tmp_path / "nothing.json")
