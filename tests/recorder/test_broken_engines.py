"""Engines that answer what no engine should: the agent gets an error or a cut stream, and nothing is trained."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.on_loop import Service
from tests.recorder.broken import BrokenEngine, breaking, chunk, completion, streamed, whole
from tests.recorder.engine import END
from tests.recorder.recorders import Recorder, StartRecorder, create_run, end, post, start, trained

PROMPT = chunk(prompt_token_ids=[1, 2])
FIRST, LAST = chunk("h", [104]), chunk("", [END], "stop")
DONE = b"data: [DONE]\n\n"
ERROR = {"error": {"message": "out of memory", "code": 500}}


@pytest.fixture(scope="module")
def broken() -> Iterator[BrokenEngine]:
    with breaking() as engine:
        yield engine


@pytest.fixture(scope="module")
def recorder(broken: BrokenEngine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("broken")
    flags = ("--journal", str(directory / "journal.sqlite3"), "--finish-wait-s", "5")
    running = start(directory / "log", broken.url, service.grpc_address, *flags)
    yield running
    end(running)
    assert "Traceback" not in running.log.read_text()


def ask(recorder: Recorder, run: str, api: str = "chat/completions", **more: Any) -> tuple[int, bytes]:
    """Status and body of the answer; raises what http.client raises where it has no end."""
    return send(recorder, run, json.dumps({"messages": [{"role": "user", "content": "hi"}], **more}), api)


def send(recorder: Recorder, run: str, body: str, api: str = "chat/completions") -> tuple[int, bytes]:
    where = urlsplit(recorder.base(run))
    connection = http.client.HTTPConnection(where.netloc, timeout=60)
    try:
        connection.request("POST", f"{where.path}/v1/{api}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def has_recorded(recorder: Recorder, run: str) -> bool:
    return post(f"{recorder.base(run)}/finish", {"reward": 1.0})[0] != 409


def test_a_call_that_its_agent_closes_at_the_end_of_the_stream_is_not_cut(
    recorder: Recorder, broken: BrokenEngine, run: str
) -> None:
    """OpenAI's library closes at [DONE], whatever follows."""
    cut, answered = recorder.metric("cut_calls_total"), recorder.metric("calls_total")
    broken.answer, broken.holds = streamed(PROMPT, FIRST, LAST, DONE, is_ended=False), True
    where = urlsplit(recorder.base(run))
    connection = http.client.HTTPConnection(where.netloc, timeout=60)
    connection.request("POST", f"{where.path}/v1/chat/completions", json.dumps({"messages": [], "stream": True}))
    answer = connection.getresponse()
    while b"[DONE]" not in answer.readline():
        pass
    answer.close()
    connection.close()
    assert broken.closed.wait(60)
    broken.holds = False
    while recorder.metric("calls_under_way"):
        time.sleep(0.01)
    assert has_recorded(recorder, run)
    assert (recorder.metric("cut_calls_total"), recorder.metric("calls_total")) == (cut, answered + 1)


