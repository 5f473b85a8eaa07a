"""Rows of Dynamo's answers have the tokens and logprobs of its worker, and agents get Dynamo's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.engines.dynamo.conftest import MODELS
from tests.on_loop import Service
from tests.recorder.answers import comparable
from tests.recorder.engine import logprobs_for
from tests.recorder.recorders import Recorder, create_run, end, start, trained

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "clock"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SCRIPTS: list[tuple[str, dict[str, Any], str]] = [
    ("hello", {}, "hello<|im_end|>"),
    ("höre 🌍", {"logprobs": True}, "höre 🌍<|im_end|>"),
    ("a long answer", {"max_tokens": 4}, "a lo"),
    ("one. two", {"stop": ["."]}, "one."),
    (f"I look: {CALL}", {"tools": TOOLS}, f"I look: {CALL}<|im_end|>"),
    ("hello", {"nvext": {"extra_fields": ["engine_data", "unknown"]}}, "hello<|im_end|>"),
]


@pytest.fixture(scope="module")
def recorder(dynamo: str, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    folder = tmp_path_factory.mktemp("recorder")
    flags = ("--engine", "dynamo", "--journal", str(folder / "journal"))
    recorder = start(folder / "log", dynamo, service.grpc_address, *flags)
    yield recorder
    end(recorder)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "more", "answer"), SCRIPTS)
def test_a_row_has_the_workers_tokens(
    recorder: Recorder,
    dynamo: str,
    service: Service,
    folder: Path,
    request: pytest.FixtureRequest,
    script: str,
    more: dict[str, Any],
    answer: str,
    stream: bool,
    model: str,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": script}]
    run = f"run-{abs(hash(request.node.name))}"
    create_run(service.grpc_address, run)
    body = {"model": model, "messages": messages, "stream": stream, **more}
    recorded, direct = (
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60) for url in (recorder.base(run), dynamo)
    )
    assert recorded.status_code == 200, recorded.text
    if "tools" not in more:  # The id of a call is random.
        assert comparable(recorded.content) == comparable(direct.content)
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    response = tokenizer.encode(answer, add_special_tokens=False)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (row.tokens, row.trained) == ([*prompt, *response], response)
    assert row.logprobs == logprobs_for(len(response))


def test_nothing_is_missing(recorder: Recorder) -> None:
    assert "nothing is missing" in recorder.log.read_text()
