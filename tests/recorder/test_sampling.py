"""The recorder notes how a step was sampled, and masks it if a trainer cannot reproduce that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill import TrainerClient
from gristmill_recorder.languages.sampling import Sampling
from tests.on_loop import Service
from tests.recorder.engine import Engine
from tests.recorder.recorders import StartRecorder, create_run

STRICT = {"type": "function", "function": {"name": "look", "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


@pytest.mark.parametrize(
    ("request_", "odd"),
    [
        ({}, ()),
        ({"temperature": 1.0, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0.0, "logit_bias": {}}, ()),
        ({"temperature": None, "seed": 7, "stop": ["a"], "max_tokens": 5, "response_format": {"type": "text"}}, ()),
        ({"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "auto"}, ()),
        ({"tools": [STRICT], "tool_choice": "none"}, ()),
        ({"repeat_penalty": 1.0, "typical_p": 1, "top_n_sigma": -1.0, "mirostat": 0, "adaptive_target": -1.0}, ()),
        ({"temperature": 0.7}, ("temperature",)),
        ({"thinking_token_budget": -1}, ()),
        ({"thinking_token_budget": 0}, ("thinking_token_budget",)),
        (
            {"dry_multiplier": 0.8, "xtc_probability": 0.5, "grammar": "root"},
            ("dry_multiplier", "grammar", "xtc_probability"),
        ),
        ({"temperature": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.1}, ("min_p", "temperature", "top_k", "top_p")),
        ({"frequency_penalty": 0.1, "repetition_penalty": 1.1}, ("frequency_penalty", "repetition_penalty")),
        ({"logit_bias": {"7": 5}, "bad_words": ["a"], "min_tokens": 3}, ("bad_words", "logit_bias", "min_tokens")),
        ({"tools": [STRICT]}, ("grammar",)),
        ({"tools": 7, "tool_choice": "required"}, ("grammar",)),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, ("grammar",)),
        ({"response_format": SCHEMA}, ("grammar",)),
        ({"text": {"format": SCHEMA}}, ("grammar",)),
        ({"structured_outputs": {"regex": "a+"}}, ("grammar",)),
    ],
)
def test_settings_that_change_the_distribution_are_named(request_: dict[str, Any], odd: tuple[str, ...]) -> None:
    assert Sampling.of(request_, None)[:2] == (odd, False)


@pytest.mark.parametrize("settings", ["top_p", 3, ["top_p"], None])
def test_settings_apart_that_are_no_object_are_the_engines_to_refuse(settings: Any) -> None:
    assert Sampling.of({"sampling_params": settings}, None)[:2] == ((), False)


@pytest.mark.parametrize(
    ("request_", "temperature", "is_masked"),
    [({"temperature": 0.7}, 0.7, False), ({}, 0.7, True), ({}, 1.0, False), ({"top_p": 0.9}, 1.0, True)],
)
def test_a_step_is_masked_unless_it_has_the_trainers_temperature_alone(
    request_: dict[str, Any], temperature: float, is_masked: bool
) -> None:
    assert Sampling.of(request_, temperature).is_masked is is_masked


def test_a_step_that_a_trainer_cannot_reproduce_is_noted_counted_and_not_trained(
    start_recorder: StartRecorder, engine: Engine, service: Service, run_name: str
) -> None:
    column = {"name": "sampling", "dtype": "uint8", "scope": "items", "merge": "concat"}
    create_run(service.grpc_address, run_name, columns=[column])
    recorder = start_recorder(engine.url, service.grpc_address, "--trainer-temperature", "0.5", "--columns", "sampling")
    messages: Any = [{"role": "user", "content": "say hi"}]
    with recorder.openai(run_name) as client:
        said = client.chat.completions.create(model="toy", messages=messages, temperature=0.5).choices[0].message
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "say ho"}]
        client.chat.completions.create(model="toy", messages=messages, temperature=0.5, top_p=0.9)
    assert recorder.finish(run_name) == {"steps": 2, "outcome": "accepted"}
    assert recorder.metric('unreproducible_steps_total{setting="top_p"}') == 1
    assert recorder.metric("unreproducible_steps_total") == 1
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        (row,) = [row for row in range(len(shard["is_padding"])) if not shard["is_padding"][row]]
        response = shard["sequences"][row][-shard["loss_mask"].shape[1] :]
        assert bytes(response[shard["loss_mask"][row] == 1].tolist()[:-1]) == b"hi"
        start, stop = shard["sampling_offsets"][row : row + 2]
        notes = bytes(shard["sampling"][start:stop].tolist()).splitlines()
        assert [json.loads(note) for note in notes] == [{"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.9}]
        shard.ack()
