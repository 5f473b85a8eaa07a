"""Which columns the rows of a run carry: fixed by the first rows that are accepted, and the same for all after them."""

from __future__ import annotations

from dataclasses import replace

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.validate import check_advantage_schema
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.machine.events import RowSchema, StoredRow

_NAMES = {
    "logprobs": {True: "rollout_logprobs", False: "no rollout_logprobs"},
    "token_rewards": {True: "one reward per response token", False: "one reward a step"},
    "token_advantages": {True: "one advantage per response token", False: "one advantage a trajectory"},
}


def check_schema(steps: Steps, schema: RowSchema, config: RunConfig) -> RowSchema:
    """The run's row schema with what these rows fix of it. Raises InvalidArgumentError where they disagree with it."""
    check_advantage_schema(steps, config)
    if steps.advantages is not None and steps.token_advantages is not None:
        raise InvalidArgumentError(
            f"{steps.name(0)}: advantage is given twice, as one number and per response token; send one of them"
        )
    # Rows that wait for their reward do not say yet of which kind it will be.
    waits = steps.token_rewards is None and bool(steps.rewards_pending.all())
    found = {
        "logprobs": steps.logprobs is not None,
        "token_rewards": None if waits else steps.token_rewards is not None,
        "token_advantages": steps.token_advantages is not None if config.estimator.takes_advantages else None,
    }
    for name, value in found.items():
        before = getattr(schema, name)
        if value is not None and before is not None and value != before:
            raise InvalidArgumentError(
                f"{steps.name(0)}: has {_NAMES[name][value]}, and the rows before it in this run have "
                f"{_NAMES[name][before]}; all rows of a run are alike in this"
            )
    fixed = {name: value for name, value in found.items() if value is not None and value != getattr(schema, name)}
    return replace(schema, **fixed) if fixed else schema


def check_reward_schema(row: StoredRow, update: RewardUpdate, schema: RowSchema) -> RowSchema:
    per_token = update.token_values is not None
    if per_token and update.value is not None:
        raise InvalidArgumentError(f"{row}: reward is given twice, as one number and per response token; send one")
    if schema.token_rewards is not None and schema.token_rewards != per_token:
        raise InvalidArgumentError(
            f"{row}: has {_NAMES['token_rewards'][per_token]}, and rows of this run have "
            f"{_NAMES['token_rewards'][schema.token_rewards]}; give that"
        )
    return replace(schema, token_rewards=per_token)
