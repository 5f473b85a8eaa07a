"""llama.cpp's `/completion` through a recorder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gristmill import InvalidArgumentError
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.settings import load
from tests.on_loop import Service
from tests.recorder.answers import comparable
from tests.recorder.engine import END, serving
from tests.recorder.llamacpp import LlamaServer, prob_of
from tests.recorder.recorders import Recorder, StartRecorder, end, post, start, trained

HI = [*b"say hi there"]
ANSWER = [*b"hi there", END]


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    with serving(LlamaServer()) as llama:
        yield llama


@pytest.fixture(scope="module")
def recorder(llama: LlamaServer, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("llama")
    flags = ("--journal", str(directory / "journal"), "--engine", "llamacpp")
    running = start(directory / "log", llama.url, service.grpc_address, *flags)
    yield running
    end(running)


def logprobs(count: int) -> list[float]:
    return [math.log(prob_of(place)) for place in range(count)]


def test_an_answer_is_recorded_and_is_the_servers_own(
    service: Service, recorder: Recorder, llama: LlamaServer, run: str
) -> None:
    requested: tuple[dict[str, Any], ...] = (
        {},
        {"return_tokens": True},
        {"n_probs": 2, "post_sampling_probs": True},
        {"post_sampling_probs": True},
        {"return_progress": True},
        {"logprobs": 0, "n_probs": 0, "stop": []},
    )
    calls = [{"prompt": HI, **more, **stream} for more in requested for stream in ({}, {"stream": True})]
    for path in ("completion", "completions"):
        for call in calls:
            recorded, direct = (
                httpx.post(f"{url}/{path}", json=call, trust_env=False) for url in (recorder.base(run), llama.url)
            )
            assert (recorded.status_code, comparable(recorded.content)) == (200, comparable(direct.content)), call
    assert recorder.finish(run)["steps"] == 2 * len(calls)
    for row in trained(service.grpc_address, run):
        assert row.tokens == [*HI, *ANSWER]
        assert row.logprobs == pytest.approx(logprobs(len(ANSWER)))


def test_a_conversation_is_a_row(
    service: Service, recorder: Recorder, llama: LlamaServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [*HI, *b"hi there", END, *b"say go on"]
    monkeypatch.setattr(llama, "context", len(more) + 3)
    for prompt in (HI, more):
        answer = httpx.post(f"{recorder.base(run)}/completion", json={"prompt": prompt, "stream": True})
        assert answer.status_code == 200, answer.text
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    # The second answer ended where the context was full.
    assert row.tokens == [*more, *b"go "]
    assert row.trained == [*ANSWER, *b"go "]


@pytest.mark.parametrize("post_sampling", [False, True])
def test_an_agents_own_logprobs_are_those_of_the_row(
    service: Service, recorder: Recorder, run: str, post_sampling: bool
) -> None:
    call = {"prompt": HI, "n_probs": 1, "post_sampling_probs": post_sampling}
    answer = httpx.post(f"{recorder.base(run)}/completion", json=call).json()
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    entries = answer["completion_probabilities"]
    shown = [math.log(entry["prob"]) if post_sampling else entry["logprob"] for entry in entries]
    assert row.logprobs == pytest.approx(shown)


NO_LOGPROBS = "omits those of tokens that end within a character"


@pytest.mark.parametrize(
    ("fault", "call", "problem"),
    [
        ({}, {"prompt": [*"say höre".encode()]}, NO_LOGPROBS),
        ({}, {"prompt": [*"say höre".encode()], "stream": True}, "stream has 5 of 6 tokens"),
        ({"drafts": (3,)}, {}, NO_LOGPROBS),
        ({"drafts": (3,)}, {"stream": True, "n_probs": 1}, NO_LOGPROBS),
        ({"prob": 0.0}, {}, NO_LOGPROBS),
        ({"prob": 0.0}, {"n_probs": 1}, NO_LOGPROBS),
        ({"reads": 5}, {}, "read 5 tokens of a prompt of 12"),
        ({"context": 15, "shifts": True}, {}, "without --context-shift, or with a larger --ctx-size"),
        ({"context": 15, "shifts": True}, {"stream": True}, "without --context-shift, or with a larger --ctx-size"),
        ({"has_tokens": False}, {}, "has 0 of 9 tokens"),
    ],
)
def test_an_answer_that_lacks_tokens_or_logprobs_is_refused(
    recorder: Recorder,
    llama: LlamaServer,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    call: dict[str, Any],
    problem: str,
) -> None:
    for attribute, value in fault.items():
        monkeypatch.setattr(llama, attribute, value)
    answer = httpx.post(f"{recorder.base(run)}/completion", json={"prompt": HI, **call})
    assert problem in answer.text
    assert answer.status_code == (200 if call.get("stream") else 502)
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_without_logprobs_more_can_be_recorded(service: Service, start_recorder: StartRecorder, run: str) -> None:
    prompt = [*"say höre".encode()]
    with serving(LlamaServer(drafts=(1,))) as llama:
        recorder = start_recorder(llama.url, service.grpc_address, "--engine", "llamacpp", "--no-logprobs")
        answer = httpx.post(f"{recorder.base(run)}/completion", json={"prompt": prompt, "stop": ["r"]})
        assert answer.status_code == 200, answer.text
        recorder.finish(run)
        (row,) = trained(service.grpc_address, run)
        assert bytes(row.trained).decode() == "hör"


def test_a_stop_string_is_recorded_if_it_is_streamed(service: Service, recorder: Recorder, run: str) -> None:
    call = {"prompt": HI, "stop": ["he"]}
    refused = httpx.post(f"{recorder.base(run)}/completion", json=call)
    assert (refused.status_code, "set stream" in refused.text) == (400, True)
    httpx.post(f"{recorder.base(run)}/completion", json={**call, "stream": True})
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert bytes(row.trained) == b"hi the"
    assert row.logprobs == pytest.approx(logprobs(6))


def test_calls_that_cannot_be_recorded_are_refused_and_the_servers_errors_are_forwarded(
    recorder: Recorder, run: str
) -> None:

    def asked(path: str, **body: Any) -> tuple[int, str]:
        answer = httpx.post(f"{recorder.base(run)}/{path}", json=body)
        return answer.status_code, answer.text

    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "say hi"}, "no list of tokens in prompt"),
        ({"prompt": [[1], [2]]}, "no list of tokens in prompt"),
        ({"prompt": []}, "no list of tokens in prompt"),
        ({"prompt": {"prompt_string": "a"}}, "no list of tokens in prompt"),
        ({"prompt": HI, "n": 2}, "call /completion once for each answer"),
        ({"prompt": HI, "n_cmpl": 3}, "call /completion once for each answer"),
        ({"prompt": HI, "response_fields": ["content"]}, "omit response_fields"),
    ]
    for body, problem in refused:
        status, text = asked("completion", **body)
        assert (status, problem in text) == (400, True), body
    message = [{"role": "user", "content": "a"}]
    for path in ("v1/chat/completions", "v1/completions", "v1/messages"):
        status, text = asked(path, model="toy", messages=message, prompt="a", max_tokens=1)
        assert (status, "call /completion with a prompt of tokens" in text) == (400, True), path
    status, text = asked("completion", prompt=[1 << 40])
    assert (status, "Prompt contains invalid tokens" in text) == (400, True)
    status, text = asked("completion", prompt=[*b"fail"], stream=True)
    assert (status, "it broke" in text) == (200, True)
    with pytest.raises(httpx.HTTPError):
        asked("completion", prompt=[*b"cut"], stream=True)
    for stream in (False, True):
        assert asked("completion", prompt=[*b"none"], stream=stream)[0] == 200
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_nothing_is_spliced() -> None:
    with pytest.raises(InvalidArgumentError, match="llamacpp has no route that renders conversations"):
        load(RecorderSettings, {"upstream": "http://llama:8080", "engine": "llamacpp", "splice": "on"})
