"""Each kind of bad input gets one clear error through either API, and leaves what was accepted before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.api.apis import CONFIG, Api, HttpApi, Json, Refused, group, row

HTTP_STATUSES = {"INVALID_ARGUMENT": 422, "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "FAILED_PRECONDITION": 412}


@contextmanager
def refusing(code: str, *parts: str) -> Iterator[None]:
    """The body is refused with this code and a message that has these parts."""
    with pytest.raises(Refused) as caught:
        yield
    refused = caught.value
    assert refused.code == code, refused
    assert refused.status in (0, HTTP_STATUSES[code])
    for part in parts:
        assert part in refused.message


WRONG_ROWS: dict[str, tuple[Json, tuple[str, ...]]] = {
    # Over gRPC the columns of all rows are one buffer each, and the sizes are theirs.
    "mask of the wrong length": ({"loss_mask": [1]}, ("loss_mask has",)),
    "rewards of the wrong length": ({"reward": [1.0]}, ("reward",)),
    "NaN reward": ({"reward": math.nan}, ("reward", "nan")),
    "negative token": ({"response_ids": [-3, 4]}, ("response_ids[0]", "-3")),
    "a stop reason that is no name": ({"stop_reason": "x" * 1001}, ("stop_reason 'xxx", "1001 characters", "1000")),
    "sample out of range": ({"sample": 2}, ("sample", "2", "n_samples_per_prompt")),
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_a_wrong_row_is_refused_by_name(api: Api, run: str, wrong: str) -> None:
    fields, parts = WRONG_ROWS[wrong]
    # A good row next to it, alike in form.
    alike: Json = {"rollout_logprobs": [0.0, 0.0]} if "rollout_logprobs" in fields else {}
    if isinstance(fields.get("reward"), list):
        alike["reward"] = [0.0, 0.0]
    if isinstance(api, HttpApi) or "of the wrong length" not in wrong:
        parts = ("uid 'a'", *parts)
    with refusing("INVALID_ARGUMENT", *parts):
        api.submit(run, [row("kept", 0, **alike), {**row("a", 0), **fields}])
    assert api.get(run)["rows_accepted"] == 0


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_a_wrong_row_is_refused_alone_where_that_is_asked_for(api: Api, run: str, wrong: str) -> None:
    fields, parts = WRONG_ROWS[wrong]
    rows = [
        row("kept", 0, 0, last=False),
        row("kept", 0, 1) | fields,
        row("kept", 1),
        row("kept", fields.get("sample", 0), 2),
    ]
    if isinstance(fields.get("reward"), list):
        rows = [{"reward": [0.0, 0.0]} | one if "reward" in one else one for one in rows]
    if not isinstance(api, HttpApi) and "of the wrong length" in wrong:
        # Such a message cannot be cut into rows.
        with refusing("INVALID_ARGUMENT", *parts):
            api.submit_by_row(run, rows)
        return
    for outcome in ("accepted", "duplicate"):
        outcomes, refused = api.submit_by_row(run, rows)
        assert outcomes == [outcome, "refused", outcome, "refused"], "what follows it would have a hole before it"
        assert {(error.code, error.kind, error.retry_after_s) for error in refused.values()} == {
            ("INVALID_ARGUMENT", "InvalidArgumentError", None)
        }
        assert [*refused] == [1, 3]
        for error in refused.values():
            assert all(part in error.message for part in (*parts, "uid 'kept'"))
    assert api.get(run)["rows_accepted"] == 2


def test_a_row_is_refused_alone_for_what_the_run_has(api: Api, run_name: str) -> None:
    api.create(run_name, CONFIG | {"max_buffered_batches": 1})
    api.submit(run_name, [row("a", 0)])
    rows = [row("a", 0, reward=7.0), row("b", 0), row("c", 0), row("c", 0, 1), row("a", 1, tag="x"), row("b", 1)]
    outcomes, refused = api.submit_by_row(run_name, rows)
    assert outcomes == ["refused", "accepted", "refused", "refused", "accepted", "accepted"]
    assert [(index, error.code) for index, error in refused.items()] == [
        (0, "ALREADY_EXISTS"),
        (2, "RESOURCE_EXHAUSTED"),
        (3, "RESOURCE_EXHAUSTED"),
    ]
    assert refused[0].retry_after_s is None
    assert refused[2].retry_after_s
    api.delete(run_name)
    with refusing("NOT_FOUND", run_name):
        api.submit_by_row(run_name, rows)


def test_what_was_accepted_before_stays(api: Api, run: str) -> None:
    api.submit(run, group("a"))
    with refusing("INVALID_ARGUMENT"):
        api.submit(run, [row("b", 0, response_ids=[-1, 1])])
    assert api.get(run)["rows_accepted"] == 4
    assert api.submit(run, group("a")) == ["duplicate"] * 4


@pytest.mark.parametrize("call", ["get", "submit", "batch", "shard", "read", "begin", "seal", "finish", "delete"])
def test_an_unknown_run_is_named(api: Api, call: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "submit": ([row("a", 0)],),
        "batch": (0,),
        "shard": (0,),
        "read": (0, 0, 0),
        "begin": (["a"],),
    }
    with refusing("NOT_FOUND", "nobody"):
        getattr(api, call)("nobody", *arguments.get(call, ()))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(api: Api, run: str, rank: int) -> None:
    with refusing("INVALID_ARGUMENT", "rank", str(rank), "dp_size"):
        api.shard(run, rank)


WRONG_CONFIGS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown key": ({**CONFIG, "batch_size": 4}, ("unknown setting batch_size", "expected one of")),
    "wrong type": ({**CONFIG, "dp_size": "two"}, ("dp_size", "'two'")),
    "half a surrogate pair": ({**CONFIG, "overlong_filter": ["\ud800"]}, ("overlong_filter.0", r"got '\ud800'")),
    "a name of half a surrogate pair": ({**CONFIG, "\ud800": 1}, (r"\ud800",)),
}


@pytest.mark.parametrize("wrong", WRONG_CONFIGS)
def test_a_wrong_configuration_is_refused_before_a_rollout_is_seen(api: Api, run_name: str, wrong: str) -> None:
    config, parts = WRONG_CONFIGS[wrong]
    with refusing("INVALID_ARGUMENT", *parts):
        api.create(run_name, config)
    assert run_name not in api.names()


def test_a_configuration_that_is_no_object_is_refused(api: Api, run_name: str) -> None:
    with refusing("INVALID_ARGUMENT", "config"):
        api.create(run_name, [1])


def test_another_configuration_under_the_same_name_is_refused(api: Api, run: str) -> None:
    with refusing("ALREADY_EXISTS", run):
        api.create(run, {**CONFIG, "dp_size": 4})


def test_a_wait_that_is_no_time_is_refused(api: Api, run: str) -> None:
    with refusing("INVALID_ARGUMENT", "wait_s -1"):
        api.batch(run, 0, wait_s=-1)


def test_a_group_without_room_is_refused_with_a_delay(api: Api, run_name: str) -> None:
    api.create(run_name, {**CONFIG, "max_buffered_batches": 1})
    uids = [f"uid-{number}" for number in range(6)]
    admitted = api.begin(run_name, uids).count("admitted")
    with pytest.raises(Refused) as caught:
        api.submit(run_name, group("late"))
    refused = caught.value
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert refused.status in (0, 429)
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 0
    # An admitted group can always finish.
    for uid in uids[:admitted]:
        assert set(api.submit(run_name, group(uid))) == {"accepted"}
