"""What an older service kept is read, and trained on, by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.formats.reading import DIRECTORY, JOURNAL, REDIS, read, through_journal, through_redis

FIXTURES = sorted(path.stem for path in DIRECTORY.glob("*.json"))


def test_every_format_that_this_version_writes_has_a_fixture() -> None:
    assert {JOURNAL, REDIS} <= set(FIXTURES), "run `make formats`, and keep the fixtures of released formats"


@pytest.mark.parametrize("name", FIXTURES)
def test_a_run_that_was_kept_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    stored = json.loads((DIRECTORY / f"{name}.json").read_text())
    through = through_journal if name.startswith("journal") else through_redis
    assert read(stored["kept"], tmp_path, through) == stored["found"], (
        "an unreleased format changed? run `make formats` and look at what is found now"
    )