def test_an_event_without_an_end_ends_the_stream_with_an_error(
    start_recorder: StartRecorder, broken: BrokenEngine, service: Service, run: str
) -> None:
    recorder = start_recorder(broken.url, service.grpc_address, "--max-body-bytes", "2000")
    broken.answer = streamed(PROMPT, b"data: " + b"x" * 3000)
    assert ask(recorder, run, stream=True)[1].count(
        b"an event of the engine's stream is larger than --max-body-bytes, 2000; raise --max-body-bytes"
    )
    assert not has_recorded(recorder, run)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        pytest.param(b"", "cannot be reached", id="nothing"),
        pytest.param(b"good day\r\n\r\n", "cannot be reached", id="no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-", "cannot be reached", id="half a head"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "cannot be reached", id="a length that is none"
        ),
        pytest.param(whole(completion())[:-20], "cannot be reached", id="half a body"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000 + b"\r\n\r\n", "cannot be reached", id="a head without end"
        ),
        pytest.param(whole(None), "as a mapping", id="null"),
        pytest.param(whole([1]), "as a mapping", id="a list"),
        pytest.param(whole({}), "has no choices", id="an empty object"),
        pytest.param(whole(b"\xff\xfe{"), "JSONDecodeError", id="no JSON"),
        pytest.param(whole(completion(), "content-encoding: br"), "content-encoding br", id="an encoding"),
        pytest.param(whole(completion(choices="abc")), "the engine's answer is invalid", id="choices that are text"),
        pytest.param(whole(completion(choices=[1])), "the engine's answer is invalid", id="choices that are numbers"),
        pytest.param(whole(completion(token_ids=[1.5, 2.5, 3.5])), "logprobs are invalid", id="fractions of tokens"),
        pytest.param(whole(completion(token_ids="abc")), "logprobs are invalid", id="tokens that are text"),
        pytest.param(whole(completion(token_ids=[[1], [2], [3]])), "logprobs are invalid", id="nested tokens"),
        pytest.param(whole(completion(token_ids=[2**40, 2, 3])), "logprobs are invalid", id="tokens beyond int32"),
        pytest.param(whole(completion(token_ids=[-1, 2, 3])), "negative token ids", id="tokens below 0"),
        pytest.param(whole(completion(prompt_token_ids=[])), "no prompt tokens", id="no prompt"),
        pytest.param(whole(completion(logprobs=None)), "contains no logprobs", id="no logprobs"),
        pytest.param(
            whole(completion(logprobs={"content": [{"logprob": 1e99}] * 3})),
            "token 0 has the logprob 1e+99",
            id="logprobs beyond float32",
        ),
        *(
            pytest.param(
                whole(completion(logprobs={"content": [{"logprob": value}] * 3})),
                "which vLLM writes for",
                id=f"a logprob of {value}",
            )
            for value in (-9999.0, -3.4e38, 0.5)
        ),
        pytest.param(
            whole(json.dumps(completion(logprobs={"content": [{"logprob": float("nan")}] * 3})).encode()),
            "JSONDecodeError",
            id="logprobs that are NaN",
        ),
        pytest.param(
            whole(completion(logprobs={"content": [{"logprob": None}] * 3})), "has the logprob None", id="null logprobs"
        ),
        pytest.param(
            whole(completion(choices=completion()["choices"] * 2)), "some with the same index", id="a choice twice"
        ),
        pytest.param(whole(completion(choices=[])), "has no choices", id="no choices"),
        pytest.param(
            whole(completion(logprobs={"content": [{"logprob": "-1"}] * 3})),
            "has the logprob '-1'",
            id="logprobs that are text",
        ),
        pytest.param(
            whole(completion(logprobs={"content": [{"logprob": -1}]})),
            "1 logprobs for 3 token ids",
            id="a logprob for three tokens",
        ),
        pytest.param(whole(completion(finish_reason=7)), "finish_reason is 7", id="a reason that is a number"),
        pytest.param(
            whole(completion(finish_reason=["stop"])), "finish_reason is ['stop']", id="a reason that is a list"
        ),
        pytest.param(
            whole(json.dumps(completion(extra=0)).replace(": 0}", f": {'[' * 300}{']' * 300}}}").encode()),
            "Recursion",
            id="nested too deeply",
        ),
    ],
)
def test_a_broken_answer_is_refused_and_nothing_of_it_is_trained(
    recorder: Recorder, broken: BrokenEngine, run: str, answer: bytes, problem: str
) -> None:
    broken.answer = answer
    status, body = ask(recorder, run)
    message = json.loads(body)["error"]["message"]
    assert (status, problem in message) == (502, True), message
    assert not has_recorded(recorder, run)


