"""OpenAI's responses through a recorder, where vLLM gives their token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.on_loop import Service
from tests.recorder.engine import END, Engine, prompt_of
from tests.recorder.recorders import Recorder, end, post, start, trained


@pytest.fixture(scope="module")
def plain(engine: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """A recorder of rows without logprobs."""
    directory: Path = tmp_path_factory.mktemp("plain")
    flags = ("--journal", str(directory / "journal.sqlite3"), "--no-logprobs")
    running = start(directory / "log", engine.url, service.grpc_address, *flags)
    yield running
    end(running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_a_step(plain: Recorder, engine: Engine, service: Service, run: str, stream: bool) -> None:
    with plain.openai(run) as client:
        answer: Any = client.responses.create(model="toy", input="say hello", stream=stream)
        last = list(answer)[-1].response if stream else answer
        assert last.output_text == "hello"
        assert "output_messages" not in last.model_dump()
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "say more"}])
    assert engine.requests[-1].get("logprobs") is None
    assert plain.finish(run)["steps"] == 2
    first, second = trained(service.grpc_address, run)
    assert first.tokens == [*prompt_of([{"role": "user", "content": "say hello"}]), *b"hello", END]
    assert (first.trained, second.trained) == ([*b"hello", END], [*b"more", END])


def test_an_engines_error_passes(plain: Recorder, run: str) -> None:
    status, answer = post(f"{plain.base(run)}/v1/responses", {"model": "toy", "input": "fail 422"})
    assert (status, answer["error"]["message"]) == (422, "failed on request")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"background": True}, "background is set"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "records only tokens"),
    ],
)
def test_what_cannot_be_recorded_is_refused(plain: Recorder, run: str, more: dict[str, Any], problem: str) -> None:
    status, answer = post(f"{plain.base(run)}/v1/responses", {"model": "toy", "input": "say hi", **more})
    assert (status, problem in answer["error"]["message"]) == (400, True)


def test_a_recorder_of_logprobs_says_why_it_refuses_responses(recorder: Recorder, run: str) -> None:
    status, answer = post(f"{recorder.base(run)}/v1/responses", {"model": "toy", "input": "say hi"})
    assert (status, "--no-logprobs" in answer["error"]["message"]) == (400, True)
