"""A run's settings with their defaults, and the cost of a batch with other settings."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo

from gristmill._wire.steps import concat
from gristmill.errors import FailedPreconditionError, ResourceExhaustedError
from gristmill_service.config import RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.off_loop import OneByOne
from gristmill_service.pipeline.alternatives import Sealed, compared, effective, usual
from gristmill_service.run.run import Run

# The limit exists because the rows are read into memory again, and planned several times.
_LARGEST = 1 << 30


class Setting(Document):
    name: str
    value: Any
    default: Any = Field(description="null also if the setting is required.")
    is_default: bool


class RunSettings(Document):
    run: str
    settings: list[Setting] = Field(description="All settings; changed settings come first.")


class Cost(Document):
    """What the batch becomes with some settings. A number is null for the `reason`."""

    setting: str = Field(description="The changed settings, such as `layout: packed`; empty for the run's own.")
    steps: int = Field(description="Optimizer steps, in all epochs.")
    groups: int = Field(description="Groups with trained rows.")
    rows: int
    padding_rows: int
    tokens: int = Field(description="Tokens that the model computes, including padding.")
    padding_share: float
    loss_tokens: int
    barrier_ratio: float = Field(description="The load of each micro-step's slowest rank, divided by the mean load.")
    zero_share: float | None = Field(description="Share of these groups whose trained tokens all have advantage 0.")
    advantage_mean: float | None = Field(description="Of trained tokens, without the factor of `loss_reduction`.")
    advantage_std: float | None
    advantage_largest: float | None = Field(description="The largest absolute value.")
    reason: str = Field(description="Why numbers are missing.")


class BatchCosts(Document):
    run: str
    batch: int
    costs: list[Cost] = Field(description="As configured, and with the usual alternatives that change a number.")


def run_settings(run: Run) -> RunSettings:
    values = json.loads(run.config.model_dump_json(by_alias=True))
    settings = [
        _setting(field.alias or name, values[field.alias or name], field)
        for name, field in RunConfig.model_fields.items()
    ]
    return RunSettings(run=run.name, settings=sorted(settings, key=lambda setting: setting.is_default))


async def batch_costs(run: Run, batch: int, one_by_one: OneByOne) -> BatchCosts:
    """Plans the batch again for each of the usual alternatives, in a thread. Takes seconds for a large batch.

    Raises FailedPreconditionError if the batch's rows are freed, and ResourceExhaustedError if they have more than a
    gigabyte.
    """
    sealed = run.read(
        lambda state, _: (
            (state.batches[batch].row_bytes, state.batches[batch].policy_version) if batch in state.batches else None
        )
    )
    if sealed is None:
        raise FailedPreconditionError(f"batch {batch} has no stored rows, so it cannot be planned; choose another")
    size, version = sealed
    if size > _LARGEST:
        raise ResourceExhaustedError(
            f"batch {batch} has {size} bytes of rows, and the limit is {_LARGEST} while the run trains; "
            "use gristmill export and gristmill plan"
        )
    tables, config = [table async for table in run.export(batch)], run.config
    planned = await one_by_one(
        lambda: list(effective(compared([Sealed(concat(tables), version)], config, usual(config))))
    )
    return BatchCosts(run=run.name, batch=batch, costs=[Cost(**one.figures) for one in planned])


def _setting(name: str, value: Any, field: FieldInfo) -> Setting:
    default = None if field.is_required() else json.loads(json.dumps(field.default, default=list))
    return Setting(name=name, value=value, default=default, is_default=not field.is_required() and value == default)
