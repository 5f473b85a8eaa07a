"""How much one request may ask of a run: while it is decided and logged, other calls wait."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill._wire.steps import Steps, check_uid
from gristmill.errors import InvalidArgumentError

_MOST_GROUPS, _MOST_ROWS = 1 << 15, 1 << 14


def check_group_count(count: int) -> None:
    """Raises InvalidArgumentError for too many groups."""
    if count > _MOST_GROUPS:
        raise InvalidArgumentError(f"the call begins {count} groups, and {_MOST_GROUPS} are the most; send fewer")


def check_begun(round_: int, uids: Sequence[str]) -> None:
    """Raises InvalidArgumentError for groups that cannot be named, or are too many."""
    check_group_count(len(uids))
    if round_ < 0:
        raise InvalidArgumentError(f"round is {round_}; give 0 or more")
    if "" in uids:
        raise InvalidArgumentError(f"uids[{list(uids).index('')}] is empty; name each prompt")
    for uid in uids:
        check_uid(uid)


def check_submitted(steps: Steps) -> None:
    """Raises InvalidArgumentError for too many rows."""
    if len(steps) > _MOST_ROWS:
        raise InvalidArgumentError(
            f"the request has {len(steps)} rows, and {_MOST_ROWS} are the most; send several requests"
        )
