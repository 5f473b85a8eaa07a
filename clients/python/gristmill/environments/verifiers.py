"""Feeds a run from environments of `verifiers.v1` (tasksets, harnesses, agents). Written for verifiers 0.4.0 and 0.4.1.

verifiers intercepts an agent's model calls. Its training client renders each prompt to token ids, samples from vLLM's
`/inference/v1/generate`, and records a graph of messages with their tokens. Each model call of the graph becomes a
step. Sub-agents and compacted histories form a tree, so that each sampled token is trained once.

    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "gsm8k-v1"}))
    context = vf.ModelContext("Qwen/Qwen3-4B", vf.TrainClientConfig(base_url="http://127.0.0.1:8000/v1"))
    async with AsyncRolloutClient("127.0.0.1:50051", run="my-run") as client:
        await feed(client, env, context)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gristmill._engines import samples
from gristmill.aio import AsyncRolloutClient
from gristmill.environments.feeding import Feeder, Progress, Prompt, Rollout, RunShape
from gristmill.errors import FailedPreconditionError, UnsupportedError

Row = dict[str, Any]
_MASK = "sampling_mask"
"""verifiers' name for the tokens from which each token was sampled; also the name of the column."""


async def feed(
    client: AsyncRolloutClient,
    env: Any,
    context: Any,
    *,
    tasks: Iterable[Any] | None = None,
    round: int = 0,
    tag: str | None = None,
    concurrent_groups: int = 16,
    on_group: Callable[[Progress], None] | None = None,
) -> Progress:
    """Rolls out tasks of an environment into the client's run. Each task becomes one group with the run's group size.

    Returns after the last rollout. It does not finish the run, because other workers may also feed it. The last step of
    a trajectory has the trace's reward. An episode that is still not complete after the environment's `retries`, or a
    trace that the environment dropped, is a failure: its sample is aborted with the reason, and the group continues
    without it. Cancelling the call (Ctrl-C in `asyncio.run`) cancels its rollouts and aborts their groups.

    env: a `verifiers.v1.Env`; it is served during the call.
    context: a `verifiers.v1.ModelContext` with the model, a `TrainClientConfig` and the sampling parameters.
    tasks: `verifiers.v1.Task` objects; by default the whole taskset of the environment. Workers that share a run each
        pass a part.
    round: the pass over the tasks; increase it for each epoch.
    tag: the tag of the groups; by default the environment's id.
    concurrent_groups: the number of groups to roll out at a time.
    on_group: called with the progress after each group.

    Raises FailedPreconditionError if model calls have no token ids, or the run expects advantages. Raises
    UnsupportedError if an episode has several trainable agents, images or routed experts, or if it has sampling masks
    and the run has no column `sampling_mask`. Raises UnavailableError if consecutive groups fail. Also raises the
    errors of the client.
    """
    shape = await RunShape.of(client)
    if shape.gives_advantages:
        raise FailedPreconditionError(
            f"run {client.run!r} expects advantages (advantage_estimator: none), but the environment returns rewards; "
            "create the run with another advantage_estimator"
        )

    async def roll_out(task: Any) -> Rollout:
        (slot,) = env.slots(task, 1)
        return rollout_of(await env.run_slot(slot, context), env.complete, takes_masks=_MASK in shape.columns)

    name = tag or env.config.env_id
    feeder = Feeder(client, shape, roll_out, concurrent_groups=concurrent_groups, on_group=on_group)
    async with env.serving():
        return await feeder.feed(
            (Prompt(f"{name}/{task.key}", name, task) for task in (env.taskset if tasks is None else tasks)), round
        )


def rollout_of(episode: Any, is_complete: Callable[[Any], bool], *, takes_masks: bool = False) -> Rollout:
    """Converts an episode's only trainable trace to one row per model call. takes_masks: whether the run has a column
    for sampling masks."""
    if not is_complete(episode):
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        last = errors[-1] if errors else None
        return Rollout((), last.type, f"{last.type}: {last.message}") if last else Rollout((), "not complete")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        names = ", ".join(trace.agent.name for trace in traces) or "none"
        raise UnsupportedError(
            f"environment {episode.env.id!r}: an episode has {len(traces)} trainable traces ({names}), but must have "
            "exactly one; set trainable = False for the other agents in the environment's setup"
        )
    (trace,) = traces
    if reason := getattr(trace, "dropped", None):
        return Rollout((), "dropped", f"dropped: {reason}")
    steps = _steps(trace, takes_masks=takes_masks)
    if not steps:
        return Rollout((), f"nothing sampled: {trace.stop_condition}")
    steps[-1]["reward"] = float(trace.reward)
    return Rollout(steps)


