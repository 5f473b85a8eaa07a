"""Environments of `verifiers` (SingleTurnEnv, MultiTurnEnv, ToolEnv, EnvGroup, and what derives from them) feed a run.

Written against verifiers 0.3.1, the last that has these; they are in `verifiers.legacy` there. A trajectory's steps
carry token ids where the engine gives them: vLLM's `return_token_ids` with `logprobs`, which is asked for.

    async with AsyncRolloutClient("127.0.0.1:50051", run="my-run") as client:
        engine = vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1")
        await feed(client, vf.load_environment("wordle"), engine=engine, model="Qwen/Qwen3-4B")
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from gristmill.aio import AsyncRolloutClient
from gristmill.environments.feeding import Feeder, Progress, Prompt, Rollout, RunShape
from gristmill.environments.interrupts import cancelled_by_sigint
from gristmill.errors import FailedPreconditionError, UnsupportedError

Example = Mapping[str, Any]

_RETRIES = 3


async def feed(
    client: AsyncRolloutClient,
    env: Any,
    *,
    engine: Any,
    model: str,
    sampling_args: Mapping[str, Any] | None = None,
    examples: Iterable[Example] | None = None,
    round: int = 0,
    tag: str | None = None,
    concurrent_groups: int = 16,
    max_retries: int = _RETRIES,
    on_group: Callable[[Progress], None] | None = None,
) -> Progress:
    """Rolls out examples of an environment into the client's run, each as a group of as many samples as the run wants.

    Returns what was fed when the last rollout has ended; it does not finish the run, which others may feed too.
    Trajectories have the reward of the environment's rubric, on their last step, and its name as `tag`. Samples that
    the environment or engine fails, after `max_retries` of verifiers' own, are aborted with the reason, and their
    groups go on without them; so are those of which nothing was sampled. Cancelling it (Ctrl-C in `asyncio.run`) ends
    its rollouts, aborts their groups and leaves the rest of the run as it is.

    env: a `verifiers` environment.
    engine: a `verifiers.ClientConfig` or `Client`, of an engine that gives token ids.
    sampling_args: as verifiers takes them, such as temperature and max_tokens.
    examples: rows of its data set; all of `env.get_dataset()` unless given. Workers that share a run take a part each.
    round: which time the examples are sampled: another epoch is another round.
    tag: in place of the environment's name, or in an EnvGroup of the names of its environments.
    concurrent_groups: how many groups are rolled out at a time.
    on_group: called with the progress whenever a group has ended.

    Raises FailedPreconditionError where the engine gives no token ids, or the run does not compute the advantages that
    the environment gives; UnsupportedError for images and routed experts; UnavailableError when groups fail one after
    another; and what the client raises, such as InvalidArgumentError for several turns in a run without `step_wise`.
    """
    shape = await RunShape.of(client)
    _check_advantages(client.run, shape.gives_advantages, env.provides_advantages)
    asked = _asking_for_tokens(sampling_args or {})

    async def roll_out(example: Example, count: int) -> Sequence[Rollout]:
        given = (next(engines), model, asked, max_retries, ["trajectory"])
        if count == 1 and not together:
            outputs = [await env.run_rollout(dict(example), *given)]
        else:
            outputs = await env.run_group([dict(example) for _ in range(count)], *given)
        return [rollout_of(output, shape.gives_advantages) for output in outputs]

    together = env.requires_group_rollouts or env.provides_advantages
    feeder = Feeder(client, shape, roll_out, together, concurrent_groups, on_group)
    name = tag or getattr(env, "env_id", None) or type(env).__name__
    found = env.get_dataset() if examples is None else examples
    async with _clients(env, engine) as engines:
        # Every environment of verifiers sets a handler that raises where it is.
        with cancelled_by_sigint():
            return await feeder.feed((_prompt(env, example, name, tag) for example in found), round)


def _check_advantages(run: str, takes: bool, provides: bool) -> None:
    if takes and not provides:
        raise FailedPreconditionError(
            f"run {run!r}: it takes advantages (advantage_estimator: none) and the environment's rubric gives none; "
            "create it with another estimator"
        )
    if provides and not takes:
        raise FailedPreconditionError(
            f"run {run!r}: it computes advantages and the environment's rubric gives its own; create it with "
            "advantage_estimator: none"
        )


@asynccontextmanager
async def _clients(env: Any, engine: Any) -> AsyncIterator[Iterator[Any]]:
    """Yields the engine's clients, one for each of its endpoints, by turns and without end.

    They are made once and closed at the end: of a configuration, `run_rollout` would make one for each rollout. An
    environment in a server of its own (`start_server`) takes configurations alone.
    """
    from verifiers.clients import resolve_client
    from verifiers.types import ClientConfig
    from verifiers.utils.client_utils import resolve_client_configs

    found = resolve_client_configs(engine) if isinstance(engine, ClientConfig) else [engine]
    async with AsyncExitStack() as at_end:
        if isinstance(engine, ClientConfig) and env.env_client is None:
            found = [resolve_client(config) for config in found]
            for client in found:
                at_end.push_async_callback(client.close)
        yield itertools.cycle(found)


def _prompt(env: Any, example: Example, name: str, tag: str | None) -> Prompt[Example]:
    part = name if tag or not hasattr(env, "env_map") else _route(example)
    return Prompt(f"{name}/{example['example_id']}", part, example)


def _route(example: Example) -> str:
    """Which environment of a group of them an example is of."""
    info = example.get("info") or {}
    route = (json.loads(info) if isinstance(info, str) else info).get("env_id", "")
    return route if isinstance(route, str) else "/".join(route)


def _asking_for_tokens(sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    extra = {"return_token_ids": True, **(sampling_args.get("extra_body") or {})}
    return {"logprobs": True, **sampling_args, "extra_body": extra}


def rollout_of(output: Mapping[str, Any], gives_advantages: bool = False) -> Rollout:
    """What `Environment.run_rollout` returns, with its trajectory, as rows: one a model call from which anything is
    left. With `gives_advantages` they have the steps' advantages too."""
    if error := output.get("error"):
        return Rollout((), error["error_chain_str"], error["error_chain_repr"])
    steps = [row for step in output["trajectory"] if (row := _row(step, gives_advantages))]
    if not steps:
        return Rollout((), f"nothing sampled: {output.get('stop_condition')}")
    # The rubric scores the whole trajectory, and copies its score to every step.
    steps[-1]["reward"] = float(output["reward"])
    return Rollout(steps)


