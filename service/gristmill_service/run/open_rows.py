"""Read a row of a group that is not sealed yet, for people who inspect the rows that workers have sent."""

from __future__ import annotations

import asyncio

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError
from gristmill_service.run.machine.events import GroupKey, StoredRow
from gristmill_service.run.machine.state import State
from gristmill_service.run.rows.row_gathering import gather
from gristmill_service.run.writer import Writer


async def read_open_row(writer: Writer, key: GroupKey, sample: int, step: int) -> Steps:
    """Returns the row of the sample's current attempt as a table of one row, without rewards per token. Its reward is
    NaN while it is pending.

    Raises NotFoundError if the group is not open, or if the row has not arrived or was removed in the meantime.
    """
    row = _find(writer.state, key, sample, step)
    picked = writer.rows.pick([(writer.state.open[key], [row])])[0]
    # The row is read from the log, so it must be in it.
    await writer.commits.safe()
    try:
        return await asyncio.to_thread(gather, [picked], False, writer.tables.get)
    finally:
        # A row that was removed while it was being read may be wrong.
        writer.check_open()
        if _find(writer.state, key, sample, step).ref != row.ref:
            raise NotFoundError(f"{row} was superseded while it was read; retry")


def _find(state: State, key: GroupKey, sample: int, step: int) -> StoredRow:
    group = state.open.get(key)
    if group is None:
        raise NotFoundError(f"{key} is not open: {what_became_of(state, key)}")
    trajectory = group.trajectories.get(sample)
    if trajectory is None or step not in trajectory.rows:
        raise NotFoundError(f"{key} sample {sample} has no step {step} yet; request one of the received steps")
    return trajectory.rows[step]


def what_became_of(state: State, key: GroupKey) -> str:
    """Returns why the group is not open."""
    outcome = state.outcomes([key]).get(key)
    if outcome is None:
        return "no group of this uid and round was begun"
    if isinstance(outcome, int):
        return f"it was sealed into batch {outcome}; see its rows there"
    return f"it was dropped ({outcome}), and its rows were removed"
