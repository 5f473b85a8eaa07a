"""Groups of a size of their own, and those of which more samples are taken than are needed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import InvalidArgumentError
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.machine.described_rows import ROW_OVERHEAD_BYTES
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.storage.memory import MemoryShardStore
from tests.metrics.scraping import scraped
from tests.run.harness import Bench, group_rows, key, row


def samples_of(bench: Bench, batch: int, uid: str) -> list[int]:
    """The samples of a group in a batch that was made."""
    steps = bench.build_batch.batches[batch]
    return sorted({int(sample) for name, sample in zip(steps.uids, steps.samples, strict=True) if name == uid})


class TestOwnSizes:
    def test_a_group_is_complete_with_as_many_samples_as_it_was_begun_with(self) -> None:
        bench = Bench(max_samples_per_prompt=4)
        bench.run.begin_groups(0, ["a", "b", "c"], [4, 1, 0])
        bench.submit(*group_rows("a", 3))
        assert not bench.state.complete
        bench.submit(row("a", 3))
        assert list(bench.state.complete) == [GroupKey(0, "a")]
        bench.submit(row("b"), *group_rows("c", 2))
        bench.make_batches()
        assert [samples_of(bench, 0, uid) for uid in "ab"] == [[0, 1, 2, 3], [0]]
        assert bench.state.open.keys() == bench.state.complete.keys() == {GroupKey(0, "c")}

    def test_a_size_is_kept_over_a_restart(self) -> None:
        bench = Bench(max_samples_per_prompt=4)
        bench.run.begin_groups(0, ["a"], [3])
        assert bench.replayed() == bench.state
        assert bench.replayed().open[GroupKey(0, "a")].samples == 3

    def test_asking_again_takes_the_same_size_or_none(self) -> None:
        bench = Bench(max_samples_per_prompt=4)
        for sizes in ([3], [3], [0], []):
            assert bench.run.begin_groups(0, ["a"], sizes).admissions[0].name == "ADMITTED"
        with pytest.raises(
            InvalidArgumentError, match=r"uid 'a': n_samples 2 differs from 3, with which the group was begun; send"
        ):
            bench.run.begin_groups(0, ["new", "a"], [2, 2])
        with pytest.raises(
            InvalidArgumentError, match=r"uid 'b': n_samples 2 differs from 3, with which the group was begun"
        ):
            bench.run.begin_groups(0, ["b", "b"], [3, 2])
        assert list(bench.state.open) == [GroupKey(0, "a")], "what is refused begins nothing"

    @pytest.mark.parametrize(
        ("settings", "size", "message"),
        [
            (
                {},
                3,
                r"uid 'a': n_samples 3 is outside of 1..2 \(n_samples_per_prompt: 2\); .* raise max_samples_per_prompt",
            ),
            ({"max_samples_per_prompt": 4}, 5, r"n_samples 5 is outside of 1..4 \(max_samples_per_prompt: 4\)"),
            ({}, -1, "n_samples -1 is outside of"),
        ],
    )
    def test_a_size_that_the_run_does_not_allow_is_refused(
        self, settings: dict[str, Any], size: int, message: str
    ) -> None:
        bench = Bench(**settings)
        with pytest.raises(InvalidArgumentError, match=message):
            bench.run.begin_groups(0, ["a"], [size])
        assert not bench.state.open

    def test_sizes_are_one_a_group(self) -> None:
        with pytest.raises(InvalidArgumentError, match="n_samples has 1 entries for 2 uids; send one each, or none"):
            Bench().run.begin_groups(0, ["a", "b"], [2])

    def test_a_row_beyond_the_groups_own_size_is_refused_saying_what_allows_it(self) -> None:
        bench = Bench(max_samples_per_prompt=4)
        bench.run.begin_groups(0, ["a"], [3])
        with pytest.raises(InvalidArgumentError, match=r"sample 3 is outside of 0..2 \(the group's n_samples: 3\)"):
            bench.submit(row("a", 3))
        with pytest.raises(
            InvalidArgumentError, match=r"outside of 0\.\.1 \(n_samples_per_prompt: 2, the run's default"
        ):
            bench.submit(row("b", 2))
        with pytest.raises(
            InvalidArgumentError, match=r"uid 'a' sample 3: sample 3 is outside of 0..2 \(the group's n_samples: 3"
        ):
            bench.run.abort_trajectories([key("a", 3)], "")

    def test_a_group_of_which_all_its_own_samples_are_aborted_is_dropped(self) -> None:
        bench = Bench(max_samples_per_prompt=4)
        bench.run.begin_groups(0, ["a"], [3])
        bench.run.abort_trajectories([key("a", sample) for sample in range(2)], "tired")
        assert bench.state.open
        bench.run.abort_trajectories([key("a", 2)], "tired")
        assert bench.run.status().groups_dropped == {"tired": 1}


class TestSurplus:
    def test_the_samples_that_are_complete_first_make_the_group_and_the_others_are_dropped(self) -> None:
        bench = Bench(surplus=2, train_batch_size=1)
        bench.submit(row("a", 0, last=False), row("a", 3))
        assert not bench.sealed
        bench.submit(row("a", 2))
        assert bench.sealed == [0]
        bench.make_batches()
        assert samples_of(bench, 0, "a") == [2, 3]
        assert len(bench.rows) == 2, "the rows of the surplus are gone"
        dropped = scraped([bench.run]).of("gristmill_rows_dropped_total")
        assert {reason: rows for reason, rows in dropped.items() if rows} == {"surplus": 1}

    def test_later_rows_of_the_surplus_are_answered_dropped(self) -> None:
        bench = Bench(surplus=1)
        bench.submit(row("a", 2, last=False), *group_rows("a"))
        assert list(bench.state.complete) == [GroupKey(0, "a")]
        assert bench.submit(row("a", 2, step=1)) == ["DROPPED"]
        assert bench.state.open[GroupKey(0, "a")].aborted == {2: "surplus"}

    def test_of_samples_that_complete_together_the_first_rows_count(self) -> None:
        bench = Bench(surplus=2, train_batch_size=1)
        assert bench.submit(*(row("a", sample) for sample in (3, 1, 0, 2))) == ["ACCEPTED"] * 4
        bench.make_batches()
        assert samples_of(bench, 0, "a") == [1, 3]

    def test_a_late_reward_completes_a_sample(self) -> None:
        bench = Bench(surplus=1, train_batch_size=1)
        bench.submit(*(row("a", sample, reward=None) for sample in range(3)))
        bench.run.set_rewards([RewardUpdate(key("a", sample), None, 1.0) for sample in (2, 0, 1)])
        bench.make_batches()
        assert samples_of(bench, 0, "a") == [0, 2]

    def test_samples_that_are_given_up_count_towards_the_surplus(self) -> None:
        bench = Bench(surplus=1, train_batch_size=1)
        bench.run.begin_groups(0, ["a"])
        bench.run.abort_trajectories([key("a", 0)], "")
        bench.submit(row("a", 1))
        assert not bench.sealed
        bench.submit(row("a", 2))
        bench.make_batches()
        assert samples_of(bench, 0, "a") == [1, 2]

    def test_it_goes_with_sizes_of_their_own(self) -> None:
        bench = Bench(surplus=1, max_samples_per_prompt=3, train_batch_size=1)
        bench.run.begin_groups(0, ["a"], [3])
        bench.submit(*(row("a", sample) for sample in (3, 1)))
        with pytest.raises(
            InvalidArgumentError, match=r"is outside of 0..3 \(the group's n_samples: 3 with surplus: 1\)"
        ):
            bench.submit(row("a", 4))
        bench.submit(row("a", 2))
        bench.make_batches()
        assert samples_of(bench, 0, "a") == [1, 2, 3]

    def test_a_group_that_was_begun_smaller_is_whole_and_one_that_lacks_samples_is_not(self) -> None:
        bench = Bench(build_batch=build_batch, store=MemoryShardStore(), train_batch_size=3, max_samples_per_prompt=4)
        bench.run.begin_groups(0, ["a", "b", "c"], [1, 4, 0])
        bench.submit(row("a"), *(row("b", sample) for sample in range(3)), *group_rows("c"))
        bench.run.abort_trajectories([key("b", 3)], "")
        bench.make_batches()
        assert json.loads(bench.run.batch(0).plan)["counts"]["incomplete_groups"] == 1

    @settings(max_examples=100, deadline=None)
    @given(st.integers(1, 3), st.integers(0, 3), st.data())
    def test_every_group_is_made_of_the_first_complete_samples(self, n: int, surplus: int, data: st.DataObject) -> None:
        bench = Bench(n_samples_per_prompt=n, surplus=surplus, train_batch_size=1)
        order = data.draw(st.permutations(range(n + surplus)))
        at = 0
        while at < len(order):
            size = data.draw(st.integers(1, len(order) - at))
            bench.submit(*(row("a", sample) for sample in order[at : at + size]))
            at += size
        bench.make_batches()
        assert samples_of(bench, 0, "a") == sorted(order[:n])
        assert bench.state.row_bytes == (13 + ROW_OVERHEAD_BYTES) * n
