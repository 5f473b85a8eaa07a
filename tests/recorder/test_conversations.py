"""Conversations are compared by what was said: clients change the form of the answers that they send back."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill_recorder.engines.api import tokenize_body
from gristmill_recorder.engines.vllm import VLLM
from gristmill_recorder.languages.choices import ChoiceReader
from gristmill_recorder.splicing.conversation import Conversation, is_cut, said


def call(arguments: str, name: str = "look", id_: str = "1") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("sampled", "sent_back"),
    [
        (answer(content="yes"), answer(content=[{"type": "text", "text": "yes"}], refusal=None)),
        (answer(content=None, tool_calls=[call("{}")]), answer(content="", tool_calls=[call("")])),
        (answer(content="yes", reasoning="hm"), answer(content="yes")),
        (
            answer(content="yes"),
            answer(content=[{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]),
        ),
        (answer(tool_calls=[call('{"a" :1.0,"b":"\\u00e4"}')]), answer(tool_calls=[call('{"b": "ä", "a": 1}')])),
        (answer(tool_calls=[call('{"a": ')]), answer(tool_calls=[call('{"a": ')])),
        (answer(tool_calls=[call("[" * 9999)]), answer(tool_calls=[call("[" * 9999)])),
        (answer(content="yes"), answer(content="yes", tool_calls=None, index=0, annotations=[])),
    ],
)
def test_another_form_of_an_answer_says_the_same(sampled: dict[str, Any], sent_back: dict[str, Any]) -> None:
    assert said(sampled) == said(sent_back)
    before = Conversation({"messages": [{"role": "user", "content": "a"}]})
    after = Conversation({"messages": [*before.messages, sent_back, {"role": "user", "content": "b"}]})
    assert before.key_after(sampled) == after.key(after.answered)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (answer(content="yes"), answer(content="no")),
        (answer(content="yes"), {"role": "user", "content": "yes"}),
        (answer(tool_calls=[call("{}")]), answer(tool_calls=[call("{}", name="see")])),
        (answer(tool_calls=[call("{}")]), answer(tool_calls=[call("{}", id_="2")])),
        (answer(tool_calls=[call('{"a": 1}')]), answer(tool_calls=[call('{"a": "1"}')])),
        (answer(content="yes"), answer(content=[{"type": "image_url", "image_url": {"url": "yes"}}])),
    ],
)
def test_other_words_or_calls_say_something_else(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert said(one) != said(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"tool_choice": "none"},
        {"model": "other"},
    ],
)
def test_settings_that_change_the_head_of_the_prompt_make_another_conversation(changed: dict[str, Any]) -> None:
    request = {"model": "toy", "messages": [{"role": "user", "content": "a"}], "tools": []}
    plain, other = Conversation(request), Conversation({**request, **changed})
    assert plain.key(1) != other.key(1)
    assert other.has_other_settings(1, plain.key(1))
    assert not plain.has_other_settings(1, plain.key(1))
    assert Conversation({**request, "temperature": 0.5, "tools": None}).key(1) == plain.key(1)


@pytest.mark.parametrize(
    ("choice", "request_", "expected"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, {}, False),
        ({"finish_reason": "stop", "stop_reason": 7}, {}, False),
        ({"finish_reason": "tool_calls"}, {}, False),
        ({"finish_reason": "stop", "stop_reason": 7}, {"stop_token_ids": [7]}, True),
        ({"finish_reason": "stop", "stop_reason": "END"}, {"stop": ["END"]}, True),
        ({"finish_reason": "length"}, {}, True),
        ({"finish_reason": "abort"}, {}, True),
    ],
)
def test_an_answer_is_cut_unless_the_model_ended_it(
    choice: dict[str, Any], request_: dict[str, Any], expected: bool
) -> None:
    assert is_cut(choice, request_) is expected


def test_the_choices_of_a_stream_are_those_of_the_whole_answer() -> None:
    reader = ChoiceReader()
    deltas: list[tuple[int, dict[str, Any]]] = [
        (0, {"role": "assistant", "content": ""}),
        (1, {"content": "no"}),
        (0, {"reasoning": "hm"}),
        (0, {"content": "ye"}),
        (0, {"content": "s"}),
        (0, {"tool_calls": [{"index": 0, **call("")}]}),
        (0, {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        (0, {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}),
        (0, {"tool_calls": [{"index": 1, **call("{}", name="see", id_="2")}]}),
    ]
    for index, delta in deltas:
        reader.read({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
    reader.read({"choices": [{"index": 1, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}]})
    first, second = reader.choices()
    calls = [call('{"a": 1}'), call("{}", name="see", id_="2")]
    assert said(first["message"]) == said(answer(content="yes", tool_calls=calls))
    assert (said(second["message"]), second["stop_reason"]) == (said(answer(content="no")), "END")


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "add_generation_prompt": False},
        {"truncate_prompt_tokens": 10},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
    ],
)
def test_calls_whose_prompt_is_not_rendered_from_their_messages_alone_are_not_spliced(fields: dict[str, Any]) -> None:
    assert VLLM.takes_tokens({"messages": []})
    assert not VLLM.takes_tokens({"messages": [], **fields})


def test_the_agents_own_transfer_parameters_stay() -> None:
    sent = VLLM.with_tokens({"messages": [], "kv_transfer_params": {"do_remote_decode": True}}, [1, 2])
    assert sent == {"messages": [], "kv_transfer_params": {"do_remote_decode": True, "prompt_token_ids": [1, 2]}}


def test_tokenize_takes_as_template_settings_what_chat_takes_as_fields() -> None:
    request = {"model": "toy", "messages": [], "reasoning_effort": "none", "documents": [{}], "temperature": 1.0}
    request |= {"chat_template_kwargs": {"mode": "brief"}}
    kwargs = {"documents": [{}], "reasoning_effort": "none", "enable_thinking": False, "mode": "brief"}
    assert tokenize_body(request) == {"model": "toy", "messages": [], "chat_template_kwargs": kwargs}
