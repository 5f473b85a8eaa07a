"""A row whose columns would fail its whole batch is refused when it comes."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.pipeline.rows.validate import receive
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


@pytest.mark.parametrize("bad", [-0.5, 1.5])
def test_a_lambda_outside_of_0_to_1_is_refused_by_a_service_and_offline(bad: float) -> None:
    trust = {"name": "trust", "dtype": "float32", "scope": "row"}
    settings: dict[str, Any] = {"advantage_estimator": "gae", "lambda": {"column": "trust"}}
    bench = Bench(columns=[COLUMNS[0], trust], **settings)
    rows = [row | {"values": [0.5] * len(row["response_ids"]), "trust": bad} for row in group_rows("a")]
    table = from_rows(rows, columns=bench.run.config.columns)
    message = f"uid 'a' sample 0 step 0: trust is {bad}, and lambda reads it; send a number from 0 to 1"
    with pytest.raises(InvalidArgumentError, match=message):
        bench.run.checked(Sent(table, None))
    with pytest.raises(InvalidArgumentError, match=message):
        receive(table, bench.run.config)
