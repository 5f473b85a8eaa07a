"""Rows and configurations for tests: what a test does not name is as small as it can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.strategies import Row


def make_row(
    uid: Any = "a",
    sample: Any = 0,
    step: Any = 0,
    *,
    last: Any = True,
    prompt: Any = (1, 2),
    response: Iterable[int] = (7,),
    reward: Any = 1.0,
    **more: Any,
) -> Row:
    """Return one step, all of whose response is trained; a reward of None comes later."""
    response = list(response)
    return {
        "uid": uid,
        "sample": sample,
        "step": step,
        "is_last_step": last,
        "prompt_token_ids": list(prompt),
        "response_ids": response,
        "loss_mask": [1] * len(response),
        "reward": reward,
    } | more


def make_config(**changes: Any) -> dict[str, Any]:
    """Return the settings of a run whose batches are one prompt group, each of one sample, for one rank."""
    return {
        "train_batch_size": 1,
        "n_samples_per_prompt": 1,
        "policy_mini_batch_size": 1,
        "micro_batch": {"size": 1},
        "step_wise": True,
    } | changes
