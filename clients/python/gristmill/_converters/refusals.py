"""Refuses malformed input that a converter does not check, with InvalidArgumentError."""

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
    """Decorate a converter so that any failure to read its input raises InvalidArgumentError from the original error.
    what: the name of the input in error messages."""

    def decorate(convert: Callable[P, R]) -> Callable[P, R]:
        accepts = signature(convert)

        @wraps(convert)
        def refuse(*args: P.args, **options: P.kwargs) -> R:
            # Wrong arguments raise a TypeError, as in any call.
            accepts.bind(*args, **options)
            try:
                return convert(*args, **options)
            except GristmillError:
                raise
            except _UNREADABLE as error:
                raise InvalidArgumentError(
                    f"{what}: cannot be read: {type(error).__name__}: {str(error)[:200]}; pass the framework's objects "
                    "unchanged"
                ) from error

        return refuse

    return decorate
