"""Derives the settings of a run for `AsyncGRPOTrainer`. Does not import TRL."""

from __future__ import annotations

from math import ceil
from typing import Any

from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.settings import Configured, Default, Fixed, Row, Same, SettingsTable

_DECIDES = "AsyncGRPOTrainer selects the samples that are trained together"


def async_run_settings(config: Any, gristmill: Gristmill, *, dp_size: int = 1, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings with which a worker of this configuration creates its run, for `create_run`.

    A batch is one prompt group, so that the trainer gets each group when it is complete. Rollouts may be ahead by the
    groups that `max_staleness` allows, TRL's or the run's, in optimizer steps.

    config: an `AsyncGRPOConfig`. dp_size: 1, because one worker reads for all ranks.
    Raises InvalidArgumentError for settings that contradict the configuration.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


# The worker acknowledges a step later, and TRL reads up to a step ahead.
_STEPS_MORE = 2


def _max_batches_ahead(c: Configured) -> int:
    rows: int = c["per_device_train_batch_size"] * c["gradient_accumulation_steps"] * c["world_size"]
    steps = min(c["max_staleness"], c.gristmill.settings.get("max_staleness", c["max_staleness"])) + 1 + _STEPS_MORE
    # The last group of a step may be read in part.
    groups: float = steps * rows / c["num_generations"]
    return ceil(groups) + 1


_ROWS: tuple[Row, ...] = (
    Same("n_samples_per_prompt", "num_generations"),
    Fixed("train_batch_size", 1, _DECIDES),
    Fixed("policy_mini_batch_size", 1, _DECIDES),
    Fixed("micro_batch", {"count": 1}, _DECIDES),
    Fixed("layout", "packed", "samples are read from rows without padding"),
    Default("max_batches_ahead", _max_batches_ahead),
    Default("max_buffered_batches", lambda c: _max_batches_ahead(c) + 1),
)

_TABLE = SettingsTable("AsyncGRPOTrainer", _ROWS, rollouts=("workers",))
