"""Conversations of fourteen model families are one row each, before a real SGLang with their templates and tokenizers.

It has a random model of each vocabulary, and scripts of what it says. `make test-templates` fetches the files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.engines import tiny_model
from tests.engines.sglang.conftest import running
from tests.engines.sglang.scripted import ScriptedSglang
from tests.engines.templates.conversations import run
from tests.engines.templates.families import FAMILIES, FOLDER, Family
from tests.on_loop import Service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.exists(), reason="`make test-templates` fetches templates and tokenizers"),
]

# SGLang replaces a part of Gemma's tokenizer, which loses its spaces.
RENDERED = [family for family in FAMILIES.values() if family.name != "gemma-4"]
FLAGS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-custom-logit-processor")


def save(family: Family, folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=family.encoder, eos_token=family.end, pad_token=family.end)
    tokenizer.chat_template = (FOLDER / f"{family.template}.jinja").read_text()
    tiny_model.save_with(tokenizer, folder)


@pytest.mark.parametrize("family", RENDERED, ids=[family.name for family in RENDERED])
def test_every_conversation_is_one_row_of_what_was_read_and_sampled_and_its_answers_are_the_engines_own(
    family: Family, service: Service, tmp_path: Path
) -> None:
    save(family, tmp_path)
    with running(tmp_path, *FLAGS) as url:
        engine = ScriptedSglang(family, upstream=url)
        outcome = run(engine, 12, 0, service, tmp_path, family.name)
    print(outcome)
    assert outcome.calls > 20
    assert (outcome.rows, outcome.different, outcome.wrong) == (outcome.conversations, 0, [])
    assert outcome.unlike == []
    assert outcome.results["spliced"] == outcome.calls - outcome.conversations
