"""The closed groups of a run: those that are listed, and those of freed batches, which are archived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gristmill_service.run.machine.archived_groups import ArchivedGroups, digests_of
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.groups import Group

# Any number of groups may be dropped while one batch is collected. Archiving this many takes about 10 ms.
_LISTED_DROPS = 1 << 13

ClosedOutcome = int | str
"""What became of a closed group: the number of its batch, which may have failed, or the reason why it was dropped."""


class ClosedGroup(NamedTuple):
    """A closed group that is listed. tag: "" for none."""

    outcome: ClosedOutcome
    tag: str = ""


@dataclass(slots=True)
class ClosedGroups:
    """All groups that were ever sealed or dropped.

    listed: the groups that are not archived, in the order in which they closed first.
    dropped: the dropped groups among them, by the number of the batch that was collected when they were dropped.
    archive: the outcomes of all other groups. reasons: numbers the reasons in it, which it stores as -1 - number.
    """

    run_id: str = ""
    listed: dict[GroupKey, ClosedGroup] = field(default_factory=dict)
    dropped: dict[int, list[GroupKey]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    archive: ArchivedGroups = field(default_factory=ArchivedGroups)

    def outcomes(self, keys: Iterable[GroupKey]) -> dict[GroupKey, ClosedOutcome]:
        """Returns the outcome of each closed group among these."""
        outcomes, others = dict[GroupKey, ClosedOutcome](), list[GroupKey]()
        for key in keys:
            if (closed := self.listed.get(key)) is not None:
                outcomes[key] = closed.outcome
            else:
                others.append(key)
        if others and self.archive.segments:
            reasons = list(self.reasons)
            for index, outcome in self.archive.find(digests_of(self.run_id, others)).items():
                outcomes[others[index]] = outcome if outcome >= 0 else reasons[-1 - outcome]
        return outcomes

    def seal(self, group: Group, batch: int) -> None:
        self.listed[group.key] = ClosedGroup(batch, group.tag)

    def drop(self, groups: Iterable[Group], outcome: ClosedOutcome, collected: int) -> None:
        """Records groups as dropped, sealed ones too. collected: the number of the batch that is being collected."""
        dropped = self.dropped.setdefault(collected, [])
        for group in groups:
            self.listed[group.key] = ClosedGroup(outcome, group.tag)
            dropped.append(group.key)
        if len(dropped) >= 2 * _LISTED_DROPS:
            self.archive_groups(dropped[:-_LISTED_DROPS])
            del dropped[:-_LISTED_DROPS]

    def archive_groups(self, keys: Iterable[GroupKey]) -> None:
        """Archives listed groups."""
        archived = {key: self.listed.pop(key).outcome for key in keys}
        outcomes = [self._number(outcome) for outcome in archived.values()]
        self.archive.add(digests_of(self.run_id, archived), outcomes)

    def archive_dropped(self, freed: int) -> None:
        """Archives the groups that were dropped while batches before `freed` were collected."""
        for collected in [collected for collected in self.dropped if collected < freed]:
            self.archive_groups(self.dropped.pop(collected))

    def _number(self, outcome: ClosedOutcome) -> int:
        return outcome if isinstance(outcome, int) else -1 - self.reasons.setdefault(outcome, len(self.reasons))
