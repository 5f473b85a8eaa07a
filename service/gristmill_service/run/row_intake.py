"""Rows on their way into a run: what of them is kept, and under which digests the state knows them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.steps import Steps
from gristmill.errors import PrefixUnknownError
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.commands.command import Command, FindQuota
from gristmill_service.run.machine.commands.rollout_commands import TakeRows
from gristmill_service.run.machine.decisions.ingest import describe_rows
from gristmill_service.run.machine.row_digests import RowDigests
from gristmill_service.run.machine.row_keys import RowKeys
from gristmill_service.run.rows import shared_prefixes
from gristmill_service.run.rows.shared_prefixes import Kept
from gristmill_service.run.rows.token_sums import TokenSums
from gristmill_service.run.writing.writer import Writer

Execute = Callable[[Command[list[Outcome]]], list[Outcome]]


class RowIntake:
    """One run's. Thread-safe: work per token is done in the calling thread."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._sums = writer, TokenSums()

    def take(
        self,
        steps: Steps,
        prefixes: Prefixes | None,
        shared: Collection[str],
        execute: Execute,
        quota: FindQuota | None = None,
    ) -> list[Outcome]:
        """Stores the rows as far as the run has not got their tokens. prefixes, shared: as `without_shared` has them.
        execute: has a command decided and made safe. quota: the caller's, where it has one.

        Raises PrefixUnknownError for what came without tokens that are not here.
        """
        keys = RowKeys.of(steps)
        before = self._writer.read(lambda state, rows: shared_prefixes.rows_before(state, rows, keys))
        kept = shared_prefixes.without_shared(steps, keys, prefixes, before, shared, self._sums.known)
        try:
            return self._store(keys, kept, shared, execute, quota)
        except PrefixUnknownError:
            if prefixes is not None:
                raise
            # A row that they begin as is gone since it was found.
            return self._store(keys, shared_prefixes.as_sent(steps), shared, execute, quota)

    def _store(
        self, keys: RowKeys, kept: Kept, shared: Collection[str], execute: Execute, quota: FindQuota | None
    ) -> list[Outcome]:
        steps, digests = kept.steps, RowDigests(kept.steps, shared)
        number = self._writer.stage(steps)
        try:
            rows = describe_rows(steps, keys, number, digests, kept.digests, kept.parents)
            outcomes = execute(TakeRows(steps, rows, quota))
        finally:
            self._writer.unstage([number])
        self._sums.note(rows, outcomes, kept.sums)
        return outcomes
