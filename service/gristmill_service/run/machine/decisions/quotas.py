"""What quotas leave: groups that may be begun, and rows that may come."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.held import Most, Quota
from gristmill_service.run.machine.decisions.admission import RETRY_AFTER_S, UNBOUNDED, Room
from gristmill_service.run.machine.events import StoredRow

_WORDS = {"groups": "prompt groups", "rows": "rows", "row_bytes": "bytes of rows"}


def room(quota: Quota) -> Room:
    """Groups that may be begun yet: none where no row may come."""
    return min((_room(quota, kind) for kind in Most._fields), key=lambda found: found.groups)


def check(quota: Quota, rows: Sequence[StoredRow]) -> None:
    """Raises ResourceExhaustedError where these rows would be too many, or too large."""
    for kind, brought in (("rows", len(rows)), ("row_bytes", sum(row.nbytes for row in rows))):
        most, held = _of(quota, kind)
        if most is not None and held + brought > most:
            raise ResourceExhaustedError(
                f"{rows[0]}: the request brings {brought} {_WORDS[kind]}, and {_reason(quota, kind)}", RETRY_AFTER_S
            )


def _room(quota: Quota, kind: str) -> Room:
    most, held = _of(quota, kind)
    if most is None:
        return Room(UNBOUNDED, "")
    left = most - held
    groups = left if kind == "groups" else UNBOUNDED if left > 0 else 0
    return Room(max(0, groups), _reason(quota, kind), waits=quota.is_of_run)


def _of(quota: Quota, kind: str) -> tuple[int | None, int]:
    return getattr(quota.most, kind), getattr(quota.held, kind)


def _reason(quota: Quota, kind: str) -> str:
    setting, (most, held) = quota.setting.format(kind), _of(quota, kind)
    return (
        f"{quota.whose} {held} {_WORDS[kind]}, where {setting} allows {most}; batches have to be freed or groups "
        f"aborted, or raise {setting}"
    )
