"""Plans of rows."""

from __future__ import annotations

from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.numbers import numbers_of
from gristmill_service.pipeline.planning import Plan, make_plan


def planned(
    steps: Steps, config: RunConfig, policy_version: int | None = None, baselines: Baselines = NO_BASELINES
) -> Plan:
    numbers, received = numbers_of(steps, config, policy_version)
    return make_plan(numbers, received, config, baselines=baselines)
