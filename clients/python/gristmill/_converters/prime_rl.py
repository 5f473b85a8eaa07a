"""Converts prime-rl's training samples to rows (`TrainingSample` of src/prime_rl/transports/rollouts/types.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gristmill._converters.keys import Choice, Keys, Row, remedy_of
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import as_steps, response_start, samples_as_they_come, tagged
from gristmill._converters.values import aligned, array_of, attribute, attributes, routes, uid_of, unpacked
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

_WHAT = "prime-rl samples"
_IMAGES = "mm_kwargs"
_ROUTES = "routed_experts"
_WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
_OF_RESPONSE = (*_WEIGHTS, "ref_logprobs", "temperatures")
_KEYS = Keys(
    _WHAT,
    frozenset({"token_ids", "mask", "logprobs", "advantages"}),
    ignored={
        "temperatures": "a setting of the trainer; refused if they differ",
        "env_name": "the group's tag, which is passed as tags",
    },
    needed={
        "ref_logprobs": "logprobs of the reference model",
        "rl_weights": "the weight of each token in the policy loss",
        "ce_weights": "the weight of each token in the cross entropy",
        "ref_kl_weights": "the weight of each token in the reference loss",
        _ROUTES: "the routed experts of every token",
        "mm_token_type_ids": "which tokens are images",
    },
)


@refusing(_WHAT)
def from_prime_rl(
    traces: Iterable[Any],
    *,
    uids: Sequence[str | int],
    rewards: Sequence[float],
    advantages: bool = False,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int = -1,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Convert prime-rl's `TrainingSample`s to rows.

    A trace becomes a trajectory, and its branches become the steps. The response starts at the first token that `mask`
    trains (or that has a weight in `columns`). The prompt is everything before it.

    traces: one sample per trace, or one list of samples per trace, as `trace_to_samples` returns it.
    uids, rewards: one per trace, because samples do not contain them: the episode's group or example, and
        `trace.reward`.
    advantages: whether to use prime-rl's advantages, for a run with `advantage_estimator: none`.
    tags: one per trace, for example the `env_name` of its samples.
    columns: for example `routed_experts` (scope `token`), `ref_logprobs`, `ce_weights` (`response`), or names within
        `mm_kwargs` (`items`).

        traces = [trace_to_samples(trace) for trace in survivors]
        rows = from_prime_rl(traces, uids=group_ids, rewards=[trace.reward for trace in survivors])
    """
    choice = Choice.of(columns, ignore)
    grouped = [list(trace) if isinstance(trace, (list, tuple)) else [trace] for trace in traces]
    names = [uid_of(uid, f"{_WHAT}: uids[{position}]") for position, uid in enumerate(uids)]
    aligned("uids", names, len(grouped), _WHAT)
    scores = aligned("rewards", rewards, len(grouped), _WHAT)
    _check([sample for trace in grouped for sample in trace], choice)
    rows, tag_fields = [], tagged(tags, len(grouped), _WHAT)
    for position, (trace, uid, number) in enumerate(zip(grouped, names, samples_as_they_come(names), strict=True)):
        for branch, sample in enumerate(trace):
            where = f"{_WHAT}: trace {position} (uid {uid!r} sample {number}) branch {branch}"
            rows.append(
                {
                    "uid": uid,
                    "round": round,
                    "sample": number,
                    "attempt": attempt,
                    "policy_version": policy_version,
                    "reward": _reward(scores[position], where),
                    **_fields(sample, advantages, choice, where),
                    **tag_fields[position],
                }
            )
    return as_steps(rows)


def _check(samples: list[Any], choice: Choice) -> None:
    present = [_present(sample, choice) for sample in samples]
    _KEYS.check({name for values in present for name in values}, choice)
    temperatures = {value for values in present for value in values.get("temperatures", ())}
    if len(temperatures) > 1 and "temperatures" not in (*choice.columns, *choice.ignore):
        raise InvalidArgumentError(
            f"{_WHAT}: temperatures range from {min(temperatures)} to {max(temperatures)}, so the trainer's loss needs "
            f"them per token; {remedy_of('temperatures')}"
        )


def _present(sample: Any, choice: Choice) -> dict[str, Any]:
    """Return the sample's attributes that are not None. Tensors of images are entries of their own."""
    values = {name: value for name, value in attributes(sample).items() if value is not None}
    return values if _IMAGES in choice.ignore else unpacked(values, _IMAGES)


def _reward(value: Any, where: str) -> float:
    reward = float(value)
    if math.isnan(reward):
        raise InvalidArgumentError(f"{where}: the reward is nan; omit the group")
    return reward


def _fields(sample: Any, advantages: bool, choice: Choice, where: str) -> Row:
    tokens = array_of(attribute(sample, "token_ids"), "token_ids", where)
    present = _present(sample, choice)
    for name in ("mask", "logprobs"):
        if name not in present:
            raise InvalidArgumentError(f"{where}: {name} is missing; every row needs it")
    streams = {
        name: _stream(present[name], name, tokens.size, where)
        for name in ("mask", "logprobs", "advantages", *_OF_RESPONSE)
        if name in present and (name in _KEYS.fields or name in choice.columns)
    }
    trained = [streams[name] != 0 for name in ("mask", *_WEIGHTS) if name in streams]
    start = response_start(np.logical_or.reduce(trained), where)
    fields: Row = {
        "prompt_token_ids": tokens[:start],
        "response_ids": tokens[start:],
        "loss_mask": streams["mask"][start:],
        "rollout_logprobs": streams["logprobs"][start:],
    }
    if advantages:
        if "advantages" not in streams:
            raise InvalidArgumentError(f"{where}: advantages is missing; pass advantages=False")
        fields["advantage"] = streams["advantages"][start:]
    for name in choice.columns:
        if name in streams:
            fields[name] = streams[name][start:]
        elif name in present:
            fields[name] = _column(present[name], name, tokens.size, where)
    return fields


def _stream(values: Any, name: str, tokens: int, where: str) -> Array:
    stream = array_of(values, name, where)
    if stream.shape != (tokens,):
        raise InvalidArgumentError(f"{where}: {name} has {stream.size} values for {tokens} tokens; pass one per token")
    return stream


def _column(values: Any, name: str, tokens: int, where: str) -> Array:
    if hasattr(values, "data") and hasattr(values, "shape"):
        values = _decoded(values, name, where)
    return routes(values, name, tokens, where) if name == _ROUTES else array_of(values, name, where)


def _decoded(encoded: Any, name: str, where: str) -> Any:
    """Decode prime-rl's `EncodedTensor` or `RoutedExperts`: an array's bytes, dtype and shape."""
    if not isinstance(encoded.data, (bytes, bytearray)):
        return encoded
    try:
        return np.frombuffer(encoded.data, np.dtype(encoded.dtype)).reshape(list(encoded.shape))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{where}: {name} is not an array of {encoded.dtype} and shape {list(encoded.shape)}: {error}; use float32"
        ) from None
