"""The environment or task of groups: who may name it, and how many there may be."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill._wire.steps import check_tag
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import MOST_TAGS
from gristmill_service.run.machine.events import GroupKey, GroupTagged, NewGroup
from gristmill_service.run.machine.state import State


class NamedTags:
    """The tags that a request names, of groups that have none yet. Refuses those that disagree, or are too many."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._found: dict[GroupKey, str] = {}

    def name(self, key: GroupKey, tag: str, what: str) -> None:
        """what: which row or group of the request names it, for the refusal."""
        if not tag:
            return
        group = self._state.open.get(key)
        known = self._found.get(key) or (group.tag if group else "")
        if known and known != tag:
            raise InvalidArgumentError(
                f"{what}: tag is {tag!r}, and the group has {known!r}; give all rows of a group one tag, or none"
            )
        if not known:
            check_tag(tag, what)
            self._found[key] = tag
            self._check_count(what)

    def of(self, key: GroupKey) -> str:
        return self._found.get(key, "")

    def events(self, admitted: Iterable[NewGroup]) -> list[GroupTagged]:
        """What becomes of open groups. admitted: those that begin with their tags."""
        new = {group.key for group in admitted}
        return [GroupTagged(key, tag) for key, tag in self._found.items() if key in self._state.open and key not in new]

    def _check_count(self, what: str) -> None:
        names = self._state.tags.keys() | self._found.values()
        if len(names) > MOST_TAGS:
            raise InvalidArgumentError(
                f"{what}: the run would have more than {MOST_TAGS} tags ({', '.join(sorted(names)[:5])}, ...); name "
                "the environment or task by the tag, and not the prompt"
            )
