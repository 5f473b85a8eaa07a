"""Derives the settings of a run for `AsyncGRPOTrainer`. Does not import TRL."""

from __future__ import annotations

from math import ceil
from typing import Any

from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.settings import Configured, Default, Fixed, Row, Same, SettingsTable

_DECIDES = "AsyncGRPOTrainer selects the samples that are trained together"


def async_run_settings(config: Any, gristmill: Gristmill, *, dp_size: int = 1, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings with which a worker of this configuration creates its run, for `create_run`.

    A batch is one prompt group, so that the trainer gets each group when it is complete. The run stores the groups by
    which `max_staleness` allows the sampler to be ahead.

    config: an `AsyncGRPOConfig`. dp_size: 1, because one worker reads for all ranks.
    Raises InvalidArgumentError for settings that contradict the configuration.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


def _max_buffered_batches(c: Configured) -> int:
    rows: int = c["per_device_train_batch_size"] * c["gradient_accumulation_steps"] * c["world_size"]
    groups: float = (c["max_staleness"] + 1) * rows / c["num_generations"]
    return ceil(groups) + 1


_ROWS: tuple[Row, ...] = (
    Same("n_samples_per_prompt", "num_generations"),
    Fixed("train_batch_size", 1, _DECIDES),
    Fixed("policy_mini_batch_size", 1, _DECIDES),
    Fixed("micro_batch", {"count": 1}, _DECIDES),
    Fixed("layout", "packed", "samples are read from rows without padding"),
    Default("max_buffered_batches", _max_buffered_batches),
)

_TABLE = SettingsTable("AsyncGRPOTrainer", _ROWS, rollouts=("workers",))