def _row(step: Mapping[str, Any], gives_advantages: bool) -> dict[str, Any] | None:
    """One model call; None where its prompt was too long for an answer."""
    tokens = step["tokens"]
    if tokens is None:
        raise FailedPreconditionError(
            "the engine gave no token ids, and gristmill tokenises no text; use an engine that gives them, such as "
            "vLLM, by one of verifiers' clients that reads them: openai_chat_completions, "
            "openai_chat_completions_token or renderer"
        )
    for name, remedy in _NOT_CARRIED.items():
        if tokens.get(name) is not None:
            raise UnsupportedError(f"the engine gave {name}, which are not submitted from here; {remedy}")
    if not tokens["completion_ids"]:
        return None
    advantages = {"advantage": [float(step["advantage"])] * len(tokens["completion_ids"])} if gives_advantages else {}
    return {
        "reward": 0.0,
        **advantages,
        "prompt_token_ids": tokens["prompt_ids"],
        "response_ids": tokens["completion_ids"],
        "loss_mask": tokens["completion_mask"],
        "rollout_logprobs": tokens["completion_logprobs"] or None,
        "stop_reason": "length" if step["is_truncated"] else _finish_reason(step),
    }


_NOT_CARRIED = {
    "routed_experts": "switch them off in the engine, or submit rows with them as a declared column",
    "multi_modal_data": "submit rows with images as declared columns",
}


def _finish_reason(step: Mapping[str, Any]) -> str:
    message = getattr(step.get("response"), "message", None)
    return getattr(message, "finish_reason", None) or "stop"
