"""A row that would fail its whole batch by its length or its cost is refused when it comes."""

from __future__ import annotations

import pytest

from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from tests.run.harness import Bench, group_rows


def test_a_row_that_no_size_of_a_token_axis_holds_is_refused() -> None:
    bench = Bench(layout="packed", pad_packed_to=[8], pad_rows_to_multiple_of=4, micro_batch={"max_tokens": 8})
    fit, long = ([row | {"prompt_token_ids": [1] * count} for row in group_rows("a")] for count in (2, 8))
    with pytest.raises(InvalidArgumentError, match="padded to 12, and the largest size of pad_packed_to is 8; send"):
        bench.run.submit(bench.run.checked(Sent(from_rows(long), None)))
    bench.run.submit(bench.run.checked(Sent(from_rows(fit), None)))


def test_a_negative_cost_is_refused() -> None:
    column = {"name": "patches", "dtype": "int32", "scope": "row"}
    bench = Bench(columns=[column], flops={"column": "patches"}, balance="flops")
    table = from_rows([row | {"patches": -3} for row in group_rows("a")], columns=bench.run.config.columns)
    with pytest.raises(InvalidArgumentError, match="patches is -3, and flops adds it to the row's cost; send 0"):
        bench.run.checked(Sent(table, None))
