"""Where a trainer's run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Gristmill:
    """The run that a trainer trains, and what SkyRL's configuration has no name for.

    address, run: as for `TrainerClient`. The run is created with the settings that SkyRL's configuration gives.
    settings: settings of the run that SkyRL's configuration does not give, such as `merge: tree`, `balance`, `columns`
        or `max_buffered_bytes`.
    timeout_s: for how long a call is tried while the service is away.
    """

    address: str
    run: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 120.0