def _steps(trace: Any, *, takes_masks: bool) -> list[Row]:
    """Returns a trace's rows, parents before children. Skips a compaction from which the harness did not continue."""
    kept = {id(node) for branch in trace.branches if branch.trainable for node in branch.nodes}
    reasons = {call.node: call.finish_reason for call in trace.calls}
    sampled = [(number, node) for number, node in enumerate(trace.nodes) if node.sampled and id(node) in kept]
    if not all(len(node.token_ids) for _, node in sampled):
        raise FailedPreconditionError(
            "a model call has no token ids, and gristmill does not tokenize text; use a context with a "
            "TrainClientConfig, and an engine that serves /inference/v1/generate"
        )
    return [
        _step(trace, node, reasons.get(number) or "stop", takes_masks=takes_masks)
        for number, node in sampled
        if any(node.mask)
    ]


def _step(trace: Any, node: Any, stop_reason: str, *, takes_masks: bool) -> Row:
    """Converts a node to a row. A node has only its new tokens: those of the template, then the sampled ones."""
    tokens, mask = np.asarray(node.token_ids, np.int32), np.asarray(node.mask, bool)
    path = [node]
    while path[-1].parent is not None:
        path.append(trace.nodes[path[-1].parent])
    for each in path:
        _check_carried(each, takes_masks=takes_masks)
    start = int(mask.argmax())
    before = [np.asarray(each.token_ids, np.int32) for each in path[:0:-1]]
    logprobs = np.asarray(node.logprobs).tolist() or None
    # 0.4.0 does not have the versions of the weights.
    spans = [span.model_dump() for span in getattr(node, "weight_versions", None) or ()]
    choice = samples.checked([], tokens[mask].tolist(), logprobs, stop_reason, "a model call", spans)
    row = {
        "reward": 0.0,
        "prompt_token_ids": np.concatenate([*before, tokens[:start]]),
        "response_ids": tokens[start:],
        "loss_mask": mask[start:].astype(np.uint8),
        "rollout_logprobs": None if logprobs is None else _spread(logprobs, mask[start:]),
        "stop_reason": stop_reason,
        **({} if node.sampling_mask is None else _mask_of(node.sampling_mask, mask[start:])),
    }
    if choice.policy_versions is not None:
        row["policy_versions"] = _spread(choice.policy_versions, mask[start:], -1)
    return row


def _mask_of(sampling_mask: Any, sampled: Any) -> Row:
    """Puts the lists of the sampled tokens at the positions of the mask, and empty lists elsewhere."""
    counts = np.zeros(len(sampled), np.int64)
    counts[sampled] = sampling_mask.counts
    return {_MASK: np.asarray(sampling_mask.ids), f"{_MASK}_offsets": np.append(0, np.cumsum(counts))}


def _spread(values: Sequence[float], mask: Any, elsewhere: float = 0.0) -> Any:
    """Puts the values of the sampled tokens at the positions of the mask."""
    spread = np.full(len(mask), elsewhere)
    spread[mask] = values
    return spread


def _check_carried(node: Any, *, takes_masks: bool) -> None:
    parts = node.message.content if isinstance(node.message.content, list) else []
    if any(part.type == "image_url" for part in parts):
        raise UnsupportedError(
            "images are not supported here; submit the rows yourself, with images as declared columns"
        )
    if node.routed_experts is not None:
        raise UnsupportedError(
            "the engine returned routed_experts, which are not supported here; turn them off in the engine, or submit "
            "the rows yourself, with a declared column for them"
        )
    if node.sampling_mask is not None and not takes_masks:
        raise UnsupportedError(
            f"the engine returned {_MASK}, but the run has no such column; declare it with scope: response and shape: "
            "[null], or turn it off in the engine"
        )
