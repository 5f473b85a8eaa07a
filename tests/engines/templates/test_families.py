"""Conversations of fifteen model families are one row each, before an engine with their templates and tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.templates.conversations import run
from tests.engines.templates.engine import TemplateEngine
from tests.engines.templates.families import FAMILIES, Family
from tests.on_loop import Service


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_conversation_is_one_row_of_what_was_read_and_sampled_and_its_answers_are_the_engines_own(
    family: Family, service: Service, tmp_path: Path
) -> None:
    outcome = run(TemplateEngine(family), 12, 0, service, tmp_path, family.name)
    assert outcome.calls > 20
    assert (outcome.rows, outcome.different, outcome.wrong) == (outcome.conversations, 0, [])
    assert outcome.unlike == []
    assert outcome.answers >= outcome.calls - outcome.hidden
    assert outcome.results["spliced"] == outcome.calls - outcome.conversations
