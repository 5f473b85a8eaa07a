"""Within `gristmill.capture` the calls of an agent become steps, and the agent sees none of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai
import pytest

import gristmill
from gristmill import (
    AsyncRolloutClient,
    FailedPreconditionError,
    InvalidArgumentError,
    RolloutClient,
    Trajectory,
)
from gristmill._capture import clients
from tests.client.capture.callers import (
    ASYNC,
    HI,
    SYNC,
    ask,
    by_aiohttp,
    by_async_openai,
    by_openai,
    expected,
    meaning,
    steps,
    user,
)
from tests.on_loop import Service
from tests.recorder.engine import END, Engine, logprobs_for
from tests.recorder.recorders import trained

ADDED = {"return_token_ids": True, "return_weight_versions": True, "logprobs": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", SYNC)
def test_a_call_is_recorded_and_its_answer_is_as_without_capture(
    call: Callable[[str, Any], str], stream: bool, engine: Engine, service: Service, rollouts: RolloutClient, run: str
) -> None:
    body = {"model": "toy", "messages": HI, "stream": stream}
    without = call(engine.url, body)
    assert "return_token_ids" not in engine.requests[-1]
    with rollouts.trajectory("a", 0) as trajectory:
        with gristmill.capture(trajectory, f"{engine.url}/v1"):
            within = call(engine.url, body)
        assert trajectory.finish(1.0)
    assert engine.requests[-1] == {**body, **ADDED}
    assert meaning(within) == meaning(without)
    assert trained(service.grpc_address, run) == [expected()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", ASYNC)
def test_an_awaited_call_is_recorded_and_its_answer_is_as_without_capture(
    call: Callable[[str, Any], Awaitable[str]], stream: bool, engine: Engine, service: Service, run: str
) -> None:
    body = {"model": "toy", "messages": HI, "stream": stream}

    async def work() -> tuple[str, str]:
        without = await call(engine.url, body)
        async with (
            AsyncRolloutClient(service.grpc_address, run, timeout_s=20) as rollouts,
            rollouts.trajectory("a", 0) as trajectory,
        ):
            with gristmill.capture(trajectory, f"{engine.url}/v1"):
                within = await call(engine.url, body)
            assert await trajectory.finish(1.0)
        return without, within

    without, within = asyncio.run(work())
    assert meaning(within) == meaning(without)
    assert trained(service.grpc_address, run) == [expected()]


def test_an_agent_with_asyncio_is_recorded_by_a_client_that_blocks(
    engine: Engine, service: Service, rollouts: RolloutClient, run: str
) -> None:
    with rollouts.trajectory("a", 0) as trajectory:
        with gristmill.capture(trajectory, f"{engine.url}/v1"):
            asyncio.run(by_async_openai(engine.url, {"model": "toy", "messages": HI}))
        trajectory.finish(1.0)
    assert trained(service.grpc_address, run) == [expected()]


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_is_asked_by_its_own_fields(
    sglang: Engine, service: Service, rollouts: RolloutClient, run: str, stream: bool
) -> None:
    with rollouts.trajectory("a", 0) as trajectory:
        with gristmill.capture(trajectory, f"{sglang.url}/v1", engine="sglang"):
            answer = by_openai(sglang.url, {"model": "toy", "messages": HI, "stream": stream})
        trajectory.finish(1.0)
    assert "sglext" not in answer
    assert trained(service.grpc_address, run) == [expected()]


def test_a_conversation_is_one_row_with_the_reward_of_its_end(
    agent: openai.OpenAI, service: Service, rollouts: RolloutClient, run: str
) -> None:
    messages = [user("say one")]
    with rollouts.trajectory("a", 0) as trajectory, gristmill.capture(trajectory, str(agent.base_url)):
        for text in ("say two", "say three"):
            answer = agent.chat.completions.create(model="toy", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user(text)]
        agent.chat.completions.create(model="toy", messages=messages)
        assert steps(trajectory) == 3
        trajectory.finish()
    assert rollouts.set_reward("a", 0, 0.5)
    (row,) = trained(service.grpc_address, run)
    assert row.trained == [*b"one", END, *b"two", END, *b"three", END]
    assert row.reward == 0.5


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_of_each_prompt_is_a_step(
    agent: openai.OpenAI, service: Service, rollouts: RolloutClient, run: str, stream: bool
) -> None:
    with rollouts.trajectory("a", 0) as trajectory:
        with gristmill.capture(trajectory, str(agent.base_url)):
            answer: Any = agent.completions.create(model="toy", prompt=["say a", "say b"], n=2, stream=stream)
            assert len(list(answer) if stream else answer.choices) >= 4
        trajectory.finish(1.0)
    rows = trained(service.grpc_address, run)
    assert [bytes(row.tokens[:-1]) for row in rows] == [b"say aa", b"say aa #1", b"say ba", b"say ba #1"]


def test_the_agent_keeps_the_fields_that_it_asked_for(agent: openai.OpenAI, rollouts: RolloutClient) -> None:
    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, str(agent.base_url)):
        answer = ask(agent, "say hi", logprobs=True, extra_body={"return_token_ids": True})
    assert answer.choices[0].logprobs.content[0].logprob == logprobs_for(1)[0]
    assert answer.choices[0].token_ids == [*b"hi", END]
    trajectory.abort("a test")


def test_an_answer_is_recorded_before_the_agent_has_its_end(agent: openai.OpenAI, rollouts: RolloutClient) -> None:
    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, str(agent.base_url)):
        recorded = [(chunk.choices[0].finish_reason, steps(trajectory)) for chunk in ask(agent, "say hi", stream=True)]
    assert recorded == [(None, 0)] * 3 + [("stop", 1)]
    trajectory.abort("a test")


def test_an_error_of_the_engine_reaches_the_agent_and_is_not_recorded(
    agent: openai.OpenAI, rollouts: RolloutClient
) -> None:
    trajectory = rollouts.trajectory("a", 0)
    with (
        gristmill.capture(trajectory, str(agent.base_url)),
        pytest.raises(openai.BadRequestError, match="failed on request"),
    ):
        ask(agent, "fail 400")
    assert steps(trajectory) == 0
    trajectory.abort("a test")


def test_a_stream_that_the_agent_leaves_or_the_engine_cuts_is_not_recorded(
    agent: openai.OpenAI, rollouts: RolloutClient
) -> None:
    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, str(agent.base_url)):
        with ask(agent, "say hi", stream=True) as answer:
            next(iter(answer))
        with pytest.raises(openai.APIConnectionError):
            list(ask(agent, "cut 3", stream=True))
    assert steps(trajectory) == 0
    trajectory.abort("a test")


NO_IDS = "cannot be recorded.*token ids.*use vLLM 0.10.2 or newer"


def test_an_answer_without_token_ids_is_an_error_at_once_that_names_the_remedy(
    agent: openai.OpenAI, engine: Engine, rollouts: RolloutClient
) -> None:
    trajectory, asked = rollouts.trajectory("a", 0), len(engine.requests)
    with gristmill.capture(trajectory, f"{engine.url}/v1"):
        with pytest.raises(openai.InternalServerError, match=NO_IDS):
            ask(agent, "tokenless hi")
        with pytest.raises(InvalidArgumentError, match=NO_IDS):
            list(ask(agent, "tokenless hi", stream=True))
        with pytest.raises(InvalidArgumentError, match=NO_IDS):
            asyncio.run(by_aiohttp(engine.url, {"messages": [user("tokenless hi")]}))
    assert (steps(trajectory), len(engine.requests) - asked) == (0, 3)
    with pytest.raises(FailedPreconditionError, match="no captured step to end with"):
        trajectory.finish(1.0)
    trajectory.abort("a test")


def test_a_call_that_could_not_be_trained_is_refused_before_the_engine_is_asked(
    agent: openai.OpenAI, engine: Engine, rollouts: RolloutClient
) -> None:
    trajectory, asked = rollouts.trajectory("a", 0), len(engine.requests)
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    with gristmill.capture(trajectory, engine.url):
        with pytest.raises(openai.BadRequestError, match="gristmill records only tokens"):
            agent.chat.completions.create(model="toy", messages=picture)
        with pytest.raises(openai.BadRequestError, match="by the recorder"):
            agent.responses.create(model="toy", input="say hi")
        with (
            anthropic.Anthropic(base_url=engine.url, api_key="none") as other,
            pytest.raises(anthropic.BadRequestError, match="by the recorder"),
        ):
            other.messages.create(model="toy", messages=HI, max_tokens=5)  # type: ignore[arg-type]
        assert "by the recorder" in httpx.post(f"{engine.url}/completion", json={"prompt": [1]}).text
    assert len(engine.requests) == asked
    trajectory.abort("a test")


@pytest.mark.parametrize("of_chat", [True, False])
@pytest.mark.parametrize("logprob", [-9999.0, -3.4028234663852886e38, 0.5, float("nan"), None])
def test_an_answer_with_a_logprob_that_is_none_is_an_error(
    logprob: float | None, of_chat: bool, rollouts: RolloutClient
) -> None:
    content = {"content": [{"logprob": logprob}]} if of_chat else {"token_logprobs": [logprob]}
    answer = {**ANSWER, "choices": [{**ANSWER["choices"][0], "logprobs": content}]}
    engine = httpx.MockTransport(lambda request: httpx.Response(200, content=json.dumps(answer)))
    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, "http://vllm/v1"), httpx.Client(transport=engine) as client:
        refused = client.post("http://vllm/v1/chat/completions", json={"messages": HI})
    assert (refused.status_code, "token 0 has the logprob" in refused.text) == (502, True)
    assert steps(trajectory) == 0
    trajectory.abort("a test")


def test_calls_to_other_urls_than_the_engines_pass(
    agent: openai.OpenAI, engine: Engine, rollouts: RolloutClient
) -> None:
    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, base_url="http://vllm:8000/v1"):
        ask(agent, "say hi")
        agent.responses.create(model="toy", input="say hi")
    assert steps(trajectory) == 0
    with gristmill.capture(trajectory, base_url=f"{engine.url}/v1"):
        assert agent.embeddings.create(model="toy", input="hi", encoding_format="float").data == []
        ask(agent, "say hi")
    assert steps(trajectory) == 1
    trajectory.abort("a test")


def test_a_call_after_the_end_is_refused(agent: openai.OpenAI, engine: Engine, rollouts: RolloutClient) -> None:
    with rollouts.trajectory("a", 0) as trajectory, gristmill.capture(trajectory, f"{engine.url}/v1"):
        ask(agent, "say hi")
        trajectory.finish(1.0)
        asked = len(engine.requests)
        with pytest.raises(openai.BadRequestError, match="the trajectory ended with step 0"):
            ask(agent, "say hi")
        assert len(engine.requests) == asked
        with pytest.raises(FailedPreconditionError, match="the trajectory ended with step 0"):
            trajectory.finish(1.0)


def test_an_agent_of_a_dropped_trajectory_is_stopped(agent: openai.OpenAI, rollouts: RolloutClient) -> None:
    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, str(agent.base_url)):
        for _ in range(2):
            ask(agent, "say hi")
        rollouts.flush()
        rollouts.abort_trajectory("a", 0, reason="a test")
        ask(agent, "say hi")
        rollouts.flush()
        with pytest.raises(openai.BadRequestError, match=r"no longer needs this trajectory.*stop this agent"):
            ask(agent, "say hi")


def test_steps_of_the_callers_own_follow_those_that_were_captured(
    agent: openai.OpenAI, service: Service, rollouts: RolloutClient, run: str
) -> None:
    with rollouts.trajectory("a", 0) as trajectory:
        with gristmill.capture(trajectory, str(agent.base_url)):
            ask(agent, "say hi")
        trajectory.extend([7], [8], rollout_logprobs=[-1.0], reward=1.0, is_last_step=True)
    (row,) = trained(service.grpc_address, run)
    assert row.trained == [*b"hi", END, 8]


def test_a_trajectory_that_is_not_finished_says_how(agent: openai.OpenAI, rollouts: RolloutClient) -> None:
    def work() -> None:
        with rollouts.trajectory("a", 0) as trajectory, gristmill.capture(trajectory, str(agent.base_url)):
            ask(agent, "say hi")

    with pytest.raises(FailedPreconditionError, match=r"ended without a last step.* finish\(reward\)"):
        work()


def test_a_transport_that_calls_by_aiohttp_is_recorded_once(engine: Engine, rollouts: RolloutClient) -> None:
    class Transport(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            async with aiohttp.ClientSession() as session, session.post(str(request.url), data=request.content) as it:
                return httpx2.Response(it.status, headers=it.headers, content=await it.read())

    async def work(trajectory: Trajectory) -> None:
        transport = httpx2.AsyncClient(transport=Transport())
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", http_client=transport) as client:
            await ask(client, "say hi")

    trajectory = rollouts.trajectory("a", 0)
    with gristmill.capture(trajectory, f"{engine.url}/v1"):
        asyncio.run(work(trajectory))
    assert steps(trajectory) == 1
    trajectory.abort("a test")


ANSWER: dict[str, Any] = {
    "prompt_token_ids": [1],
    "choices": [
        {"index": 0, "finish_reason": "stop", "token_ids": [2], "logprobs": {"content": [{"logprob": -1.0}]}}
        | {"message": {"role": "assistant", "content": "\ud83d ä"}}
    ],
}


@pytest.mark.parametrize("package", [httpx, httpx2])
def test_an_answer_that_is_compressed_all_the_same_is_read_with_any_text(package: Any, rollouts: RolloutClient) -> None:
    seen = []

    def respond(request: Any) -> Any:
        seen.append(request.headers["accept-encoding"])
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        return package.Response(200, headers=headers, content=gzip.compress(json.dumps(ANSWER).encode()))

    trajectory = rollouts.trajectory("a", 0)
    with (
        gristmill.capture(trajectory, "http://vllm/v1"),
        package.Client(transport=package.MockTransport(respond)) as client,
    ):
        answer = client.post("http://vllm/v1/chat/completions", json={"messages": HI})
    assert (seen, steps(trajectory)) == (["identity"], 1)
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "\ud83d ä"
    assert (answer.json()["prompt_token_ids"], choice["token_ids"]) == (None, None)
    trajectory.abort("a test")


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_request_or_an_answer_that_is_no_object_is_an_error(content: bytes, rollouts: RolloutClient) -> None:
    trajectory = rollouts.trajectory("a", 0)
    engine = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with gristmill.capture(trajectory, "http://vllm/v1"), httpx.Client(transport=engine) as client:
        url = "http://vllm/v1/completions"
        wrong = client.post(url, content=content)
        assert (wrong.status_code, "send a JSON object" in wrong.text) == (400, True)
        unread = client.post(url, json={"prompt": "a"})
        assert (unread.status_code, "the engine's answer " in unread.text) == (502, True)
    trajectory.abort("a test")


def test_a_reader_that_gives_up_and_reads_again_gets_the_whole_answer_once(
    engine: Engine, service: Service, rollouts: RolloutClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Trajectory._capture

    def capture(self: Trajectory, choices: Any) -> None:
        time.sleep(0.1)
        slow(self, choices)

    async def work() -> bytes:
        body, got, late = {"messages": HI, "stream": True}, b"", 0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine.url}/v1/chat/completions", json=body) as answer,
        ):
            while not answer.content.at_eof():
                try:
                    got += await asyncio.wait_for(answer.content.readany(), 0.02)
                except TimeoutError:
                    late += 1
        assert late
        return got

    monkeypatch.setattr(Trajectory, "_capture", capture)
    with rollouts.trajectory("a", 0) as trajectory:
        with gristmill.capture(trajectory, f"{engine.url}/v1"):
            assert asyncio.run(work()).endswith(b"data: [DONE]\n\n")
        assert steps(trajectory) == 1
        trajectory.finish(1.0)
    assert trained(service.grpc_address, run) == [expected()]


def test_an_unknown_engine_is_refused(rollouts: RolloutClient) -> None:
    with pytest.raises(InvalidArgumentError, match="engine is 'tgi'; pass one of vllm, sglang"):
        gristmill.capture(rollouts.trajectory("a", 0), "http://tgi", engine="tgi").__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["", "vllm", "vllm:8000/v1", "http://"])
def test_what_is_no_url_of_an_engine_is_refused(url: str, rollouts: RolloutClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"base_url is .*pass the URL at which the agent calls the trained"):
        gristmill.capture(rollouts.trajectory("a", 0), url).__enter__()


def test_what_is_no_trajectory_is_refused(rollouts: RolloutClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"trajectory is a RolloutClient; pass client.trajectory\(\.\.\.\)"):
        gristmill.capture(rollouts, "http://vllm").__enter__()  # type: ignore[arg-type]


def test_without_an_http_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_imported", lambda name: None)
    with pytest.raises(FailedPreconditionError, match="neither can be imported"):
        clients._install.__wrapped__()
