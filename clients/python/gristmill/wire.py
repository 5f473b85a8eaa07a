"""Steps to protobuf rows and back. Buffers are little-endian and are viewed, not copied, when read."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gristmill.columns import Array, Ragged
from gristmill.errors import InvalidArgumentError
from gristmill.steps import UNKNOWN, Steps, check
from gristmill.v1 import rows_pb2

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("gristmill moves raw little-endian buffers and needs a little-endian machine")


def encode(table: Steps) -> rows_pb2.Rows:
    """The table as a message."""
    return rows_pb2.Rows(
        uids=table.uids,
        rounds=table.rounds.tolist() if table.rounds.any() else (),
        samples=table.samples.tolist(),
        steps=table.steps.tolist() if table.steps.any() else (),
        attempts=table.attempts.tolist() if table.attempts.any() else (),
        is_last_steps=() if table.is_last_steps.all() else table.is_last_steps.tolist(),
        prompt_lengths=table.prompt_lengths.tolist(),
        response_lengths=table.response_lengths.tolist(),
        tokens=_bytes(table.tokens),
        loss_mask=b"" if table.loss_mask.values.all() else _bytes(table.loss_mask),
        rollout_logprobs=_bytes(table.logprobs),
        rewards=table.rewards.tolist() if table.token_rewards is None else (),
        token_rewards=_bytes(table.token_rewards),
        rewards_pending=table.rewards_pending.tolist() if table.rewards_pending.any() else (),
        advantages=() if table.advantages is None else table.advantages.tolist(),
        token_advantages=_bytes(table.token_advantages),
        stop_reasons=table.stop_reasons if any(table.stop_reasons) else (),
        policy_versions=table.policy_versions.tolist() if (table.policy_versions != UNKNOWN).any() else (),
    )


def decode(message: rows_pb2.Rows) -> Steps:
    """A checked table over the message's buffers.

    Raises InvalidArgumentError naming the field and both sizes where a column does not fit the number of rows or
    tokens, or as `gristmill.steps.check` does.
    """
    uids = list(message.uids)
    count = len(uids)
    prompts = _per_row(message.prompt_lengths, "prompt_lengths", count, np.int64, None)
    responses = _per_row(message.response_lengths, "response_lengths", count, np.int64, None)
    for name, lengths in (("prompt_lengths", prompts), ("response_lengths", responses)):
        if count and lengths.min() < 0:
            raise InvalidArgumentError(f"{name} holds {lengths.min()}; lengths are not negative")
    tokens = _ragged(message.tokens, "tokens", prompts + responses, np.int32)
    # All ones is the default; one shared row of them is enough.
    loss_mask = _ragged(message.loss_mask, "loss_mask", responses, np.uint8) or _ones(responses)
    token_rewards = _token_rewards(message, responses)
    if tokens is None:
        raise InvalidArgumentError("tokens is empty; every row needs a prompt and a response")
    rewards = (
        _per_row(message.rewards, "rewards", count, np.float64, 0.0 if len(message.rewards_pending) else None)
        if token_rewards is None
        else token_rewards.row_sums()
    )
    return check(
        Steps(
            uids=uids,
            rounds=_per_row(message.rounds, "rounds", count, np.int32, 0),
            samples=_per_row(message.samples, "samples", count, np.int32, None),
            steps=_per_row(message.steps, "steps", count, np.int32, 0),
            attempts=_per_row(message.attempts, "attempts", count, np.int32, 0),
            is_last_steps=_per_row(message.is_last_steps, "is_last_steps", count, np.bool_, True),
            stop_reasons=_strings(message.stop_reasons, count),
            policy_versions=_per_row(message.policy_versions, "policy_versions", count, np.int32, UNKNOWN),
            tokens=tokens,
            prompt_lengths=prompts,
            loss_mask=loss_mask,
            logprobs=_ragged(message.rollout_logprobs, "rollout_logprobs", responses, np.float32),
            rewards=rewards,
            token_rewards=token_rewards,
            rewards_pending=_per_row(message.rewards_pending, "rewards_pending", count, np.bool_, False),
            advantages=(
                _per_row(message.advantages, "advantages", count, np.float64, None) if message.advantages else None
            ),
            token_advantages=_ragged(message.token_advantages, "token_advantages", responses, np.float32),
        )
    )


def _bytes(column: Ragged | None) -> bytes:
    return b"" if column is None else column.compact().values.tobytes()


def _per_row(values: Any, name: str, count: int, dtype: Any, default: Any) -> Array:
    if not len(values) and default is not None:
        return np.full(count, default, dtype)
    if len(values) != count:
        raise InvalidArgumentError(f"{name} has {len(values)} entries for {count} rows (uids); it needs one each")
    return np.array(values, dtype)


def _strings(values: Any, count: int) -> list[str]:
    if not len(values):
        return [""] * count
    if len(values) != count:
        raise InvalidArgumentError(f"stop_reasons has {len(values)} entries for {count} rows (uids); it needs one each")
    return list(values)


def _ragged(buffer: bytes, name: str, lengths: Any, dtype: Any) -> Ragged | None:
    if not buffer:
        return None
    expected = int(lengths.sum()) * np.dtype(dtype).itemsize
    if len(buffer) != expected:
        raise InvalidArgumentError(
            f"{name} has {len(buffer)} bytes and the rows' lengths ask for {expected} ({np.dtype(dtype).name} each)"
        )
    return Ragged.from_lengths(np.frombuffer(buffer, dtype), lengths)


def _ones(lengths: Any) -> Ragged:
    longest = int(lengths.max()) if len(lengths) else 0
    return Ragged(np.ones(longest, np.uint8), np.zeros(len(lengths), np.int64), lengths)


def _token_rewards(message: rows_pb2.Rows, responses: Any) -> Ragged | None:
    buffer = message.token_rewards
    dtype = np.float64 if len(buffer) == 8 * int(responses.sum()) else np.float32
    return _ragged(buffer, "token_rewards", responses, dtype)
