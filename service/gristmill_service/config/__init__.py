"""A run's configuration: its settings, the rules between them, and its parsing.

Contains every rule that can be checked before a rollout arrives.
"""

from gristmill_service.config.parsing import difference, parse_config, read_config, stored_config, with_dp_size
from gristmill_service.config.rules import MOST_PADDED_TO, MOST_TAGS
from gristmill_service.config.run_config import (
    MERGE_MODES,
    SETTINGS,
    Flops,
    KlEstimator,
    KlInReward,
    LengthPenalty,
    LossReduction,
    MicroBatch,
    Model,
    Rae,
    RunConfig,
    StepGroups,
)
from gristmill_service.config.warnings import warnings_of

__all__ = [
    "MERGE_MODES",
    "MOST_PADDED_TO",
    "MOST_TAGS",
    "SETTINGS",
    "Flops",
    "KlEstimator",
    "KlInReward",
    "LengthPenalty",
    "LossReduction",
    "MicroBatch",
    "Model",
    "Rae",
    "RunConfig",
    "StepGroups",
    "difference",
    "parse_config",
    "read_config",
    "stored_config",
    "warnings_of",
    "with_dp_size",
]
