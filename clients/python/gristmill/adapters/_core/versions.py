"""Checks that a trainer's version was tested with its adapter, because adapters override methods of trainers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from gristmill.errors import UnsupportedError

_log = logging.getLogger("gristmill")

UNTESTED = "GRISTMILL_UNTESTED"


def check_version(trainer: str, distribution: str, tested: Sequence[str]) -> None:
    """Raise UnsupportedError if the installed version was not tested, unless GRISTMILL_UNTESTED=1 is set.

    distribution: the trainer's name for pip. It is not checked if it is not installed. tested: versions, or their
    prefixes, such as `0.3`.
    """
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return
    if any(installed == known or installed.startswith(f"{known}.") for known in tested):
        return
    message = f"the adapter was tested with {trainer} {' and '.join(tested)}, but {installed} is installed"
    if os.environ.get(UNTESTED) != "1":
        raise UnsupportedError(f"{message}; install a tested version, or set {UNTESTED}=1 to continue with this one")
    _log.warning("%s", message)
