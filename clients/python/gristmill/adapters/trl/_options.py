"""Where a trainer's run is, and who makes its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Gristmill:
    """The run that a trainer trains, and what TRL's configuration has no name for.

    address, run: as for `TrainerClient`. The run is created with the settings that `GRPOConfig` gives.
    rollouts: `trainer`: TRL generates and scores as it always does, and the adapter submits that; `workers`: others
        submit to the run, and the trainer needs no reward functions and no data set.
    settings: settings of the run that `GRPOConfig` does not give, such as `merge`, `max_staleness`, `balance`, or
        another `micro_batch` than `{size: per_device_train_batch_size}`.
    old_logprobs: with `workers`, which log-probabilities the ratio of the loss is taken against: `rollout`: those that
        rows bring; `trainer`: the policy's at the beginning of a batch, which the adapter computes and writes back.
    publish_weights: with `workers`, hands the model's weights to them; called on every rank with the trainer and the
        version, as training begins and after every batch. The version is announced when it returns.
    timeout_s: for how long a call is tried while the service is away.
    """

    address: str
    run: str
    rollouts: Literal["trainer", "workers"] = "trainer"
    settings: Mapping[str, Any] = field(default_factory=dict)
    old_logprobs: Literal["rollout", "trainer"] = "rollout"
    publish_weights: Callable[[Any, int], None] | None = None
    timeout_s: float = 120.0
