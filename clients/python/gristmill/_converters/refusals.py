"""Refuses malformed input that no converter checks for like any other bad input."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from gristmill.errors import GristmillError, InvalidArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def refusing(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a converter of `what` so that any failure to read it raises InvalidArgumentError, from the original
    error."""

    def decorate(convert: Callable[P, R]) -> Callable[P, R]:
        accepts = signature(convert)

        @wraps(convert)
        def refuse(*args: P.args, **options: P.kwargs) -> R:
            # Wrong arguments are a TypeError, like those of any call.
            accepts.bind(*args, **options)
            try:
                return convert(*args, **options)
            except GristmillError:
                raise
            except _UNREADABLE as error:
                raise InvalidArgumentError(
                    f"{what}: cannot be read: {type(error).__name__}: {str(error)[:200]}; hand over what the framework "
                    "makes, unchanged"
                ) from error

        return refuse

    return decorate
