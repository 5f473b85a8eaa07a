"""A call's URL or headers name its trajectory, whatever its names are made of."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import InvalidArgumentError
from gristmill_recorder.names import TrajectoryName, split

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
NUMBERS = st.integers(0, 2**31 - 1)


@given(NAMES, NAMES, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS)
def test_what_is_written_into_a_path_is_read_from_it(
    run: str, uid: str, sample: int, round_: int | None, attempt: int | None
) -> None:
    path = f"/runs/{quote(run, safe='')}/uid/{quote(uid, safe='')}/sample/{sample}"
    path += "" if round_ is None else f"/round/{round_}"
    path += "" if attempt is None else f"/attempt/{attempt}"
    wanted = TrajectoryName(run, uid, sample, round_ or 0, attempt or 0)
    assert split(f"{path}/v1/chat/completions", {}) == (wanted, "v1/chat/completions")


def test_a_path_wins_over_headers_and_may_name_nothing() -> None:
    headers = {"x-gristmill-run": "r", "x-gristmill-uid": "u", "x-gristmill-sample": "1", "x-gristmill-attempt": "2"}
    assert split("/v1/models", headers) == (TrajectoryName("r", "u", 1, 0, 2), "v1/models")
    assert split("/runs/a/uid/b/sample/0/finish", headers) == (TrajectoryName("a", "b", 0, 0, 0), "finish")
    assert split("/v1/models", {}) == (None, "v1/models")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/runs/a/sample/0/v1", "names no uid"),
        ("/uid/a/sample/0/v1", "names no run"),
        ("/runs/a/uid/b/sample/-1/v1", "sample is '-1'; use a number from 0 to 2147483647"),
        ("/runs/a/uid/b/sample/0/round/x/v1", "round is 'x'"),
        ("/runs/a/uid/b/sample/2147483648/v1", "sample is '2147483648'"),
    ],
)
def test_what_is_wrong_is_named(path: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        split(path, {})
