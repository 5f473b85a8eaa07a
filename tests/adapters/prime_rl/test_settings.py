"""The configuration of prime-rl's trainer gives the settings of a run."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import InvalidArgumentError
from gristmill.adapters.prime_rl import Gristmill, run_settings
from gristmill_service.config import parse_config

SIZES = {"train_batch_size": 4, "n_samples_per_prompt": 2, "policy_mini_batch_size": 2}


def settings(config: dict[str, Any], **own: Any) -> dict[str, Any]:
    return run_settings(config, Gristmill("here:1", "run", settings=SIZES | own), dp_size=8)


def test_sizes_that_the_trainer_has_are_taken_from_it() -> None:
    run = parse_config(settings({"model": {"seq_len": 4096}, "ckpt": {"interval": 10}}))
    assert (run.layout, run.loss_reduction, run.dp_size) == ("packed", "none", 8)
    assert (run.micro_batch.max_tokens, run.max_buffered_batches) == (4096, 12)


def test_others_are_given_as_settings() -> None:
    assert settings({}, micro_batch={"size": 2})["micro_batch"] == {"size": 2}


@pytest.mark.parametrize(
    ("config", "own", "reason"),
    [
        ({"rollout_transport": {"type": "nixl"}}, {}, "rollout_transport.type: 'nixl' .* use filesystem or zmq"),
        ({"weight_broadcast": {"type": "nccl"}}, {}, "weight_broadcast.type: 'nccl' waits .* use filesystem"),
        ({}, {"layout": "left_padded"}, "layout is fixed at 'packed', because prime-rl concatenates all rows"),
        ({}, {"dp_size": 4}, "dp_size follows from prime-rl's configuration, where it is 8"),
    ],
)
def test_what_the_bridge_cannot_do_is_refused(config: dict[str, Any], own: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        settings(config, **own)
