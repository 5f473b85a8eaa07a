"""The intake of a run's rows: prepares them, stages their table, has them accepted, and notes their sums."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.steps import Steps
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.commands.command import Command, FindQuota
from gristmill_service.run.machine.commands.rollout_commands import TakeRows
from gristmill_service.run.machine.row_keys import RowKeys
from gristmill_service.run.rows.declared_prefixes import TokenSums, prepare, steps_before
from gristmill_service.run.rows.row_gathering import Load
from gristmill_service.run.writing.writer import Writer

Execute = Callable[[Command[list[Outcome]]], list[Outcome]]


class RowIntake:
    """The intake of one run. Thread-safe: work per token is done in the calling thread. load: reads a stored table."""

    def __init__(self, writer: Writer, load: Load) -> None:
        self._writer, self._load, self._sums = writer, load, TokenSums()

    def take(
        self,
        steps: Steps,
        prefixes: Prefixes | None,
        shared: Collection[str],
        execute: Execute,
        quota: FindQuota | None = None,
    ) -> list[Outcome]:
        """Stores the rows as they were sent. prefixes, shared: as for `prepare`. execute: has a command decided and
        made safe. quota: the caller's, where it has one.

        Raises PrefixUnknownError for rows that were sent without tokens that the run cannot add.
        """
        keys = RowKeys.of(steps)
        before = self._writer.read(lambda state, rows: steps_before(state, rows, self._sums, keys, prefixes))
        prepared = prepare(steps, keys, prefixes, before, shared, self._load)
        number = self._writer.stage(steps)
        try:
            rows = prepared.rows(number)
            outcomes = execute(TakeRows(steps, rows, quota))
        finally:
            self._writer.unstage([number])
        self._sums.note(rows, outcomes, prepared.sums)
        return outcomes
