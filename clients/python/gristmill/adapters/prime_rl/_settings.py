"""Derives the settings of a run from the configuration of prime-rl's trainer."""

from __future__ import annotations

from typing import Any

from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.settings import (
    Configured,
    Default,
    Fixed,
    Refuse,
    Row,
    SettingsTable,
    refuse_row_padding,
)

PACKED = Fixed("layout", "packed", "prime-rl concatenates all rows of a micro-batch on one axis")
UNREDUCED = Fixed("loss_reduction", "none", "prime-rl itself divides by the trained tokens of a mini-batch")
"""The settings that the bridge requires of every run, including runs that other programs created."""

_BATCHES_AHEAD = 2


def run_settings(config: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings of the run. Rollout workers or a coordinator create it, not the bridge.

    config: the content of `trainer.toml`. It does not contain the sizes of batches and groups, so set these in
    `gristmill.settings`. dp_size: prime-rl's number of data-parallel ranks. pad_token_id: the tokenizer's.
    Raises InvalidArgumentError that names all settings that the bridge does not support.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


def _micro_batch(c: Configured) -> dict[str, int] | None:
    seq_len = c.get("model.seq_len")
    return None if seq_len is None else {"max_tokens": seq_len}


def _max_buffered_batches(c: Configured) -> int | None:
    interval = c.get("ckpt.interval")
    return None if interval is None else interval + _BATCHES_AHEAD


_ROWS: tuple[Row, ...] = (
    PACKED,
    UNREDUCED,
    Default("micro_batch", _micro_batch),
    Default("max_buffered_batches", _max_buffered_batches),
    *refuse_row_padding("prime-rl"),
    Refuse(
        "rollout_transport.type",
        lambda value, _: value not in ("filesystem", "zmq"),
        "is a transport that the bridge does not support",
        "use filesystem or zmq",
    ),
    Refuse(
        "weight_broadcast.type",
        lambda value, _: value == "nccl",
        "waits for a file that prime-rl's orchestrator writes",
        "use filesystem",
    ),
)

_TABLE = SettingsTable("prime-rl", _ROWS, rollouts=("workers",))
