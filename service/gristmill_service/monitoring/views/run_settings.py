"""A run's settings with their defaults, and the cost of a batch with other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo

from gristmill._wire.steps import concat
from gristmill.errors import FailedPreconditionError, ResourceExhaustedError
from gristmill_service.config import RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.off_loop import OneByOne
from gristmill_service.pipeline.alternatives import (
    Alternative,
    Sealed,
    compared,
    compared_outline,
    effective,
    parse_all,
)
from gristmill_service.pipeline.credit.baselines import NO_BASELINES
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
    steps: int | None = Field(description="Optimizer steps, in all epochs.")
    groups: int | None = Field(description="Groups with trained rows.")
    rows: int | None
    padding_rows: int | None
    tokens: int | None = Field(description="Tokens that the model computes, including padding.")
    padding_share: float | None
    loss_tokens: int | None
    barrier_ratio: float | None = Field(
        description="The load of each micro-step's slowest rank, divided by the mean load."
    )
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


async def batch_costs(run: Run, batch: int, texts: Sequence[str], one_by_one: OneByOne) -> BatchCosts:
    """Plans the batch again with other settings, in a thread: from its rows or, if these are freed, from its outline.
    Takes seconds for a large batch. texts: see `parse_all`.

    Raises FailedPreconditionError if the log has neither, and ResourceExhaustedError if the rows have more than a
    gigabyte.
    """
    sealed, outline = run.read(
        lambda state, _: (
            state.batches.get(batch),
            next((record.outline for record in state.records if record.first == record.last == batch), b""),
        )
    )
    compare: Callable[..., Iterator[Alternative]] = partial(compared_outline, outline)
    if sealed is not None:
        size = sealed.row_bytes
        if size > _LARGEST:
            raise ResourceExhaustedError(
                f"batch {batch} has {size} bytes of rows, and the limit is {_LARGEST} while the run trains; "
                "use gristmill export and gristmill plan"
            )
        tables, baselines = [table async for table in run.export(batch)], sealed.baselines or NO_BASELINES
        rows = [Sealed(concat(tables), sealed.policy_version, baselines)]
        compare = partial(compared, rows)
    elif not outline:
        raise FailedPreconditionError(f"batch {batch} has no stored rows, so it cannot be planned; choose another")
    config = run.config
    planned = await one_by_one(lambda: list(effective(compare(config, parse_all(texts, config)), texts)))
    return BatchCosts(run=run.name, batch=batch, costs=[Cost(**one.figures) for one in planned])


def _setting(name: str, value: Any, field: FieldInfo) -> Setting:
    default = None if field.is_required() else json.loads(json.dumps(field.default, default=list))
    return Setting(name=name, value=value, default=default, is_default=not field.is_required() and value == default)
