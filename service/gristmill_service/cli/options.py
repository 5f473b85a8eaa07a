"""Options that several commands share, and flags derived from settings."""

from __future__ import annotations

from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

ADDRESS = "127.0.0.1:50051"
AddressOption = Annotated[
    str,
    typer.Option(
        envvar="GRISTMILL_ADDRESS",
        help="The address of the service, or of any of its replicas: HOST:PORT or unix:/PATH, separated by commas.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def flags_of(settings: type[BaseSettings]) -> Signature:
    """Returns a signature with a flag for each setting, which typer reads."""
    return Signature([_flag(*item) for item in settings.model_fields.items()])


def _flag(name: str, field: FieldInfo) -> Parameter:
    """Returns the flag of a setting. Its value is None if the flag is not set."""
    kind = next(one for one in get_args(field.annotation) or (field.annotation,) if one is not NoneType)
    value = None if field.default_factory else field.default
    value = value.human_readable() if isinstance(value, ByteSize) else value
    default = "" if value is None or field.is_required() else f" [default: {value}]"
    choices = "|".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else None
    option = typer.Option(help=f"{field.description}{default}", metavar=choices)
    typed: Any = kind if kind in (bool, int, float, Path) else str
    annotation = Annotated[typed | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
