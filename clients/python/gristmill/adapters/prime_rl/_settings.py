"""The settings of a run, derived from the configuration of prime-rl's trainer."""

from __future__ import annotations

from typing import Any

from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.settings import Configured, Default, Fixed, Refuse, Row, SettingsTable

PACKED = Fixed("layout", "packed", "prime-rl has all rows of a micro-batch on one axis")
UNREDUCED = Fixed("loss_reduction", "none", "prime-rl divides by the trained tokens of a mini-batch itself")
"""The settings that the bridge needs, also of a run that was created by other means."""

_BATCHES_AHEAD = 2


def run_settings(config: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings to create the run with: rollout workers or a coordinator create it, not the bridge.

    config: the content of `trainer.toml`, which does not have the sizes of batches and groups: give these as
    `gristmill.settings`. dp_size: data-parallel ranks of prime-rl. pad_token_id: the tokenizer's.
    Raises InvalidArgumentError that names everything that the bridge cannot do.
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
    Refuse(
        "rollout_transport.type",
        lambda value, _: value not in ("filesystem", "zmq"),
        "is a transport that the bridge does not have",
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
