"""What an engine answered becomes steps: read as the openai package gives it, never tokenized again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import InvalidArgumentError, RolloutClient, TrainerClient
from gristmill.completions import Sampled, sampled
from tests.client.faces import Connect
from tests.on_loop import Service
from tests.recorder.engine import END, Engine, Words, answer_of, logprobs_for, prompt_of, serving
from tests.rows import make_config

CONFIG = make_config(merge="tree", micro_batch={"size": 8})
ASKED: dict[str, Any] = {"model": "toy", "logprobs": True}
IDS = {"return_token_ids": True}
SGLANG_IDS = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serving(Engine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def sglang() -> Iterator[Engine]:
    with serving(Engine(is_sglang=True)) as engine:
        yield engine


def client_of(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none")


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_an_object_of_the_openai_package_has_its_tokens_and_logprobs(engine: Engine) -> None:
    messages = [user("say hello")]
    with client_of(engine) as client:
        completion = client.chat.completions.create(messages=messages, **ASKED, n=2, extra_body=IDS)
    first, second = sampled(completion)
    assert first.prompt_token_ids == second.prompt_token_ids == prompt_of(messages)
    assert first.response_ids == [*b"hello", END]
    assert second.response_ids == [*b"hello #1", END]
    assert first.rollout_logprobs == logprobs_for(6)
    assert first.stop_reason == "stop"


@pytest.mark.parametrize("script", ["say hello", "think why; so", 'call search {"q": 1}'])
def test_the_chunks_of_a_stream_are_read_as_the_whole_answer_is(engine: Engine, sglang: Engine, script: str) -> None:
    samples = []
    for one, asked in ((engine, IDS), (sglang, SGLANG_IDS)):
        for stream in (False, True):
            with client_of(one) as client:
                answer = client.chat.completions.create(
                    messages=[user(script)], **ASKED, n=3, stream=stream, extra_body=asked
                )
                samples.append(sampled(list(answer) if stream else answer))
    assert samples[0] == samples[1] == samples[2] == samples[3]
    assert len(samples[0]) == 3


def test_completions_of_several_prompts_are_read_each_with_its_own(engine: Engine, sglang: Engine) -> None:
    for one in (engine, sglang):
        for stream in (False, True):
            with client_of(one) as client:
                answer: Any = client.completions.create(
                    model="toy", prompt=["say a", "say b"], logprobs=0, n=2, stream=stream, extra_body=IDS
                )
                samples = sampled(list(answer) if stream else answer)
            assert [bytes(each.prompt_token_ids) for each in samples] == [b"say a", b"say a", b"say b", b"say b"]
            assert all(each.rollout_logprobs for each in samples)


def test_a_response_has_its_tokens_where_it_was_asked_for_messages(engine: Engine) -> None:
    with client_of(engine) as client:
        asked = {"enable_response_messages": True}
        (samples,) = sampled(client.responses.create(model="toy", input="say hi", extra_body=asked))
        with pytest.raises(InvalidArgumentError, match="enable_response_messages"):
            sampled(client.responses.create(model="toy", input="say hi"))
    assert samples == (prompt_of([user("say hi")]), [*b"hi", END], None, "stop", None, None, 0)


def test_built_in_tools_make_several_turns_of_a_response() -> None:
    def message(*tokens: int) -> dict[str, Any]:
        return {"type": "raw_message_tokens", "message": "", "tokens": list(tokens)}

    answer = {"object": "response", "status": "incomplete", "input_messages": [message(1)]}
    answer["output_messages"] = [message(2), message(1, 2, 3), message(4)]
    samples = sampled(answer)
    assert [(each.prompt_token_ids, each.response_ids, each.stop_reason) for each in samples] == [
        ([1], [2], "tool_calls"),
        ([1, 2, 3], [4], "length"),
    ]


@pytest.mark.parametrize("name", ["token_ids", "response_token_ids"])
def test_sglangs_newer_name_of_token_ids_is_read_in_answers_and_in_chunks(name: str) -> None:
    choice = {"index": 0, name: [2, 3], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0, -2.0]}}
    whole = sampled({"prompt_token_ids": [1], "choices": [choice]})
    streamed = sampled([{"prompt_token_ids": [1], "choices": [choice]}])
    assert [one.response_ids for one in (*whole, *streamed)] == [[2, 3], [2, 3]]


def test_each_token_has_the_version_of_the_weights_that_sampled_it(engine: Engine, sglang: Engine) -> None:
    asked = {**IDS, **dict.fromkeys(SGLANG_IDS, True), "return_weight_versions": True}
    for one, stream in ((engine, False), (engine, True), (sglang, False)):
        with client_of(one) as client:
            answer = client.chat.completions.create(
                messages=[user("reload abc")], **ASKED, stream=stream, extra_body=asked
            )
            (choice,) = sampled(list(answer) if stream else answer)
        assert choice.policy_versions == [3, 3, 4, 4]


@pytest.mark.parametrize("more", [0, 1])
def test_dynamos_extension_is_read_from_answers_and_chunks(more: int) -> None:
    """With more tokens in engine_data than in the answer, its values are those of other tokens."""
    data: dict[str, Any] = {"completion_token_ids": [2, 3, 4][: 2 + more], "prompt_token_ids": [1]}
    data |= {"completion_logprobs": [-0.5, -1.0, -2.0][: 2 + more], "sampling_mask": [[2], [3, 9], [4]][: 2 + more]}
    logprobs = {"token_logprobs": [-0.25, -0.75]}
    choice = {"index": 0, "finish_reason": "stop"}
    answer = {
        "choices": [{**choice, "logprobs": logprobs}],
        "nvext": {"completion_token_ids": [2, 3], "engine_data": data},
    }
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "logprobs": {"token_logprobs": [value]}}], "nvext": {"completion_token_ids": [token]}}
        for token, value in zip([2, 3], [-0.25, -0.75], strict=True)
    ]
    chunks.append({"choices": [choice], "nvext": {"prompt_token_ids": [7], "engine_data": data}})
    for read in (sampled(answer), sampled(chunks)):
        of_choice = Sampled([1], [2, 3], [-0.25, -0.75], "stop")
        of_data = Sampled([1], [2, 3], [-0.5, -1.0], "stop", None, [[2], [3, 9]])
        assert read == [of_choice if more else of_data]


def test_tokens_of_dynamo_belong_to_an_answer_with_one_choice() -> None:
    nvext = {"engine_data": {"completion_token_ids": [2], "prompt_token_ids": [1], "completion_logprobs": [-0.5]}}
    answer = {"choices": [{"index": index, "finish_reason": "stop"} for index in (0, 1)], "nvext": nvext}
    for completion in (answer, [answer]):
        with pytest.raises(InvalidArgumentError, match="lacks the prompt's token ids"):
            sampled(completion)


def test_a_sampling_mask_is_read_from_answers_and_chunks_and_becomes_the_column_that_is_named(
    service: Service, run_name: str
) -> None:
    mask, choice = [[2, 8], [3]], {"index": 0, "token_ids": [2, 3], "finish_reason": "stop"}
    answer = {"prompt_token_ids": [1], "choices": [choice | {"sampling_mask": mask}]}
    parts = [{"token_ids": [token], "sampling_mask": [kept]} for token, kept in zip([2, 3], mask, strict=True)]
    chunks = [{"prompt_token_ids": [1], "choices": [{"index": 0, **part}]} for part in parts]
    chunks.append({"choices": [{"index": 0, "finish_reason": "stop"}]})
    assert [one.sampling_mask for given in (answer, chunks) for one in sampled(given)] == [mask, mask]
    with pytest.raises(InvalidArgumentError, match="1 lists in sampling_mask for 2 token ids"):
        sampled({"prompt_token_ids": [1], "choices": [choice | {"sampling_mask": [[2]]}]})
    column = {"name": "kept", "dtype": "int32", "scope": "response", "shape": [None], "required": False}
    with RolloutClient(service.grpc_address, run_name) as rollouts:
        rollouts.create_run(CONFIG | {"columns": [column]})
        trajectory = rollouts.trajectory("a", 0)
        trajectory.record(answer, reward=1.0, is_last_step=True, sampling_mask="kept")
        rollouts.flush()
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert (shard["kept"].tolist(), shard["kept_offsets"].tolist()) == ([2, 8, 3], [0, 2, 3])


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([], None),
        ([("default", 0, 2)], None),
        ([("default", 0, 1), (5, 1, 2)], [-1, 5]),
        ([("1", 0, 1)], "weight_versions covers 1 of 2 tokens"),
        ([("1", 0, 1), ("2", 0, 2)], "a span of 0..2 after 1 of 2 tokens"),
        ([("1", 0, 10**12)], "a span of 0..1000000000000 after 0 of 2"),
    ],
)
def test_spans_of_versions_cover_each_token_once_and_their_labels_are_numbers(spans: Any, versions: Any) -> None:
    parts = [{"version": label, "start": start, "end": end} for label, start, end in spans]
    choice = {"token_ids": [2, 3], "finish_reason": "stop", "weight_versions": parts}
    answer = {"prompt_token_ids": [1], "choices": [choice]}
    if isinstance(versions, str):
        with pytest.raises(InvalidArgumentError, match=versions):
            sampled(answer)
    else:
        assert sampled(answer)[0].policy_versions == versions


def test_an_answer_without_token_ids_is_refused_with_the_remedy(engine: Engine) -> None:
    with client_of(engine) as client:
        for stream in (False, True):
            answer = client.chat.completions.create(messages=[user("say hi")], **ASKED, stream=stream)
            with pytest.raises(InvalidArgumentError, match=r"token ids; request them: .* by return_token_ids"):
                sampled(list(answer) if stream else answer)


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ("hello", "is a str"),
        ({"choices": []}, "no choices"),
        ([], "no choices"),
        ([{"choices": [{"index": 0, "token_ids": [1]}], "prompt_token_ids": [1]}], "was cut"),
        (
            {"prompt_token_ids": [1], "choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [0.0]}}]},
            "1 logprobs for 2 token ids",
        ),
        (
            {"prompt_token_ids": [1], "choices": [{"token_ids": [2], "logprobs": {"content": [{"logprob": -9999.0}]}}]},
            "token 0 has the logprob -9999.0",
        ),
        *(
            (
                {
                    "prompt_token_ids": [1],
                    "choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [0, value]}}],
                },
                "token 1 has the logprob",
            )
            for value in (-9999.0, -3.4028234663852886e38, 0.5, float("inf"), float("nan"), None)
        ),
        ({"prompt_token_ids": [1], "choices": [{"index": 0, "token_ids": [2]}] * 2}, "some with the same index"),
    ],
)
def test_what_is_no_complete_answer_is_refused(completion: Any, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        sampled(completion)


@given(st.data())
def test_it_does_not_matter_how_a_stream_was_cut_into_chunks(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1, max_size=3))
    chunks: list[dict[str, Any]] = [{"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}}]}]
    for index, own in enumerate(tokens):
        cuts = sorted({0, len(own), *data.draw(st.lists(st.integers(0, len(own))))})
        for start, end in itertools.pairwise(cuts):
            content = [{"logprob": -float(token)} for token in own[start:end]]
            part = {"index": index, "token_ids": own[start:end], "logprobs": {"content": content}}
            chunks.append({"choices": [part]})
        chunks.append({"choices": [{"index": index, "finish_reason": "stop"}]})
    samples = sampled(chunks)
    assert [each.response_ids for each in samples] == tokens
    assert [each.rollout_logprobs for each in samples] == [[-float(token) for token in own] for own in tokens]


def test_recorded_calls_are_trained_where_the_assistant_spoke(
    engine: Engine, service: Service, run_name: str, connect: Connect
) -> None:
    messages = [user("call look {}")]
    with connect(service.grpc_address, run_name, timeout_s=20) as rollouts, client_of(engine) as client:
        rollouts.create_run(CONFIG)
        trajectory = rollouts.trajectory("a", 0)
        first = client.chat.completions.create(messages=messages, **ASKED, extra_body=IDS)
        assert trajectory.record(first)
        messages += [first.choices[0].message.model_dump(), {"role": "tool", "content": "say 42", "tool_call_id": "1"}]
        second = client.chat.completions.create(messages=messages, **ASKED, stream=True, extra_body=IDS)
        trajectory.record(list(second), reward=1.0, is_last_step=True)
        rollouts.flush()
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        (mask,), (tokens,) = shard["loss_mask"].tolist(), shard["sequences"].tolist()
    spoken = [*answer_of(Words(tool=("look", "{}"))), *b"42", END]
    assert [token for token, trained in zip(tokens[-len(mask) :], mask, strict=True) if trained] == spoken
    assert tokens == [*prompt_of(messages), *b"42", END]


def test_a_completion_in_which_nothing_was_sampled_is_refused(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as rollouts:
        trajectory = rollouts.trajectory("a", 0)
        with pytest.raises(InvalidArgumentError, match="the completion has no sampled tokens"):
            trajectory.record({"prompt_token_ids": [1], "choices": [{"token_ids": [], "finish_reason": "stop"}]})
