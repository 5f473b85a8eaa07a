"""Errors for values that are not a flat list of numbers: describes the value, and the value to pass instead."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np

from gristmill.errors import InvalidArgumentError

_TOKENS = "pass token ids: tokenizer(...).input_ids"
_ONE_OR_MORE = "pass one number, or one per response token"
_EXPECTED = {
    "prompt_token_ids": _TOKENS,
    "response_ids": _TOKENS,
    "observation_ids": _TOKENS,
    "loss_mask": "pass 0 or 1 for each response token",
    "rollout_logprobs": "pass the log-probability of each response token",
    "policy_versions": "pass an integer for each response token",
    "reward": _ONE_OR_MORE,
    "advantage": _ONE_OR_MORE,
}
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((str, bytes), "string"),
    (Mapping, "mapping"),
    ((list, tuple, np.ndarray), "list"),
)


def unlike_numbers(values: Any, name: str, where: str) -> InvalidArgumentError:
    """Returns the error for values that are not a flat list of numbers."""
    problem, remedy = _problem(values, name), _EXPECTED.get(name, "pass a flat list of numbers")
    if remedy is _TOKENS and ("lists" in problem or "shape" in problem):
        remedy = "pass the token ids of one row: input_ids[0] of a tokenizer's batch"
    return InvalidArgumentError(f"{where}: {problem}; {remedy}")


def _problem(values: Any, name: str) -> str:
    """Describes the values without their content, which may be long or private."""
    if isinstance(values, np.ndarray) and values.ndim != 1:
        return f"{name} has shape {values.shape}"
    if not isinstance(values, (list, tuple, np.ndarray)):
        return f"{name} is {values}" if isinstance(values, Number) else f"{name} is a {_kind(values)}"
    for index, value in enumerate(values):
        if not isinstance(value, Number):
            kind = _kind(value)
            return f"{name}[{index}] is a {kind}" if index else f"{name} contains {kind}s"
    return f"{name} contains numbers that do not fit 64 bits"


def _kind(value: Any) -> str:
    return next((word for kinds, word in _KINDS if isinstance(value, kinds)), type(value).__name__)
