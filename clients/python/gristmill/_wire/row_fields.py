"""The one list of row fields. Tables, messages, mappings, stored tables and digests are built from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

UNKNOWN = -1
LONGEST_TAG = LONGEST_COMPONENT = LONGEST_AGENT = 100
LONGEST_UID = LONGEST_TEXT = 1000
MOST_COMPONENTS = MOST_AGENTS = 64
MOST_OF_RUN = {"agents": MOST_AGENTS, "partitions": 64}
"""How many different strings a run may have in these fields."""


class RowField(NamedTuple):
    """A field with one number per row.

    name: the name in `Steps`, in `gristmill.v1.Rows`, and in stored tables. key: the name in a row that is a mapping.
    dtype: the column's dtype. default: the value of rows without the field. lowest: the smallest valid value.
    is_required: whether messages must have the field.
    """

    name: str
    key: str
    dtype: Any
    default: Any
    lowest: int | None = 0
    is_required: bool = False


class TokenField(NamedTuple):
    """A field with one value per response token.

    name: the name in `Steps` and in stored tables. key: the name in a row that is a mapping. message: the name in
        `gristmill.v1.Rows`. dtype: the column's dtype.
    is_plain: whether the field is independent of all others. Codecs, tables and digests then need only this entry.
    fill: for a plain field, the value of rows without it if other rows have it; None: such rows are refused.
    label: for a plain field, a prefix of its values in digests of rows, which distinguishes it from other fields.
    """

    name: str
    key: str
    message: str
    dtype: Any
    is_plain: bool = False
    fill: float | None = None
    label: bytes = b""


class TextField(NamedTuple):
    """A string of each row, "" for a row without. A table's column is None if no row has any.

    name: the name in `Steps`, in `gristmill.v1.Rows`, and in stored tables. key: the name in a row that is a mapping.
    longest: the most characters.
    label: a prefix of its values in digests of rows, which distinguishes it from other fields.
    of_trajectory: whether all steps of a trajectory have the same.
    """

    name: str
    key: str
    longest: int
    label: str = ""
    of_trajectory: bool = False


ROW_FIELDS = (
    RowField("rounds", "round", np.int32, 0),
    RowField("samples", "sample", np.int32, 0, is_required=True),
    RowField("steps", "step", np.int32, 0),
    RowField("attempts", "attempt", np.int32, 0),
    RowField("is_last_steps", "is_last_step", np.bool_, True, lowest=None),
    RowField("policy_versions", "policy_version", np.int32, UNKNOWN, lowest=UNKNOWN),
)
TOKEN_FIELDS = (
    TokenField("loss_mask", "loss_mask", "loss_mask", np.uint8),
    TokenField("logprobs", "rollout_logprobs", "rollout_logprobs", np.float32, is_plain=True),
    TokenField("token_rewards", "reward", "token_rewards", np.float64),
    TokenField("token_advantages", "advantage", "token_advantages", np.float32),
    TokenField("token_versions", "policy_versions", "token_policy_versions", np.int32),
)
TEXT_FIELDS = (
    TextField("tags", "tag", LONGEST_TAG),
    TextField("step_keys", "step_key", LONGEST_TEXT, "\0\0"),
    TextField("agents", "agent", LONGEST_AGENT, "\0agent\0", of_trajectory=True),
    TextField("episodes", "episode", LONGEST_TEXT, "\0episode\0", of_trajectory=True),
    TextField("partitions", "partition", LONGEST_AGENT, "\0partition\0"),
)
"""Digests and stored tables depend on the order, so append new fields."""

PLAIN_FIELDS = tuple(one for one in TOKEN_FIELDS if one.is_plain)
OPTIONAL_STRINGS = ("reward_components", *(one.name for one in TEXT_FIELDS))
"""The columns of strings that a table may lack."""
