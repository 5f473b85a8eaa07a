"""`--columns prompt_logprobs` and `routed_experts`: what the engine gives for the tokens that it read, in real rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gristmill import TrainerClient
from tests.on_loop import Service
from tests.recorder.engine import (
    Engine,
    Words,
    answer_of,
    logprobs_for,
    prompt_logprobs_of,
    prompt_of,
    tokens_of,
)
from tests.recorder.engine_experts import experts_of
from tests.recorder.recorders import Recorder, StartRecorder, create_run, end, post, start
from tests.recorder.test_chat import ask, said, user

LOGPROBS = {"name": "prompt_logprobs", "dtype": "float32", "scope": "token", "partial": True}
EXPERTS = {"name": "routed_experts", "dtype": "uint8", "scope": "token", "shape": [3, 2], "partial": True}


@pytest.fixture(scope="module")
def reading(engine: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("reading")
    flags = ("--journal", str(directory / "journal"), "--columns", "prompt_logprobs,routed_experts")
    running = start(directory / "log", engine.url, service.grpc_address, *flags)
    yield running
    end(running)


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    columns = [{**column, "required": False} for column in (LOGPROBS, EXPERTS)]
    create_run(service.grpc_address, run_name, columns=columns)
    return run_name


def rows(address: str, run: str, column: str) -> list[tuple[list[int], Any]]:
    """The tokens of each row, and its values of the column; None for a token without one."""
    with TrainerClient(address, run, 0, timeout_s=20) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        sequences, values, padding = (np.asarray(shard[name]) for name in ("sequences", column, "is_padding"))
        masks, given = np.asarray(shard["attention_mask"]) > 0, np.asarray(shard.given(column))
        each = [
            [value if is_given else None for value, is_given in zip(*one, strict=True)]
            for one in zip(values.tolist(), given, strict=True)
        ]
        result = [
            (sequences[row][masks[row]].tolist(), each[row][-masks[row].sum() :])
            for row in range(len(sequences))
            if not padding[row]
        ]
        shard.ack()
    return result


def test_a_conversation_has_a_logprob_for_each_token_but_the_first(
    reading: Recorder, service: Service, run: str
) -> None:
    messages: list[Any] = []
    values: list[float | None] = [None]
    with reading.openai(run) as client:
        for script, words in (
            ("say a", Words(text="a")),
            ("think b; c", Words("b", "c")),
            ("call look {}", Words(tool=("look", "{}"))),
        ):
            messages.append(user(script))
            values += logprobs_for(len(prompt_of(messages)))[len(values) :]
            values += logprobs_for(len(answer_of(words)))
            messages.append(said(ask(client, messages).choices[0].message))
    reading.finish(run)
    assert rows(service.grpc_address, run, "prompt_logprobs") == [
        ([*prompt_of(messages[:-1]), *answer_of(words)], values)
    ]


def test_a_stream_has_none_and_a_later_call_has_those_of_its_tokens(
    reading: Recorder, engine: Engine, service: Service, run: str
) -> None:
    messages = [user("say a")]
    with reading.openai(run) as client:
        list(ask(client, messages, stream=True))
        # The engine would read the whole prompt again, and not return them.
        assert "prompt_logprobs" not in engine.requests[-1]
        messages += [{"role": "assistant", "content": "a"}, user("say b")]
        ask(client, messages)
    reading.finish(run)
    prompt, answer = prompt_of(messages), answer_of(Words(text="b"))
    values = [None, *logprobs_for(len(prompt))[1:], *logprobs_for(len(answer))]
    assert rows(service.grpc_address, run, "prompt_logprobs") == [([*prompt, *answer], values)]


def test_an_agent_that_streams_has_them_with_whole_answers(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str
) -> None:
    recorder = start_recorder(engine.url, service.grpc_address, "--columns", "prompt_logprobs", "--whole-answers")
    messages = [user("say abc")]
    with recorder.openai(run) as client:
        chunks = list(ask(client, messages, stream=True))
    assert not any("decoded_token" in chunk.model_dump_json() for chunk in chunks)
    recorder.finish(run)
    ((_, values),) = rows(service.grpc_address, run, "prompt_logprobs")
    assert values == [None, *logprobs_for(len(prompt_of(messages)))[1:], *logprobs_for(len(b"abc") + 1)]


def test_only_an_agent_that_asks_gets_them(reading: Recorder, engine: Engine, run: str) -> None:
    url, messages = f"{reading.base(run)}/v1/chat/completions", [user("say hello")]
    body = {"model": "toy", "messages": messages}
    assert post(url, body) == post(f"{engine.url}/v1/chat/completions", body)
    _, answer = post(url, {**body, "prompt_logprobs": 0})
    assert answer["prompt_logprobs"] == prompt_logprobs_of(prompt_of(messages))


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("v1/completions", {"prompt": ["say a", "say bc"]}, [tokens_of("say a"), tokens_of("say bc")]),
        ("inference/v1/generate", {"token_ids": tokens_of("say a"), "sampling_params": {}}, [tokens_of("say a")]),
        ("v1/messages", {"messages": [user("say a")], "max_tokens": 9}, [prompt_of([user("say a")])]),
    ],
)
def test_each_choice_has_those_of_its_own_prompt(
    reading: Recorder, service: Service, run: str, path: str, body: dict[str, Any], prompts: list[list[int]]
) -> None:
    status, answer = post(f"{reading.base(run)}/{path}", {"model": "toy", **body})
    assert status == 200
    assert "decoded_token" not in json.dumps(answer)
    reading.finish(run)
    for prompt, (tokens, values) in zip(prompts, rows(service.grpc_address, run, "prompt_logprobs"), strict=True):
        assert tokens[: len(prompt)] == prompt
        assert values == [None, *logprobs_for(len(prompt))[1:], *logprobs_for(len(tokens) - len(prompt))]


def test_a_row_has_the_experts_of_its_tokens_and_the_agent_does_not(
    reading: Recorder, service: Service, run: str
) -> None:
    messages = [user("reload abc")]
    with reading.openai(run) as client:
        assert ask(client, messages).choices[0].routed_experts is None
    reading.finish(run)
    answer = answer_of(Words(text="abc"))
    ((_, values),) = rows(service.grpc_address, run, "routed_experts")
    read = len(prompt_of(messages))
    assert np.array_equal(values[read:-1], experts_of(answer))
    assert [*values[:read], values[-1]] == [None] * (read + 1)
