"""Values that are no flat list of numbers, told to who gave them: what they are, and what to give in their place."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np

from gristmill.errors import InvalidArgumentError

_TOKENS = "give token ids, tokenizer(...).input_ids"
_ONE_OR_MORE = "give one number, or one a response token"
_EXPECTED = {
    "prompt_token_ids": _TOKENS,
    "response_ids": _TOKENS,
    "observation_ids": _TOKENS,
    "loss_mask": "give a 0 or 1 a response token",
    "rollout_logprobs": "give one number a response token, the log-probability of that token",
    "policy_versions": "give an integer a response token",
    "reward": _ONE_OR_MORE,
    "advantage": _ONE_OR_MORE,
}
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((str, bytes), "string"),
    (Mapping, "mapping"),
    ((list, tuple, np.ndarray), "list"),
)


def unlike_numbers(values: Any, name: str, where: str) -> InvalidArgumentError:
    """The error for values of a field that NumPy reads as anything but numbers on one axis."""
    found, remedy = _found(values, name), _EXPECTED.get(name, "give a flat list of numbers")
    if remedy is _TOKENS and ("lists" in found or "shape" in found):
        remedy = "give the token ids of one row, of a tokenizer's batch its input_ids[0]"
    return InvalidArgumentError(f"{where}: {found}: {remedy}")


def _found(values: Any, name: str) -> str:
    """The field and what it is or holds. Nothing of a text itself, which may be long and private."""
    if isinstance(values, np.ndarray) and values.ndim != 1:
        return f"{name} has shape {values.shape}"
    if not isinstance(values, (list, tuple, np.ndarray)):
        return f"{name} is {values}" if isinstance(values, Number) else f"{name} is a {_kind(values)}"
    for index, value in enumerate(values):
        if not isinstance(value, Number):
            kind = _kind(value)
            return f"{name}[{index}] is a {kind}" if index else f"{name} holds {kind}s"
    return f"{name} holds numbers that fit no type of 64 bits"


def _kind(value: Any) -> str:
    return next((word for kinds, word in _KINDS if isinstance(value, kinds)), type(value).__name__)
