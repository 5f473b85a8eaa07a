"""A whole generator output (the dict of lists that SkyRL's generators return) as a table of steps.

Owns the names of that dict and how its rows are numbered. Sends nothing, and imports no framework: tensors are read
through NumPy's array protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill.errors import InvalidArgumentError
from gristmill.rows import from_rows
from gristmill.steps import Steps
from gristmill.trajectory import plain

# Columns of the output and the fields of a row that they are.
_COLUMNS = {
    "prompt_token_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "loss_masks": "loss_mask",
    "rollout_logprobs": "rollout_logprobs",
    "stop_reasons": "stop_reason",
}
_IDENTITY = ("trajectory_ids", "uids", "samples", "is_last_step", "rewards")
# Of the output as a whole, not of its rows.
_NOT_ROWS = frozenset({"rollout_metrics"})


def from_generator_output(
    output: Mapping[str, Any], *, round: int = 0, attempt: int = 0, policy_version: int = -1
) -> Steps:
    """A checked table of the output's rows.

    output: `prompt_token_ids`, `response_ids` (a list of token ids a row); `trajectory_ids` (objects with
    `instance_id` and `repetition_id`, or pairs of uid and sample) or `uids` and `samples`; optionally `rewards` (a
    number a row, or a list with one per response token), `loss_masks` (all 1), `rollout_logprobs`, `stop_reasons`,
    `is_last_step` (all true). Rows of one trajectory stand in step order; between them may stand others. Entries may be
    lists, arrays or CPU tensors. A key whose value is None is absent; `rollout_metrics` is ignored.

    A row without a reward has 0 before the last step, and one that is pending on it.
    Raises InvalidArgumentError naming the field and both sizes, or the trajectory, the field and the value.

        from_generator_output({
            "prompt_token_ids": [[1, 2], [1, 2, 3, 4]], "response_ids": [[3], [5]], "rewards": [0.0, 1.0],
            "trajectory_ids": [("math/17", 0), ("math/17", 0)], "is_last_step": [False, True],
        })
    """
    return from_rows(rows_of(output, round=round, attempt=attempt, policy_version=policy_version))


def rows_of(
    output: Mapping[str, Any], *, round: int = 0, attempt: int = 0, policy_version: int = -1
) -> list[dict[str, Any]]:
    """The output's rows as `from_rows` takes them. Raises InvalidArgumentError as `from_generator_output` does."""
    given = {name: values for name, values in output.items() if values is not None and name not in _NOT_ROWS}
    _check_names(given)
    count = len(given["response_ids"])
    for name, values in given.items():
        if len(values) != count:
            raise InvalidArgumentError(
                f"generator output: {name} has {len(values)} entries and response_ids has {count}; they need one each"
            )
    keys = _keys(given)
    lasts = [bool(last) for last in given.get("is_last_step", [True] * count)]
    rewards = _rewards(given.get("rewards"), lasts, given["response_ids"])
    taken: dict[tuple[str, int], int] = {}
    rows = []
    for index, (key, last, reward) in enumerate(zip(keys, lasts, rewards, strict=True)):
        step = taken[key] = taken.get(key, -1) + 1
        where = f"uid {key[0]!r} sample {key[1]} step {step}"
        row = {"uid": key[0], "sample": key[1], "step": step, "is_last_step": last, "reward": reward}
        row |= {"round": round, "attempt": attempt, "policy_version": policy_version}
        for name, field in _COLUMNS.items():
            if name in given:
                row[field] = plain(given[name][index], field, where)
        rows.append(row)
    if "loss_masks" not in given:
        _train_everything(rows)
    return rows


def _train_everything(rows: list[dict[str, Any]]) -> None:
    """Gives each row a mask of ones: a view of one array, as nobody changes it."""
    lengths = [np.size(row["response_ids"]) for row in rows]
    ones = np.ones(max(lengths, default=0), np.uint8)
    for row, length in zip(rows, lengths, strict=True):
        row["loss_mask"] = ones[:length]


def _check_names(given: Mapping[str, Any]) -> None:
    for name in ("prompt_token_ids", "response_ids"):
        if name not in given:
            raise InvalidArgumentError(f"generator output: {name} is missing; every row needs it")
    if "trajectory_ids" not in given and not {"uids", "samples"} <= given.keys():
        raise InvalidArgumentError(
            "generator output: nothing says which trajectories the rows belong to; give trajectory_ids, or uids and "
            "samples"
        )
    unknown = sorted(given.keys() - _COLUMNS.keys() - set(_IDENTITY))
    if unknown:
        known = ", ".join(sorted((*_COLUMNS, *_IDENTITY)))
        raise InvalidArgumentError(f"generator output: unknown key {unknown[0]}; known are {known}; drop it")


def _keys(given: Mapping[str, Any]) -> list[tuple[str, int]]:
    if "trajectory_ids" in given:
        return [_key(entry, index) for index, entry in enumerate(given["trajectory_ids"])]
    pairs = zip(given["uids"], given["samples"], strict=True)
    return [_key(pair, index) for index, pair in enumerate(pairs)]


def _key(entry: Any, index: int) -> tuple[str, int]:
    if hasattr(entry, "instance_id") and hasattr(entry, "repetition_id"):
        entry = (entry.instance_id, entry.repetition_id)
    is_pair = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
    if not is_pair or not isinstance(entry[0], str) or isinstance(entry[1], bool) or not hasattr(entry[1], "__index__"):
        raise InvalidArgumentError(
            f"generator output: row {index} belongs to {entry!r}; expected a uid (a string) and a sample (an integer)"
        )
    return entry[0], int(entry[1])


def _rewards(rewards: Any, lasts: list[bool], responses: Sequence[Any]) -> list[Any]:
    """One a row; where the others' are per token, a missing one before the last step is so too."""
    if rewards is None:
        rewards = [None] * len(lasts)
    found = [plain(reward, "reward", f"generator output: row {row}") for row, reward in enumerate(rewards)]
    per_token = any(np.ndim(reward) > 0 for reward in found if reward is not None)
    return [
        reward if reward is not None or last else (np.zeros(len(response)) if per_token else 0.0)
        for reward, last, response in zip(found, lasts, responses, strict=True)
    ]
