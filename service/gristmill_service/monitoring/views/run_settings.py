"""A run's settings with their defaults."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo

from gristmill_service.config import RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.run.run import Run


class Setting(Document):
    name: str
    value: Any
    default: Any = Field(description="null also if the setting is required.")
    is_default: bool


class RunSettings(Document):
    run: str
    settings: list[Setting] = Field(description="All settings; changed settings come first.")


def run_settings(run: Run) -> RunSettings:
    values = json.loads(run.config.model_dump_json(by_alias=True))
    settings = [
        _setting(field.alias or name, values[field.alias or name], field)
        for name, field in RunConfig.model_fields.items()
    ]
    return RunSettings(run=run.name, settings=sorted(settings, key=lambda setting: setting.is_default))


def _setting(name: str, value: Any, field: FieldInfo) -> Setting:
    default = None if field.is_required() else json.loads(json.dumps(field.default, default=list))
    return Setting(name=name, value=value, default=default, is_default=not field.is_required() and value == default)
