"""Columns that a trainer writes for a shard: what is taken, and what is refused with nothing kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.codec import snapshot_of
from gristmill_service.run.written_columns import SentColumns
from tests.pipeline.written import column
from tests.run.forwarded import (
    forwarded,
    shard,
    values_for,
    write,
    write_all,
)


class TestWrites:
    @pytest.mark.parametrize("is_complete", [False, True])
    def test_the_same_bytes_again_change_nothing_and_others_are_refused(self, is_complete: bool) -> None:
        bench = forwarded()
        sent = values_for(shard(bench.run, 0, 0))
        bench.run.write(0, 0, 0, 1, sent)
        if is_complete:
            write_all(bench.run)
            bench.make_batches()
        state, records = [*snapshot_of(bench.state)], len(bench.log.records)
        bench.run.write(0, 0, 0, 1, sent)
        assert ([*snapshot_of(bench.state)], len(bench.log.records)) == (state, records)
        with pytest.raises(
            AlreadyExistsError, match="batch 0 mini-batch 0 rank 0: ref_logprobs was already written with other values"
        ):
            bench.run.write(0, 0, 0, 1, {**sent, "ref_logprobs": sent["ref_logprobs"] + 1})
        assert [*snapshot_of(bench.state)] == state

    def test_a_write_that_has_a_part_already_adds_the_rest(self) -> None:
        bench = forwarded()
        sent = values_for(shard(bench.run, 0, 0))
        bench.run.write(0, 0, 0, 1, {"values": sent["values"]})
        assert bench.run.write(0, 0, 0, 1, sent) == 6

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tensors": {}}, "the request contains no tensor"),
            (
                {"tensors": {"advantages": np.zeros((1, 4), np.float32)}},
                "'advantages' is not in a column that trainers",
            ),
            ({"tensors": {"micro_batch_000/values": np.zeros((1, 4), np.float32)}}, "is not a tensor of this shard"),
            (
                {"tensors": {"values": np.zeros((2, 4), np.float32)}},
                r"values is F32 \[2, 4\], but the shard needs F32 \[1, 4\]",
            ),
            (
                {"tensors": {"values": np.array([[0, 1, 2, np.inf]], np.float32)}},
                r"uid 'a' sample 0 step 1: values\[3\] is not finite",
            ),
            ({"mini_batch": 2}, "mini-batch 2 does not exist"),
            ({"rank": 2}, "rank 2 does not exist with dp_size 2"),
            ({"incarnation": 0}, "incarnation is 0"),
        ],
    )
    def test_what_is_not_as_the_shard_is_is_refused_and_nothing_of_it_kept(
        self, change: dict[str, Any], message: str
    ) -> None:
        bench = forwarded()
        call = {"mini_batch": 0, "rank": 0, "incarnation": 1, "tensors": values_for(shard(bench.run, 0, 0))}
        state = [*snapshot_of(bench.state)]
        with pytest.raises(InvalidArgumentError, match=message):
            bench.run.write(0, **{**call, **change})
        assert [*snapshot_of(bench.state)] == state

    def test_a_batch_that_waits_for_nothing_takes_none(self) -> None:
        bench = forwarded()
        write_all(bench.run)
        bench.make_batches()
        bench.state.batches[0].written.popitem()
        with pytest.raises(FailedPreconditionError, match="has all columns that trainers write"):
            write(bench.run, 1, 1)

    def test_before_the_shards_are_there_the_caller_is_asked_to_come_again(self) -> None:
        bench = forwarded()
        sent = values_for(shard(bench.run, 0, 0))
        with pytest.raises(UnavailableError, match="batch 1 has no forward shards yet"):
            bench.run.write(1, 0, 0, 1, sent)
        bench.store.free("run", 0)
        bench.run.batch(0)
        bench.run.shard("policy", 0, Position(0), 0, is_forward=True)
        with pytest.raises(UnavailableError, match="batch 0: its forward shards are being republished"):
            bench.run.write(0, 0, 0, 1, sent)

    def test_a_log_that_is_full_refuses_the_write_whole(self) -> None:
        bench = forwarded()
        bench.log.refuses = 1
        with pytest.raises(UnavailableError, match="the book is full"):
            write(bench.run, 0, 0)
        bench.reopen()
        bench.make_batches()
        assert len(bench.run.batch(0).awaits) == 8
        write(bench.run, 0, 0)
        assert len(bench.run.batch(0).awaits) == 6

    @pytest.mark.parametrize("kl_from", ["old_logprobs", "rollout_logprobs"])
    @pytest.mark.parametrize("last", ["old_logprobs", "ref_logprobs", "both"])
    def test_log_probabilities_whose_kl_overflows_are_refused_with_their_row(self, kl_from: str, last: str) -> None:
        bench = forwarded(
            kl_in_reward={"coef": 0.5, "estimator": "k3"},
            kl_from=kl_from,
            columns=[column("ref_logprobs"), column("old_logprobs")],
            advantage_estimator="reinforce++",
        )
        # The third token is an observation, of which anything may be written.
        sent = {"old_logprobs": [-1, -2, 0, -1], "ref_logprobs": [-1, 800, 900, 0]}
        tensors = {name: np.array([values], np.float32) for name, values in sent.items()}
        if kl_from == "rollout_logprobs":
            bench.run.write(0, 0, 0, 1, {"old_logprobs": tensors.pop("old_logprobs")})
        elif last != "both":
            first = next(name for name in tensors if name != last)
            bench.run.write(0, 0, 0, 1, {first: tensors.pop(first)})
        held = [*snapshot_of(bench.state)]
        message = r"uid 'a' sample 0 step 1: \w+\[1\] is .*, and the KL is inf, .* log-probabilities -2.0 and 800.0"
        with pytest.raises(InvalidArgumentError, match=message):
            bench.run.write(0, 0, 0, 1, tensors)
        assert [*snapshot_of(bench.state)] == held
        if "ref_logprobs" in tensors:
            tensors["ref_logprobs"][0, 1] = 0
            bench.run.write(0, 0, 0, 1, tensors)

    @pytest.mark.parametrize("theirs", [800.0, -2.5])
    def test_of_two_that_write_halves_of_a_pair_at_once_the_second_is_judged_with_the_first(
        self, monkeypatch: pytest.MonkeyPatch, theirs: float
    ) -> None:
        bench = forwarded(
            kl_in_reward={"coef": 0.5, "estimator": "k3"},
            kl_from="old_logprobs",
            columns=[column("ref_logprobs"), column("old_logprobs")],
            advantage_estimator="reinforce++",
        )
        values = SentColumns.values

        def while_another_writes(*given: Any) -> Any:
            monkeypatch.setattr(SentColumns, "values", values)
            checked = values(*given)
            bench.run.write(0, 0, 0, 1, {"ref_logprobs": np.array([[-1, theirs, 0, -1]], np.float32)})
            return checked

        monkeypatch.setattr(SentColumns, "values", while_another_writes)
        half = {"old_logprobs": np.array([[-1, -2, 0, -1]], np.float32)}
        if theirs < 0:
            assert bench.run.write(0, 0, 0, 1, half) == 6
        else:
            message = (
                r"old_logprobs\[1\] is -2.0, and the KL is inf, .* log-probabilities -2.0 and 800.0 \(ref_logprobs"
            )
            with pytest.raises(InvalidArgumentError, match=message):
                bench.run.write(0, 0, 0, 1, half)
            assert len(bench.run.batch(0).awaits) == 7

    def test_a_rows_sum_that_float32_cannot_hold_times_its_coefficient_is_refused(self) -> None:
        bench = forwarded(
            advantage_estimator="grpo",
            kl_in_reward={"coef": 10.0, "column": "kl"},
            columns=[column("kl", scope="row")],
        )
        with pytest.raises(
            InvalidArgumentError, match=r"uid 'a' sample 0 step 1: kl is 9.9.*e\+37, .* the coefficient 10"
        ):
            bench.run.write(0, 0, 0, 1, {"kl": np.array([1e38], np.float32)})

    def test_what_float32_cannot_hold_is_refused_before_it_fails_the_batch(self) -> None:
        bench = forwarded(columns=[column("values", dtype="float64"), column("ref_logprobs")])
        sent = {"values": np.full((1, 4), -1e300)}
        with pytest.raises(
            InvalidArgumentError, match=r"values\[0\] is -1e\+300, which is too large to be added up in float32"
        ):
            bench.run.write(0, 0, 0, 1, sent)
        assert len(bench.run.batch(0).awaits) == 8