@pytest.mark.parametrize("api", ["chat/completions", "messages"])
@pytest.mark.parametrize(
    "events",
    [
        (PROMPT, FIRST, b"data: {oops\n\n"),
        (PROMPT, FIRST, b'data: {"a": "\xff"}\n\n'),
        (PROMPT, FIRST, {"choices": [1]}),
        (PROMPT, FIRST, {"choices": [{"index": [1]}]}),
        (PROMPT, FIRST, chunk("x", "ab", "stop"), DONE),
        (PROMPT, FIRST, chunk("x", [1.5], "stop"), DONE),
        (PROMPT, FIRST, chunk("x", [105], 7), DONE),  # type: ignore[arg-type]
        (FIRST, LAST, DONE),
    ],
    ids=["no JSON", "no UTF-8", "a choice", "an index", "text", "fractions", "a reason", "no prompt"],
)
def test_garbage_within_a_stream_ends_it_with_an_error(
    recorder: Recorder, broken: BrokenEngine, run: str, api: str, events: tuple[Any, ...]
) -> None:
    broken.answer = streamed(*events)
    _, body = ask(recorder, run, api, stream=True)
    assert b"gristmill_NotRecorded" in body
    assert not has_recorded(recorder, run)


@pytest.mark.parametrize("api", ["chat/completions", "messages"])
def test_an_error_of_the_engine_within_a_stream_is_passed_on(
    recorder: Recorder, broken: BrokenEngine, run: str, api: str
) -> None:
    broken.answer = streamed(PROMPT, FIRST, ERROR, DONE)
    status, body = ask(recorder, run, api, stream=True)
    assert (status, b"out of memory" in body, b"gristmill" in body) == (200, True, False)
    assert not has_recorded(recorder, run)


@pytest.mark.parametrize("api", ["chat/completions", "messages"])
@pytest.mark.parametrize(
    "answer",
    [
        streamed(PROMPT, FIRST, is_ended=False),
        streamed(PROMPT, FIRST),
        streamed(PROMPT, FIRST, DONE),
        streamed(PROMPT, FIRST, LAST, is_ended=False),
        streamed(PROMPT, FIRST, is_ended=False) + b"HTTP/1.1 500 Internal Server Error\r\n\r\n",
        streamed(),
    ],
    ids=["cut", "ended", "done", "cut behind the last chunk", "another answer", "empty"],
)
def test_a_stream_without_its_end_is_cut_for_the_agent_too(
    recorder: Recorder, broken: BrokenEngine, run: str, api: str, answer: bytes
) -> None:
    """Or it is refused, if no byte was sent yet."""
    broken.answer = answer
    try:
        status, _ = ask(recorder, run, api, stream=True)
    except (http.client.IncompleteRead, ConnectionError):
        status = 502
    assert status == 502
    assert not has_recorded(recorder, run)


@pytest.mark.parametrize(
    "answer",
    [
        whole(completion()),
        b"HTTP/1.1 100 Continue\r\n\r\n" + whole(completion()),
        whole(completion()).replace(b"HTTP/1.1", b"HTTP/1.0"),
        whole(completion()) + whole(completion(message={"role": "assistant", "content": "twice"})),
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + json.dumps(completion()).encode(),
        whole(completion(), "content-type: application/json\r\nset-cookie: a=1\r\nset-cookie: b=caf\xe9"),
    ],
    ids=["as usual", "100 Continue", "HTTP 1.0", "two answers", "without a length", "cookies"],
)
def test_an_unusual_answer_is_recorded(
    recorder: Recorder, broken: BrokenEngine, service: Service, run: str, answer: bytes
) -> None:
    broken.answer = answer
    status, body = ask(recorder, run)
    assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "hi")
    assert recorder.finish(run) == {"steps": 1, "outcome": "accepted"}
    assert [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run)] == [b"hi"]


