"""Traces of verifiers.v1 as steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import verifiers.v1 as vf

from gristmill.environments.verifiers import rollout_of
from gristmill.errors import FailedPreconditionError, InvalidArgumentError, UnsupportedError

ANSWER = vf.AssistantMessage(content="answer")


def said(parent: int | None, role: str, tokens: list[int], sampled: int = 0, **more: Any) -> vf.MessageNode:
    """A message that adds these tokens, of which the last `sampled` were sampled."""
    message = ANSWER if role == "assistant" else vf.UserMessage(content="question")
    mask = [False] * (len(tokens) - sampled) + [True] * sampled
    logprobs = [-0.25] * sampled
    tokens_of_it = {"token_ids": tokens, "mask": mask, "logprobs": logprobs}
    return vf.MessageNode(parent=parent, message=message, sampled=bool(sampled), **tokens_of_it, **more)


def trace_of(*nodes: vf.MessageNode, trainable: bool = True, **fields: Any) -> vf.Trace:
    agent = vf.AgentInfo(config=vf.AgentConfig(), trainable=trainable)
    task = vf.TraceTask(type="Task", data=vf.TaskData())
    trace = vf.Trace(task=task, agent=agent, nodes=list(nodes), ok=True, **fields)
    trace.record_reward("right", 0.5, weight=2.0)
    return trace


def episode_of(*traces: vf.Trace, ok: bool = True) -> vf.Episode:
    return vf.Episode(task=vf.TraceTask(type="Task", data=vf.TaskData()), traces=list(traces), ok=ok)


def steps(*traces: vf.Trace) -> list[tuple[list[int], list[int], float]]:
    rows = rollout_of(episode_of(*traces), lambda episode: episode.ok).steps
    return [(row["prompt_token_ids"].tolist(), row["response_ids"].tolist(), row["reward"]) for row in rows]


CONVERSATION = (
    said(None, "user", [1, 2]),
    said(0, "assistant", [3, 4, 5], sampled=2),
    said(1, "user", [6]),
    said(2, "assistant", [7, 8], sampled=1),
)


def test_each_sampled_message_is_a_step_and_the_last_has_the_reward() -> None:
    assert steps(trace_of(*CONVERSATION)) == [([1, 2, 3], [4, 5], 0.0), ([1, 2, 3, 4, 5, 6, 7], [8], 1.0)]


def test_what_goes_on_from_an_earlier_message_is_a_branch() -> None:
    branch = said(1, "assistant", [9, 10], sampled=1)
    assert steps(trace_of(*CONVERSATION, branch))[-1] == ([1, 2, 3, 4, 5, 9], [10], 1.0)


def test_a_compaction_that_was_not_gone_on_from_is_left_out() -> None:
    attempt = said(3, "assistant", [9], sampled=1, semantic_parents=[vf.ParentLink(node=3, type="compaction_attempt")])
    other = said(3, "user", [11])
    rows = steps(trace_of(*CONVERSATION, attempt, other, said(5, "assistant", [12], sampled=1)))
    assert [response for _, response, _ in rows] == [[4, 5], [8], [12]]


def test_log_probabilities_and_the_stop_reason_are_those_of_the_call() -> None:
    trace = trace_of(*CONVERSATION, calls=[vf.ModelCall(node=3, finish_reason="length")])
    first, last = rollout_of(episode_of(trace), lambda episode: True).steps
    assert (first["rollout_logprobs"].tolist(), first["loss_mask"].tolist()) == ([-0.25, -0.25], [1, 1])
    assert (first["stop_reason"], last["stop_reason"]) == ("stop", "length")


def test_sampling_masks_are_on_the_tokens_that_were_sampled_from_them() -> None:
    masks = [vf.SamplingMask.from_sampling_mask(mask) for mask in ([[4, 9], [5]], [[8, 7, 1]])]
    nodes = [node.model_copy() for node in CONVERSATION]
    nodes[1].sampling_mask, nodes[3].sampling_mask = masks
    nodes[1].mask, nodes[1].token_ids = np.array([True, False, True]), np.array([4, 2, 5])
    rows = rollout_of(episode_of(trace_of(*nodes)), lambda episode: True, takes_masks=True).steps
    assert [row["sampling_mask"].tolist() for row in rows] == [[4, 9, 5], [8, 7, 1]]
    assert [row["sampling_mask_offsets"].tolist() for row in rows] == [[0, 2, 2, 3], [0, 3]]


VERSIONS = "weight_versions" in vf.MessageNode.model_fields


@pytest.mark.skipif(not VERSIONS, reason="new in verifiers 0.4.1")
def test_each_sampled_token_has_the_version_of_the_weights_that_sampled_it() -> None:
    spans = [{"version": str(3 + place), "start": place, "end": place + 1} for place in range(2)]
    answer = said(0, "assistant", [3, 4, 5], sampled=2, weight_versions=spans)
    nodes = [CONVERSATION[0], answer, *CONVERSATION[2:]]
    first, last = rollout_of(episode_of(trace_of(*nodes)), lambda episode: True).steps
    assert (first["policy_versions"].tolist(), "policy_versions" in last) == ([3, 4], False)


@pytest.mark.skipif(not VERSIONS, reason="new in verifiers 0.4.1")
def test_a_trace_that_the_environment_dropped_is_not_trained() -> None:
    trace = trace_of(*CONVERSATION)
    trace.drop("no reward signal")
    dropped = rollout_of(episode_of(trace), lambda episode: True)
    assert (dropped.steps, dropped.failure, dropped.detail) == ((), "dropped", "dropped: no reward signal")


@pytest.mark.parametrize("logprob", [-9999.0, 0.5])
def test_a_logprob_that_is_none_is_refused(logprob: float) -> None:
    nodes = [node.model_copy() for node in CONVERSATION]
    nodes[1].logprobs = [-0.25, logprob]
    with pytest.raises(InvalidArgumentError, match="a model call: token 1 has the logprob"):
        steps(trace_of(*nodes))


def test_a_judge_is_not_trained() -> None:
    assert len(steps(trace_of(*CONVERSATION), trace_of(*CONVERSATION, trainable=False))) == 2


def test_an_episode_that_failed_says_the_kind_of_error() -> None:
    trace = trace_of(*CONVERSATION)
    trace.record_error(vf.SandboxError("gone"))
    failed = rollout_of(episode_of(trace, ok=False), lambda episode: episode.ok)
    assert (failed.steps, failed.failure, failed.detail) == ((), "SandboxError", "SandboxError: gone")


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([trace_of(*CONVERSATION), trace_of(*CONVERSATION)], "2 trainable traces"),
        ([trace_of(*CONVERSATION, trainable=False)], "0 trainable traces"),
        (
            [trace_of(said(None, "assistant", [1, 2], 1, routed_experts=np.zeros((2, 1, 1), np.uint8)))],
            "routed_experts",
        ),
        (
            [trace_of(said(None, "assistant", [1, 2], 1, sampling_mask=vf.SamplingMask.from_sampling_mask([[2, 5]])))],
            r"sampling_mask, but the run has no such column; declare it .* shape: \[null\]",
        ),
    ],
)
def test_what_rows_cannot_hold_is_refused(traces: list[vf.Trace], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        steps(*traces)


def test_images_are_refused() -> None:
    picture = vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": "data:"}}])
    seen = vf.MessageNode(message=picture, token_ids=[1], mask=[False])
    with pytest.raises(UnsupportedError, match="images are not supported here"):
        steps(trace_of(seen, said(0, "assistant", [2], sampled=1)))


def test_a_call_without_token_ids_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match="no token ids"):
        steps(trace_of(said(None, "user", []), vf.MessageNode(parent=0, message=ANSWER, sampled=True)))
