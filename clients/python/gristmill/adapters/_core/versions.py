"""The check that a trainer has a version that its adapter was tested with: adapters override methods of trainers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from gristmill.errors import UnsupportedError

_log = logging.getLogger("gristmill")

UNTESTED = "GRISTMILL_UNTESTED"


def check_version(trainer: str, distribution: str, tested: Sequence[str]) -> None:
    """Refuse an installed version that is none of the tested ones, unless GRISTMILL_UNTESTED=1 is set.

    distribution: the trainer's name for pip; one that is not installed is not checked. tested: versions, or their
    beginnings, such as `0.3`. Raises UnsupportedError.
    """
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return
    if any(installed == known or installed.startswith(f"{known}.") for known in tested):
        return
    message = f"the adapter was tested with {trainer} {' and '.join(tested)}; this is {installed}"
    if os.environ.get(UNTESTED) != "1":
        raise UnsupportedError(f"{message}: install a tested version, or set {UNTESTED}=1 to continue with this one")
    _log.warning("%s", message)