def test_an_agent_that_hangs_up_within_a_stream_ends_the_engines_and_is_not_recorded(
    recorder: Recorder, broken: BrokenEngine, run: str
) -> None:
    broken.answer, broken.holds = streamed(PROMPT, FIRST, is_ended=False), True
    try:
        where = urlsplit(recorder.base(run))
        connection = http.client.HTTPConnection(where.netloc, timeout=60)
        connection.request("POST", f"{where.path}/v1/chat/completions", json.dumps({"messages": [], "stream": True}))
        with connection.getresponse() as answer:
            assert answer.readline().startswith(b"data: ")
        connection.close()
        assert broken.closed.wait(60)
    finally:
        broken.holds = False
    assert not has_recorded(recorder, run)


def test_a_request_that_cannot_be_written_again_is_refused(recorder: Recorder, broken: BrokenEngine, run: str) -> None:
    asked = len(broken.requests)
    status, body = send(recorder, run, f'{{"messages": [], "tools": {"[" * 300}{"]" * 300}}}')
    assert (status, b"nest it less deeply" in body) == (400, True)
    assert len(broken.requests) == asked


NESTED = '{"a":' * 1000 + "1" + "}" * 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "v1/messages",
            f'{{"messages": [{{"role": "assistant", "content": [{{"type": "tool_use", "input": {NESTED}}}]}}]}}',
        ),
        (
            "v1beta/models/toy:generateContent",
            f'{{"contents": [], "tools": [{{"functionDeclarations": [{{"name": "a", "parameters": {NESTED}}}]}}]}}',
        ),
        ("generate", f'{{"input_ids": [1], "sampling_params": {{"n": {NESTED}}}}}'),
    ],
    ids=["messages", "contents", "tokens"],
)
def test_a_request_that_cannot_be_translated_is_refused(
    recorder: Recorder, broken: BrokenEngine, run: str, path: str, body: str
) -> None:
    asked = len(broken.requests)
    answer = httpx.post(f"{recorder.base(run)}/{path}", content=body, trust_env=False)
    assert (answer.status_code, "nest it less deeply" in answer.text) == (400, True)
    assert len(broken.requests) == asked


def test_a_prompt_that_sglang_continued_or_cut_and_a_logprob_that_is_none_are_refused(
    recorder: Recorder, broken: BrokenEngine, run: str
) -> None:
    meta = {"prompt_tokens": 3, "completion_tokens": 1, "finish_reason": {"type": "stop"}}
    meta["output_token_logprobs"] = [[-0.5, END, None]]
    broken.answer = whole({"text": "", "output_ids": [END], "meta_info": meta})
    answer = httpx.post(f"{recorder.base(run)}/generate", json={"input_ids": [1, 2]}, trust_env=False)
    assert (answer.status_code, "read 3 tokens, and the call has 2" in answer.text) == (502, True), answer.text
    meta["output_token_logprobs"] = [[-3.4028234663852886e38, END, None]]
    broken.answer = whole({"text": "", "output_ids": [END], "meta_info": meta})
    answer = httpx.post(f"{recorder.base(run)}/generate", json={"input_ids": [1, 2, 3]}, trust_env=False)
    assert (answer.status_code, "token 0 has the logprob -3.4" in answer.text) == (502, True), answer.text
    assert not has_recorded(recorder, run)
    meta["output_token_logprobs"] = [[-0.5, END, None]]
    broken.answer = whole({"text": "", "output_ids": [END], "meta_info": meta})
    answer = httpx.post(f"{recorder.base(run)}/generate", json={"input_ids": [1, 2, 3]}, trust_env=False)
    assert answer.status_code == 200
    assert has_recorded(recorder, run)


def test_a_prompt_of_a_million_tokens_is_recorded_and_delivered(
    recorder: Recorder, broken: BrokenEngine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name)
    prompt = list(range(1_000_000))
    broken.answer = streamed(chunk(prompt_token_ids=prompt), FIRST, LAST, DONE)
    assert ask(recorder, run_name, stream=True)[0] == 200
    assert recorder.finish(run_name) == {"steps": 1, "outcome": "accepted"}
    (row,) = trained(service.grpc_address, run_name)
    assert (row.tokens, row.trained) == ([*prompt, 104, END], [104, END])
