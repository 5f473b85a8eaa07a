"""The engines' own routes, which take tokens and give tokens, through a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.on_loop import Service
from tests.recorder.engine import Engine, Words, answer_of, logprobs_for
from tests.recorder.recorders import Recorder, end, start, trained

PROMPT = list(b"say hi")
HI = answer_of(Words(text="hi"))


@pytest.fixture(scope="module")
def of_sglang(sglang: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("sglang")
    flags = ("--journal", str(directory / "journal"), "--engine", "sglang")
    running = start(directory / "log", sglang.url, service.grpc_address, *flags)
    yield running
    end(running)


def call(recorder: Recorder, run: str, path: str, **body: Any) -> str:
    answer = httpx.post(f"{recorder.base(run)}/{path}", json=body, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.text


def check(recorder: Recorder, service: Service, run: str, answers: list[list[int]]) -> None:
    recorder.finish(run)
    rows = trained(service.grpc_address, run)
    assert [row.tokens for row in rows] == [[*PROMPT, *answer] for answer in answers]
    assert [row.logprobs for row in rows] == [logprobs_for(len(answer)) for answer in answers]


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_answers_are_steps(recorder: Recorder, service: Service, run: str, stream: bool) -> None:
    settings = {"n": 2, "top_p": 0.9}
    text = call(recorder, run, "inference/v1/generate", token_ids=PROMPT, sampling_params=settings, stream=stream)
    assert "token_ids" in text
    assert ("prompt_token_ids" in text.replace('"prompt_token_ids":null', ""), 'logprob":' in text) == (False, False)
    check(recorder, service, run, [HI, answer_of(Words(text="hi #1"))])
    assert recorder.metric('unreproducible_steps_total{setting="top_p"}') >= 2


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_answers_are_steps(
    of_sglang: Recorder, sglang: Engine, service: Service, run: str, stream: bool, is_incremental: bool
) -> None:
    sglang.is_incremental = is_incremental and stream
    text = call(of_sglang, run, "generate", input_ids=PROMPT, sampling_params={}, stream=stream)
    assert ("output_ids" in text, "output_token_logprobs" in text) == (True, False)
    check(of_sglang, service, run, [HI])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_tokens_is_no_step(of_sglang: Recorder, sglang: Engine, run: str, stream: bool) -> None:
    sglang.is_incremental = False
    text = call(of_sglang, run, "generate", input_ids=list(b"short "), stream=stream)
    assert ('"output_ids":[]' in text, "error" in text) == (True, False)
    call(of_sglang, run, "generate", input_ids=PROMPT)
    assert of_sglang.finish(run)["steps"] == 1


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("generate", {"text": "say hi"}, "no list of tokens in input_ids"),
        ("generate", {"input_ids": [[1], [2]]}, "no list of tokens in input_ids"),
        ("generate", {"input_ids": [1], "sampling_params": {"n": 2}}, "call /generate once for each answer"),
        ("generate", {"input_ids": [1], "sampling_params": [{}]}, "sampling_params is not an object"),
        ("inference/v1/generate", {"token_ids": []}, "no list of tokens in token_ids"),
    ],
)
def test_a_call_that_cannot_be_recorded_is_refused(
    recorder: Recorder, run: str, path: str, body: dict[str, Any], problem: str
) -> None:
    answer = httpx.post(f"{recorder.base(run)}/{path}", json=body, trust_env=False)
    assert (answer.status_code, problem in answer.text) == (400, True)
