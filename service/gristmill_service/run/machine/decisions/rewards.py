"""Set rewards of rows that were submitted before: reads the state, returns events, changes nothing.

A request is accepted or refused as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gristmill._wire.columns import exact_sum
from gristmill._wire.steps import FLOAT32_MAX
from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.machine.events import (
    ROW_KINDS,
    GroupKey,
    RewardsSet,
    RowRef,
    RowSchema,
    SchemaFixed,
    SetReward,
    StoredRow,
)
from gristmill_service.run.machine.state import Decision, State


def set_rewards(state: State, updates: Sequence[RewardUpdate], digests: Sequence[bytes]) -> Decision[int]:
    """Sets the rewards that are new. The answer is their number.

    digests: for each update, the digest of its rewards per token; empty for a scalar reward.
    """
    schema = state.schema
    seen: dict[RowRef, SetReward] = {}
    keys = [GroupKey(update.trajectory.round, update.trajectory.uid) for update in updates]
    outcomes = state.outcomes(keys)
    for key, update, digest in zip(keys, updates, digests, strict=True):
        row = None if key in outcomes else _row_of(state, key, update)
        if row is None:
            continue
        schema = _checked_schema(row, update, schema)
        value = _value(row, update)
        if row.reward is not None:
            _check_same(row, row.reward, row.reward_digest, value, digest)
        elif row.ref in seen:
            _check_same(row, seen[row.ref].value, seen[row.ref].digest, value, digest)
        else:
            seen[row.ref] = SetReward(row.trajectory, row.step, value, digest, _bytes(update))
    if not seen:
        return [], lambda _: 0
    fixed = [SchemaFixed(schema)] if schema != state.schema else []
    return [*fixed, RewardsSet(tuple(seen.values()))], lambda _: len(seen)


def _checked_schema(row: StoredRow, update: RewardUpdate, schema: RowSchema) -> RowSchema:
    per_token = update.token_values is not None
    if per_token and update.value is not None:
        raise InvalidArgumentError(f"{row}: reward is sent twice, as one number and per response token; send one")
    if schema.token_rewards is not None and schema.token_rewards != per_token:
        raise InvalidArgumentError(
            f"{row}: has {ROW_KINDS['token_rewards'][per_token]}, but rows of this run have "
            f"{ROW_KINDS['token_rewards'][schema.token_rewards]}; send the same"
        )
    return replace(schema, token_rewards=per_token)


def _check_same(row: StoredRow, known: float, known_digest: bytes, value: float, digest: bytes) -> None:
    if (known, known_digest) != (value, digest):
        raise AlreadyExistsError(f"{row}: the reward {value} differs from {known}, already set; keep that")


def _bytes(update: RewardUpdate) -> bytes:
    return b"" if update.token_values is None else np.ascontiguousarray(update.token_values, np.float64).tobytes()


def _row_of(state: State, key: GroupKey, update: RewardUpdate) -> StoredRow | None:
    """Returns the row of the reward; None if its trajectory is aborted, so that the reward is ignored."""
    group = state.open.get(key)
    if group is not None and update.trajectory.sample in group.aborted:
        return None
    trajectory = None if group is None else group.trajectories.get(update.trajectory.sample)
    step = update.step if update.step is not None else (None if trajectory is None else trajectory.last)
    row = None if trajectory is None or step is None else trajectory.rows.get(step)
    if row is None:
        step_name = "the last step" if update.step is None else f"step {update.step}"
        raise NotFoundError(f"{update.trajectory}: {step_name} was not submitted; submit the row before its reward")
    return row


def _value(row: StoredRow, update: RewardUpdate) -> float:
    """Returns the step's reward, which is the sum of its rewards per token if there are any."""
    if update.token_values is None:
        if update.value is None:
            raise InvalidArgumentError(f"{row}: reward has no value; send one")
        value = update.value
    elif len(update.token_values) != row.response_length:
        raise InvalidArgumentError(
            f"{row}: reward has {len(update.token_values)} values and response_ids has "
            f"{row.response_length}; send one per response token"
        )
    else:
        value = exact_sum(update.token_values)
        # Values beyond float32 may cancel out in the sum, so check the largest.
        most = float(np.abs(update.token_values).max(initial=0.0))
        value = value if most <= FLOAT32_MAX else most
    if not abs(value) <= FLOAT32_MAX:
        raise InvalidArgumentError(f"{row}: reward {value} is not finite as float32; send a finite number")
    return value
