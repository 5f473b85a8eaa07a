"""A row whose columns would fail its whole batch is refused when it comes."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from tests.run.harness import Bench, group_rows

COLUMNS = [
    {"name": name, "dtype": "float64", "scope": "response"} for name in ("values", "old_logprobs", "ref_logprobs")
]
GOOD = {"values": 0.5, "old_logprobs": -1.0, "ref_logprobs": -1.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": 1e300}, r"values\[0\] is 1e\+300, which is too large to be added up in float32"),
        (
            {"old_logprobs": -1e9},
            r"the KL of response token 0 is inf, computed from the log-probabilities -1000000000.0 and -1.5",
        ),
        ({"ref_logprobs": -1e39}, r"ref_logprobs\[0\] is -1e\+39"),
    ],
)
def test_what_float32_cannot_hold_is_refused(change: dict[str, float], message: str) -> None:
    kl = {"coef": 0.1, "estimator": "k3"}
    bench = Bench(columns=COLUMNS, advantage_estimator="gae", kl_in_reward=kl)

    def table(values: dict[str, float]) -> Any:
        rows = [
            row | {name: [one] * len(row["response_ids"]) for name, one in values.items()} for row in group_rows("a")
        ]
        return from_rows(rows, columns=bench.run.config.columns)

    with pytest.raises(InvalidArgumentError, match=f"uid 'a' sample 0 step 0: {message}"):
        bench.run.checked(Sent(table(GOOD | change), None))
    bench.run.submit(bench.run.checked(Sent(table(GOOD), None)))
