"""Calls to NVIDIA's Dynamo, which returns tokens in its extension `nvext`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import gristmill
from gristmill import InvalidArgumentError, RolloutClient
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.settings import load
from tests.on_loop import Service
from tests.recorder.answers import comparable
from tests.recorder.dynamo import NAMES, Dynamo
from tests.recorder.engine import END, logprobs_for, prompt_of, serving
from tests.recorder.recorders import Recorder, end, post, start, trained

CHAT, COMPLETION = "v1/chat/completions", "v1/completions"
HI: list[Any] = [{"role": "user", "content": "say hi there"}]
ANSWER = [*b"hi there", END]
EXTENSIONS: tuple[dict[str, Any], ...] = (
    {},
    {"nvext": None},
    {"nvext": {"extra_fields": None}},
    {"nvext": {"extra_fields": ["engine_data"]}},
    {"nvext": {"extra_fields": ["completion_token_ids", "unknown"]}},
)


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Dynamo]:
    with serving(Dynamo()) as dynamo:
        yield dynamo


@pytest.fixture(scope="module")
def recorder(dynamo: Dynamo, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("dynamo")
    flags = ("--journal", str(directory / "journal"), "--engine", "dynamo")
    running = start(directory / "log", dynamo.url, service.grpc_address, *flags)
    yield running
    end(running)


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return {"model": "toy", **({"messages": HI} if path == CHAT else {"prompt": "say hi there"}), **more}


@pytest.mark.parametrize("gives", [NAMES, NAMES[:2], NAMES[2:]], ids=["all", "named", "engine_data"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_answer_is_recorded_and_is_dynamos_own(
    service: Service,
    recorder: Recorder,
    dynamo: Dynamo,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    gives: tuple[str, ...],
) -> None:
    monkeypatch.setattr(dynamo, "gives", gives)
    streams: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
    )
    calls = [
        body_of(path, **stream, **extension, **({"logprobs": 1} if logprobs else {}))
        for stream in streams
        for extension in EXTENSIONS
        for logprobs in (False, True)
    ]
    for call in calls:
        recorded, direct = (
            httpx.post(f"{url}/{path}", json=call, trust_env=False) for url in (recorder.base(run), dynamo.url)
        )
        assert (recorded.status_code, comparable(recorded.content)) == (200, comparable(direct.content)), call
    assert recorder.finish(run)["steps"] == len(calls)
    prompt = prompt_of(HI) if path == CHAT else list(b"say hi there")
    for row in trained(service.grpc_address, run):
        assert (row.tokens, row.logprobs) == ([*prompt, *ANSWER], logprobs_for(len(ANSWER)))


def test_a_conversation_is_a_row_and_its_own_extension_is_kept(
    service: Service, recorder: Recorder, dynamo: Dynamo, run: str
) -> None:
    own = {"agent_hints": {"priority": 5}, "extra_fields": ["timing", "engine_data"]}
    with recorder.openai(run) as client:
        client.chat.completions.create(model="toy", messages=HI, extra_body={"nvext": own})
        turns: Any = [*HI, {"role": "assistant", "content": "hi there"}, {"role": "user", "content": "say more"}]
        client.chat.completions.create(model="toy", messages=turns)
    assert dynamo.requests[-2]["nvext"] == {
        "agent_hints": {"priority": 5},
        "extra_fields": ["timing", "engine_data", "completion_token_ids", "prompt_token_ids"],
    }
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert row.trained == [*ANSWER, *b"more", END]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_tokens(
    service: Service, recorder: Recorder, dynamo: Dynamo, run: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """At a stop string, Dynamo ends an answer of which the engine has more tokens."""
    monkeypatch.setattr(dynamo, "more", 2)
    assert httpx.post(f"{recorder.base(run)}/{CHAT}", json=body_of(CHAT, stream=stream)).status_code == 200
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert (row.trained, row.logprobs) == (ANSWER, logprobs_for(len(ANSWER)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"lacks": 1}, "8 logprobs for 9 token ids"),
        ({"gives": ()}, "lacks the prompt's token ids"),
        ({"gives": NAMES[:1]}, "lacks the prompt's token ids"),
        ({"gives": NAMES[1:2]}, "lacks the response's token ids"),
        ({"skips": 3}, "the 8 tokens of nvext.completion_token_ids are not the first of the 9"),
    ],
)
def test_an_answer_that_lacks_tokens_or_logprobs_is_refused(
    recorder: Recorder,
    dynamo: Dynamo,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    problem: str,
    stream: bool,
) -> None:
    for attribute, value in fault.items():
        monkeypatch.setattr(dynamo, attribute, value)
    answer = httpx.post(f"{recorder.base(run)}/{CHAT}", json=body_of(CHAT, stream=stream))
    assert problem in answer.text
    assert answer.status_code == (200 if stream else 502)
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_calls_that_cannot_be_recorded_are_refused_and_dynamos_errors_are_forwarded(
    recorder: Recorder, dynamo: Dynamo, run: str
) -> None:
    def asked(path: str, **more: Any) -> tuple[int, str]:
        answer = httpx.post(f"{recorder.base(run)}/{path}", json=body_of(path, **more))
        return answer.status_code, answer.text

    for path, more in ((CHAT, {"n": 2}), (COMPLETION, {"prompt": ["a", "b"]})):
        status, text = asked(path, **more)
        assert (status, "asks for 2 choices, and the engine returns token ids of one" in text) == (400, True)
    assert not any(call.get("n") or isinstance(call.get("prompt"), list) for call in dynamo.requests)
    for nvext in (5, "engine_data", {"extra_fields": "engine_data"}, {"extra_fields": {"a": 1}}):
        status, text = asked(CHAT, nvext=nvext)
        assert (status, "Failed to deserialize" in text) == (400, True), nvext
    status, text = asked(CHAT, messages=[{"role": "user", "content": "fail"}], stream=True)
    assert (status, "Internal server error" in text) == (200, True)
    with pytest.raises(httpx.HTTPError):
        asked(CHAT, messages=[{"role": "user", "content": "cut"}], stream=True)
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_images_are_not_recorded() -> None:
    with pytest.raises(InvalidArgumentError, match="Dynamo may report a prompt without the tokens of its images"):
        load(RecorderSettings, {"upstream": "http://dynamo:8000", "engine": "dynamo", "columns": "sampling,images"})


def test_nothing_is_spliced() -> None:
    with pytest.raises(InvalidArgumentError, match="dynamo has no route that renders conversations; set --splice off"):
        load(RecorderSettings, {"upstream": "http://dynamo:8000", "engine": "dynamo", "splice": "verify"})


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_is_captured_in_its_own_process(service: Service, run: str, stream: bool) -> None:
    with (
        serving(Dynamo()) as dynamo,
        RolloutClient(service.grpc_address, run) as client,
        client.trajectory("a", sample=0) as trajectory,
    ):
        with (
            gristmill.capture(trajectory, f"{dynamo.url}/v1", "dynamo"),
            openai.OpenAI(base_url=f"{dynamo.url}/v1", api_key="a") as a,
        ):
            answer: Any = a.chat.completions.create(model="toy", messages=HI, stream=stream)
            assert not any(hasattr(part, "nvext") for part in (answer if stream else [answer]))
        trajectory.finish(1.0)
    (row,) = trained(service.grpc_address, run)
    assert (row.trained, row.logprobs) == (ANSWER, logprobs_for(len(ANSWER)))
