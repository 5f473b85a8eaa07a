"""What a recorder wrote down of a conversation can be read on the page, and exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill._wire.column_spec import specs_of
from gristmill._wire.rows import from_rows
from tests.cli.terminal import gristmill
from tests.on_loop import Service
from tests.page import stage
from tests.page.conftest import OpenPage

COLUMN: dict[str, Any] = {"name": "conversation", "dtype": "uint8", "scope": "items", "merge": "concat"}
COLUMNS = specs_of([COLUMN])
LOOK = {"function": {"name": "look", "arguments": '{"at": "clock"}'}}
SAID: Sequence[dict[str, Any]] = (
    {
        "continues": None,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What time is it?"}]}],
        "answer": {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [LOOK]},
    },
    {
        "continues": 0,
        "messages": [{"role": "tool", "content": "noon"}],
        "answer": {"role": "assistant", "content": "It is noon."},
    },
)


def rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """A group whose first sample has these lines, one per step. The second has nothing."""
    return [
        row | {"conversation": list(lines[step]) if row["sample"] == 0 else []}
        for row in stage.group("a")
        for step in (row["step"],)
    ]


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    config = {**stage.CONFIG, "train_batch_size": 1, "dp_size": 1, "columns": [COLUMN]}
    lines = [json.dumps(line).encode() + b"\n" for line in SAID]
    stage.published(service.runs, run_name, config, [from_rows(rows(lines), step_wise=True, columns=COLUMNS)])
    return run_name


def test_a_row_has_what_was_said(service: Service, run: str) -> None:
    path = f"{service.http_url}/v1/runs/{run}/batches/0/rows/0"
    said = httpx.get(path, trust_env=False).json()["conversation"]
    assert [json.loads(line) for line in said.splitlines()] == [*SAID]
    assert httpx.get(path, params={"start": 1}, trust_env=False).json()["conversation"] == ""


def test_the_page_shows_a_row_as_a_conversation(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    page.locator("section[aria-label=Shards] canvas").first.click(position={"x": 40, "y": 22})
    conversation = page.get_by_role("region", name="Conversation")
    conversation.wait_for()
    assert conversation.locator("p").all_inner_texts() == [
        "user What time is it?",
        "assistant, thinking I look.",
        'assistant, call of look {"at": "clock"}',
        "tool noon",
        "assistant It is noon.",
    ]


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (json.dumps(SAID[1]).encode(), "Continues step 0, which is in another row."),
        (b"\xff{", "The column conversation has no lines of JSON."),
    ],
    ids=["earlier messages are elsewhere", "not written by a recorder"],
)
def test_the_page_says_why_a_row_does_not_show_its_whole_conversation(
    line: bytes, note: str, open_page: OpenPage, service: Service, run_name: str
) -> None:
    config = {**stage.CONFIG, "train_batch_size": 1, "dp_size": 1, "columns": [COLUMN]}
    lines = [line, b"\n" + line]
    stage.published(service.runs, run_name, config, [from_rows(rows(lines), step_wise=True, columns=COLUMNS)])
    page = open_page(f"#/{run_name}")
    page.locator("section[aria-label=Shards] canvas").first.click(position={"x": 40, "y": 22})
    page.get_by_text(note).wait_for()


def test_conversations_are_exported_with_their_tokens(service: Service, run: str, tmp_path: Path) -> None:
    out = tmp_path / "said.jsonl"
    exported = gristmill("export", run, 0, "--out", out, "--conversations", "--address", service.grpc_address)
    assert (exported.returncode, exported.stderr) == (0, "")
    first, second, *others = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["messages"], second["answer"]) == (SAID[0]["messages"], SAID[1]["answer"])
    assert (second["uid"], second["step"], second["response_ids"]) == ("a", 1, [8])
    assert all("conversation" not in row and "answer" not in row for row in others)


def test_a_run_without_the_column_has_none_to_export(service: Service, run_name: str, tmp_path: Path) -> None:
    rows = [from_rows([row for uid in "ab" for row in stage.group(uid)], step_wise=True)]
    stage.published(service.runs, run_name, stage.CONFIG, rows)
    address = service.grpc_address
    refused = gristmill("export", run_name, 0, "--out", tmp_path / "a.jsonl", "--conversations", "--address", address)
    assert (refused.returncode, "start gristmill record with --columns conversation" in refused.stderr) == (1, True)
