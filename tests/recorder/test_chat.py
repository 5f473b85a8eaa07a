"""Calls of the real OpenAI library through a recorder: what the agent gets, and what is trained."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from gristmill import RolloutClient, TrainerClient
from tests.on_loop import Service
from tests.recorder.engine import END, Engine, Words, answer_of, logprobs_for, prompt_of
from tests.recorder.recorders import Recorder, TrainedRow, create_run, post, trained


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def said(message: Any) -> Any:
    """An answer as the agent puts it into its history."""
    return message.model_dump(exclude_none=True)


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="toy", messages=messages, **more)


def test_an_agent_that_sets_its_base_url_is_trained_where_it_spoke(
    recorder: Recorder, service: Service, run: str
) -> None:
    with recorder.openai(run) as client:
        messages = [{"role": "system", "content": "Be brief."}, user('call look {"at": "clock"}')]
        messages.append(said(ask(client, messages, tools=[]).choices[0].message))
        messages += [{"role": "tool", "tool_call_id": "call-1", "content": "say noon"}]
        messages.append(said(ask(client, messages).choices[0].message))
        messages.append(user("think hm; done"))
        ask(client, messages)
    assert recorder.finish(run, reward=0.5) == {"steps": 3, "outcome": "accepted"}
    call, noon, done = Words(tool=("look", '{"at": "clock"}')), Words(text="noon"), Words("hm", "done")
    (row,) = trained(service.grpc_address, run)
    assert row.tokens == [*prompt_of(messages), *answer_of(done)]
    assert row.trained == [*answer_of(call), *answer_of(noon), *answer_of(done)]
    assert row.logprobs == [value for one in (call, noon, done) for value in logprobs_for(len(answer_of(one)))]
    assert row.reward == 0.5


def test_a_stream_gives_the_agent_its_chunks_and_the_trainer_the_same_row(
    recorder: Recorder, service: Service, run: str
) -> None:
    messages = [user("say hello there")]
    with recorder.openai(run) as client:
        chunks = list(ask(client, messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[-1].usage.completion_tokens) == ("hello there", 12)
    recorder.finish(run)
    answer = [*b"hello there", END]
    assert trained(service.grpc_address, run) == [
        TrainedRow([*prompt_of(messages), *answer], answer, logprobs_for(12), 1.0)
    ]


def test_the_agent_gets_what_it_would_have_got_without_a_recorder(recorder: Recorder, engine: Engine, run: str) -> None:
    url = f"{recorder.base(run)}/v1/chat/completions"
    body = {"model": "toy", "messages": [user("say hello")], "n": 2, "seed": 7}
    assert post(url, body) == post(f"{engine.url}/v1/chat/completions", body)
    ours = {"return_token_ids": True, "return_weight_versions": True, "logprobs": True}
    assert engine.requests[-2] == {**body, **ours}
    asked = {**body, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    status, answer = post(url, asked)
    assert (status, answer["prompt_token_ids"]) == (200, prompt_of(body["messages"]))  # type: ignore[arg-type]
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == logprobs_for(1)[0]


def test_the_agents_key_and_the_engines_headers_are_passed_on(recorder: Recorder, engine: Engine, run: str) -> None:
    with recorder.openai(run) as client:
        answer = client.chat.completions.with_raw_response.create(
            model="toy", messages=[user("say hi")], extra_headers={"x-mine": "1", "x-gristmill-policy-version": "3"}
        )
    assert answer.headers["x-request-id"] == "engine-1"
    headers = {name.lower(): value for name, value in engine.headers[-1].items()}
    assert headers["authorization"] == "Bearer key"
    assert headers["x-mine"] == "1"
    assert not [name for name in headers if name.startswith("x-gristmill")]


def test_several_choices_share_their_prompt_and_are_each_trained(
    recorder: Recorder, service: Service, run: str
) -> None:
    messages = [user("say pick")]
    with recorder.openai(run) as client:
        first, second, _ = ask(client, messages, n=3).choices
        assert (first.message.content, second.message.content) == ("pick", "pick #1")
        more = [*messages, said(second.message), user("say on")]
        ask(client, more)
    assert recorder.finish(run)["steps"] == 4
    rows = trained(service.grpc_address, run)
    picks = [answer_of(Words(text=text)) for text in ("pick", "pick #1", "pick #2")]
    assert [row.trained for row in rows] == [picks[0], [*picks[1], *b"on", END], picks[2]]
    assert rows[1].tokens == [*prompt_of(more), *b"on", END]


def test_parallel_sub_agents_and_a_shortened_history_become_a_tree(
    recorder: Recorder, engine: Engine, service: Service, run: str
) -> None:
    plan = [user("say plan")]
    with recorder.openai(run) as client:
        history = [*plan, said(ask(client, plan).choices[0].message)]
        tasks = [[*history, user(f"hold {run}-{number} part {number}")] for number in (3, 1, 2)]
        with ThreadPoolExecutor(3) as agents:
            asked = [agents.submit(lambda task: ask(client, task).choices[0].message.content, task) for task in tasks]
            while recorder.metric("calls_under_way") < len(tasks):
                time.sleep(0.01)
            # One answer after the other: the first of them goes on with the plan.
            for number, answer in sorted(zip((3, 1, 2), asked, strict=True), key=lambda one: one[0]):
                engine.let_go.add(f"{run}-{number}")
                answer.result()
        parts = [answer.result() for answer in asked]
        compact = [user(f"say all of {', '.join(parts)}")]
        ask(client, compact)
    assert recorder.finish(run)["steps"] == 5
    rows = trained(service.grpc_address, run)
    trees = {bytes(token for token in row.trained if token < END): row.tokens for row in rows}
    whole = b"all of part 3, part 1, part 2"
    assert set(trees) == {b"planpart 1", b"part 2", b"part 3", whole}
    assert trees[b"planpart 1"] == [*prompt_of(tasks[1]), *b"part 1", END]
    assert trees[b"part 3"] == [*prompt_of(tasks[0]), *b"part 3", END]
    assert trees[whole] == [*prompt_of(compact), *whole, END]


def test_headers_name_the_trajectory_as_well(recorder: Recorder, service: Service, run: str) -> None:
    names = {"x-gristmill-run": run, "x-gristmill-uid": "a", "x-gristmill-sample": "0"}
    with openai.OpenAI(base_url=f"{recorder.url}/v1", api_key="key", default_headers=names) as client:
        ask(client, [user("say hi")])
    assert post(f"{recorder.url}/v1/finish", {"reward": 2.0}, names)[0] == 200
    (row,) = trained(service.grpc_address, run)
    assert (row.trained, row.reward) == ([*b"hi", END], 2.0)


def test_uids_may_have_any_letters(recorder: Recorder, service: Service, run: str) -> None:
    with recorder.openai(run, uid="math/ä 1?") as client:
        ask(client, [user("say hi")])
    recorder.finish(run, uid="math/ä 1?")
    with RolloutClient(service.grpc_address, run) as rollouts:
        assert [group.uid for group in rollouts.groups()] == ["math/ä 1?"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_are_steps_too(
    recorder: Recorder, service: Service, run: str, stream: bool
) -> None:
    with recorder.openai(run) as client:
        answer: Any = client.completions.create(model="toy", prompt=["say a", "say b"], n=2, stream=stream)
        assert len(list(answer) if stream else answer.choices) >= 4
    assert recorder.finish(run)["steps"] == 4
    rows = trained(service.grpc_address, run)
    assert [bytes(row.tokens[:-1]) for row in rows] == [b"say aa", b"say aa #1", b"say ba", b"say ba #1"]


def test_a_chat_completion_whose_agent_asks_for_0_logprobs_is_recorded(
    recorder: Recorder, service: Service, run: str
) -> None:
    body = {"model": "toy", "messages": [user("say hi")], "logprobs": 0}
    status, answer = post(f"{recorder.base(run)}/v1/chat/completions", body)
    assert (status, answer["choices"][0]["logprobs"]) == (200, None)
    recorder.finish(run)
    assert trained(service.grpc_address, run)[0].logprobs == logprobs_for(3)


def test_a_reward_may_come_later(recorder: Recorder, service: Service, run: str) -> None:
    with recorder.openai(run) as client:
        ask(client, [user("say hi")])
    recorder.finish(run, reward=None)
    with RolloutClient(service.grpc_address, run) as rollouts:
        assert rollouts.set_reward("a", 0, 0.25)
    (row,) = trained(service.grpc_address, run)
    assert row.reward == 0.25


def test_models_are_the_engines(recorder: Recorder, run: str) -> None:
    with recorder.openai(run) as client:
        assert [model.id for model in client.models.list()] == ["toy"]
        assert client.embeddings.create(model="toy", input="hi", encoding_format="float").data == []


def test_rows_have_the_version_that_sampled_them_or_that_the_trainer_had_announced_when_they_were_asked_for(
    recorder: Recorder, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, train_batch_size=5, policy_mini_batch_size=5)
    answers: list[Any] = []
    with TrainerClient(service.grpc_address, run_name, 0, timeout_s=20) as trainer:
        for uid, headers in (("a", {}), ("b", {}), ("c", {"x-gristmill-policy-version": "7"})):
            with recorder.openai(run_name, uid) as client:
                ask(client, [user("say hi")], extra_headers=headers)
            recorder.finish(run_name, uid=uid)
            trainer.announce_policy_version(4)
            while recorder.metric(f'policy_version{{run="{run_name}"}}') != 4:
                time.sleep(0.01)
        for uid, stream in (("d", False), ("e", True)):
            with recorder.openai(run_name, uid) as client:
                answer = ask(client, [user("reload abc")], stream=stream)
                answers += list(answer) if stream else [answer]
            recorder.finish(run_name, uid=uid)
        (shard,) = next(iter(trainer)).mini_batches()
        assert sorted(shard["policy_version"].tolist()) == [0, 3, 3, 4, 7]
        rows = zip(shard["token_policy_version"], shard["loss_mask"] > 0, strict=True)
        versions = [row[mask].tolist() for row, mask in rows]
        assert sorted(versions) == [[0] * 3, [3, 3, 4, 4], [3, 3, 4, 4], [4] * 3, [7] * 3]
    texts = [answer.model_dump_json(exclude_none=True) for answer in answers]
    assert not any(part in text for text in texts for part in ("token_ids", "weight_versions", "routed_experts"))
