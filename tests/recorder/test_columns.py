"""Rows of a recorder have the columns that `--columns` names, with what the engine gave and the agent said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gristmill import InvalidArgumentError, TrainerClient
from gristmill.completions import Sampled
from gristmill_recorder.columns import Source, columns_of
from gristmill_recorder.languages.sampling import Sampling
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.settings import load
from tests.on_loop import Service
from tests.recorder.engine import Engine
from tests.recorder.engine_experts import npy
from tests.recorder.recorders import Recorder, create_run, end, post, start
from tests.recorder.test_chat import user
from tests.recorder.test_splicing import converse

LINES = {"name": "conversation", "dtype": "uint8", "scope": "items", "merge": "concat"}


@pytest.fixture(scope="module", params=["off", "on"])
def talking(
    request: pytest.FixtureRequest, engine: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("talking")
    flags = ("--journal", str(directory / "journal"), "--columns", "conversation", "--splice", request.param)
    running = start(directory / "log", engine.url, service.grpc_address, *flags)
    yield running
    end(running)


def conversations(address: str, run: str) -> list[list[Any]]:
    """The lines of each row of the run's first batch."""
    with TrainerClient(address, run, 0, timeout_s=20) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        edges = shard["conversation_offsets"]
        texts = [bytes(shard["conversation"][edges[row] : edges[row + 1]].tolist()) for row in range(len(edges) - 1)]
        shard.ack()
    return [[json.loads(line) for line in text.splitlines()] for text in texts if text]


def test_rows_have_each_message_of_a_conversation_once(talking: Recorder, service: Service, run_name: str) -> None:
    create_run(service.grpc_address, run_name, columns=[LINES])
    first, second = user("say a"), user("think b; c")
    converse(talking, run_name, first, second, user('call look {"at": 1}'))
    talking.finish(run_name)
    rows = conversations(service.grpc_address, run_name)
    # Without splicing the conversation is several rows, with a common beginning.
    lines = [*{json.dumps(line): line for row in rows for line in row}.values()]
    assert [line["continues"] for line in lines] == [None, 0, 1]
    assert [line["messages"] for line in lines][:2] == [[first], [second]]
    assert [line["answer"]["content"] for line in lines] == ["a", "c", None]
    assert lines[1]["answer"]["reasoning"] == "b"
    assert lines[2]["answer"]["tool_calls"][0]["function"]["arguments"] == '{"at": 1}'


def test_the_definitions_of_tools_stand_where_a_conversation_begins(
    talking: Recorder, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, columns=[LINES])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    converse(talking, run_name, user("say a"), user("say b"), tools=tools)
    talking.finish(run_name)
    lines = [line for row in conversations(service.grpc_address, run_name) for line in row]
    assert {line["continues"]: line.get("tools") for line in lines} == {None: tools, 0: None}


def test_a_stream_is_kept_as_one_answer_and_a_prompt_as_its_text(
    talking: Recorder, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, columns=[LINES])
    with talking.openai(run_name) as client:
        list(client.chat.completions.create(model="toy", messages=[user("think b; c")], stream=True))
        list(client.completions.create(model="toy", prompt="say d", stream=True))
        client.completions.create(model="toy", prompt=[1, 2])
    talking.finish(run_name)
    first, second, of_tokens = (lines[0] for lines in conversations(service.grpc_address, run_name))
    assert first["answer"] == {"role": "assistant", "content": "c", "reasoning": "b"}
    assert (second["prompt"], second["answer"]["content"]) == ("say d", "d")
    assert (of_tokens["prompt"], of_tokens["answer"]["content"]) == (None, "ok")


def read(name: str, choice: dict[str, Any], mask: Any = None) -> Any:
    sample = Sampled([1, 2, 3], [4, 5], None, "stop", None, mask)
    return columns_of([name], Source(choice, sample, Sampling.of({}, None), {}))


@pytest.mark.parametrize("start", [0, 2])
def test_routed_experts_are_those_of_the_newest_tokens_but_the_last(start: int) -> None:
    experts = np.arange((4 - start) * 6, dtype=np.int16).reshape(4 - start, 3, 2)
    columns = read("routed_experts", {"routed_experts": npy(experts)})
    assert np.array_equal(columns["routed_experts"], experts)
    assert columns["routed_experts_start"] == start


def test_a_sampling_mask_is_kept_token_by_token() -> None:
    columns = read("sampling_mask", {}, [[7, 8], []])
    assert columns["sampling_mask"].tolist() == [7, 8]
    assert columns["sampling_mask_offsets"].tolist() == [0, 2, 2]


@pytest.mark.parametrize("name", ["routed_experts", "sampling_mask"])
def test_what_the_engine_does_not_give_is_left_out(name: str) -> None:
    assert read(name, {}) == {}


@pytest.mark.parametrize("experts", ["!", npy(np.array([object()], dtype=object))])
def test_experts_that_cannot_be_read_are_refused_and_nothing_is_unpickled(experts: str) -> None:
    with pytest.raises(InvalidArgumentError, match="omit it from --columns"):
        read("routed_experts", {"routed_experts": experts})


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no column thoughts; expected some of conversation"):
        load(RecorderSettings, {"upstream": "http://engine", "columns": "sampling,thoughts"})


def test_a_run_without_the_columns_is_refused_at_its_first_call(
    talking: Recorder, engine: Engine, service: Service, run: str
) -> None:
    asked = len(engine.requests)
    body = {"model": "toy", "messages": [user("say a")]}
    status, answer = post(f"{talking.base(run)}/v1/chat/completions", body)
    assert (status, len(engine.requests)) == (400, asked)
    assert "does not declare the column conversation" in answer["error"]["message"]
