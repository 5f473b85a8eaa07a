"""Closed groups whose batch is freed: 20 bytes each, and what is known of them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_service.run.machine import archived_groups
from gristmill_service.run.machine.archived_groups import ArchivedGroups, Digests, Segment, digests_of
from gristmill_service.run.machine.events import GroupKey

# Few, so that different digests have equal halves.
HALVES = st.sampled_from([0, 1, 2, 2**63, 2**64 - 1])
GROUPS = st.dictionaries(st.tuples(HALVES, HALVES), st.integers(-(2**31), 2**31 - 1))


def digests(names: list[tuple[int, int]]) -> Digests:
    halves = np.array(names, np.uint64).reshape(-1, 2).T.copy()
    return halves[0], halves[1]


@given(GROUPS, st.lists(st.integers(1, 4)), st.booleans())
def test_what_was_added_is_found_however_it_was_added_and_nothing_else(
    groups: dict[tuple[int, int], int], counts: list[int], is_merged: bool
) -> None:
    archive, names = ArchivedGroups(), [*groups]
    for count in [*counts, len(names)]:
        added, names = names[:count], names[count:]
        segments = archive.segments
        archive.add(digests(added), [groups[name] for name in added])
        if not is_merged and added:
            # As large segments are, until a thread has merged them.
            archive = ArchivedGroups([*segments, Segment.of(digests(added), [groups[name] for name in added])])
    asked = [(high, low) for high in (0, 1, 2, 3, 2**63, 2**64 - 1) for low in (0, 1, 2, 3, 2**63, 2**64 - 1)]
    found = archive.find(digests(asked))
    assert {asked[index]: outcome for index, outcome in found.items()} == groups
    assert len(archive) == len(groups)
    assert archive == ArchivedGroups([Segment.of(digests([*groups]), [*groups.values()])] if groups else [])


def test_groups_are_in_few_segments_of_which_a_thread_merges_the_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_groups, "_SMALL", 1000)
    archive, merges = ArchivedGroups(), 0
    for batch in range(1000):
        keys = [GroupKey(0, f"{batch}-{number}") for number in range(100)]
        archive.add(digests_of("run", keys), [batch] * len(keys))
        before = copy.copy(archive.segments)
        while (pair := archive.large_pair()) is not None:
            assert min(map(len, pair)) > 1000
            archive.replace(pair, pair[0].merged(pair[1]))
            merges += 1
        assert sum(map(len, before)) == len(archive), "the segments themselves do not change"
    assert len(archive) == 100_000
    assert len(archive.segments) <= 5
    assert merges < 200
    assert sum(column.nbytes for segment in archive.segments for column in segment._columns) == 20 * len(archive)
    asked = [GroupKey(0, f"{batch}-7") for batch in range(1000)]
    assert archive.find(digests_of("run", asked)) == {batch: batch for batch in range(1000)}
    assert archive.find(digests_of("another run", asked)) == {}
    assert archive.find(digests_of("run", [key._replace(round=1) for key in asked])) == {}
