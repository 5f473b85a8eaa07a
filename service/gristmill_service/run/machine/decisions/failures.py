"""What to do about a batch that could not be built."""

from __future__ import annotations

from gristmill_service.run.machine.state import GIVEN_UP

_KEPT = (
    "its rows are kept until the trainer goes on without it: resume with a dp_size that aligns it, or go on and sample "
    "its groups again in another round"
)
_DROPPED = (
    "its groups are dropped (batch_failed) and not trained: correct what is wrong and sample them again in another "
    "round"
)


def remedy(reason: str, *, is_kept: bool) -> str:
    """What to do about a batch that was not built for this reason; empty for one that somebody gave up. is_kept: its
    rows are."""
    if reason.startswith(GIVEN_UP):
        return ""
    return _KEPT if is_kept else _DROPPED
