"""Columns that trainers write back: forward shards, and a batch that is completed of what is written for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.numpy import load

from gristmill._wire.column_spec import ColumnSpec
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline.credit.kl import credit_columns, reward_columns
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from tests.pipeline.written import batches, built, column, computed, files, of_rollouts
from tests.strategies import LAW, Row

FIRST = ShardAddress("policy", 0, 0)


@LAW
@given(batches())
def test_columns_written_back_give_the_shards_that_the_same_columns_sent_with_rows_give(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = drawn
    sent = built(rows, of_rollouts(config))
    completed = built(rows, config, computed(sent))
    assert files(completed) == files(sent)
    assert completed.plan == sent.plan
    assert not completed.awaits


@LAW
@given(batches())
def test_they_do_so_where_rows_share_tokens(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn[0], drawn[1] | {"layout": "prefix_tree"}
    sent = built(rows, of_rollouts(config))
    completed = built(rows, config, computed(sent))
    assert files(completed) == files(sent)
    assert completed.plan == sent.plan


@LAW
@given(batches(), st.integers(1, 4))
def test_what_was_written_for_other_ranks_gives_the_same_shards(
    drawn: tuple[list[Row], dict[str, Any]], ranks: int
) -> None:
    rows, config = drawn
    sent = built(rows, of_rollouts(config))
    try:
        written = computed(built(rows, of_rollouts(config | {"dp_size": ranks})))
    except MisalignedError:
        assume(False)
    completed = built(rows, config, written, ranks)
    assert files(completed) == files(sent)
    assert completed.plan == sent.plan


@LAW
@given(batches(), st.data())
def test_another_cut_of_the_same_values_gives_each_token_the_same_value(
    drawn: tuple[list[Row], dict[str, Any]], data: st.DataObject
) -> None:
    rows, config = drawn
    other = config | {
        "dp_size": data.draw(st.integers(1, 4)),
        "layout": data.draw(st.sampled_from(["packed", "left_padded"])),
        "pad_rows_to_multiple_of": 1,
    }
    completed = built(rows, other, computed(built(rows, of_rollouts(other))))
    assert _per_token(files(completed)) == _per_token(files(built(rows, of_rollouts(config))))


def _per_token(shards: dict[ShardAddress, bytes]) -> dict[Any, list[float]]:
    """Of each row of the policy what was written for its response tokens, and its number."""
    columns: dict[Any, list[float]] = {}
    for address, data in shards.items():
        tensors = load(data)
        if address.model != "policy":
            continue
        for name in ("values", "ref_logprobs", "old_logprobs"):
            blocks = sorted(tensor for tensor in tensors if tensor.rpartition("/")[2] == name)
            values = [tensors[block][tensors[block.replace(name, "response_mask")] == 1] for block in blocks]
            flat = np.concatenate(values).tolist()
            # Rows are concatenated, whatever the layout; the metadata does not have their lengths.
            columns.setdefault(name, []).extend(flat)
        for row, verdict in zip(tensors["row"].tolist(), tensors["verdict"].tolist(), strict=True):
            if row >= 0:
                columns["verdict", row] = [verdict]
    return {key: sorted(values) for key, values in columns.items()}


@LAW
@given(batches())
def test_forward_shards_are_the_train_shards_without_what_depends_on_the_columns_that_lack(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = drawn
    checked = parse_config(config)
    lacking = {spec.name for spec in checked.written_columns}
    absent = set(lacking)
    if lacking & credit_columns(checked):
        absent |= {"advantages", "returns"}
        absent |= {"rewards"} if reward_columns(checked) else set()
    forward, train = built(rows, config), built(rows, of_rollouts(config))
    assert forward.awaits == lacking
    assert set(forward.forms) == {address for address in files(forward) if address.model == "policy"}
    for address, data in files(train).items():
        left = {name: value for name, value in load(data).items() if name.rpartition("/")[2] not in absent}
        tensors = load(files(forward)[address])
        assert tensors.keys() == left.keys()
        for name, value in left.items():
            np.testing.assert_array_equal(tensors[name], value)


@LAW
@given(batches())
def test_what_is_written_is_judged_by_the_tokens_that_the_shard_trains_and_what_rollouts_gave_of_them(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = drawn
    config |= {"kl_in_reward": {"coef": 0.5, "estimator": "k3"}}
    forward = built(rows, config)
    sent = {column.name for column in parse_config(config).columns if column.source == "rollout"}
    for address, form in forward.forms.items():
        tensors = load(files(forward)[address])
        trained = form.own_values(ColumnSpec("loss_mask", "uint8", "response"), tensors, "shard") == 1
        assert form.rows.trained.tolist() == trained.tolist()
        assert form.rows.given.keys() == {"old_logprobs", "ref_logprobs"} & sent
        for name, values in form.rows.given.items():
            judged = form.own_values(ColumnSpec(name, "float32", "response"), tensors, "shard")
            assert values[trained].tolist() == judged[trained].tolist()


ROWS: list[Row] = [
    {
        "uid": f"p{prompt}",
        "sample": sample,
        "prompt_token_ids": [1] * (1 + sample),
        "response_ids": [2] * (1 + 2 * sample),
        "loss_mask": [1] * (1 + 2 * sample),
        "reward": float(sample),
    }
    for prompt in range(2)
    for sample in range(2)
]
CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
    "advantage_estimator": "gae",
    "columns": [column("values")],
}
SPEC = ColumnSpec.of(column("values"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((4, 2), np.float32), r"values is F32 \[4, 2\], but the shard needs F32 \[4, 3\]"),
        (np.zeros((4, 3), np.float64), r"values is F64 \[4, 3\], but the shard needs F32 \[4, 3\]"),
        (np.full((4, 3), np.nan, np.float32), r"uid 'p0' sample 0 step 0: values\[0\] is not finite"),
        (None, "values is missing"),
    ],
)
def test_what_is_not_in_the_shards_shape_is_refused(values: Any, message: str) -> None:
    form = built(ROWS, CONFIG).forms[FIRST]
    tensors = {} if values is None else {"values": values}
    with pytest.raises(InvalidArgumentError, match=message):
        form.rows.check(SPEC, form.own_values(SPEC, tensors, "shard"), parse_config(CONFIG), lambda name: None, "shard")


def test_what_is_not_finite_on_padding_does_not_matter() -> None:
    form = built(ROWS, CONFIG).forms[FIRST]
    values = np.full((4, 3), np.nan, np.float32)
    values[0, 2], values[1], values[2, 2], values[3] = 1, [2, 3, 4], 5, [6, 7, 8]
    assert form.own_values(SPEC, {"values": values}, "shard").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": [column("values", scope="token")]}, "one value per row or response token"),
        ({"columns": [column("values", merge="equal")]}, "omit merge"),
        ({"columns": [column("values"), column("score", scope="row", merge="sum")]}, "omit merge"),
        ({"columns": [column("values"), column("score", required=False)]}, "omit required"),
        ({"on_misaligned": "drop_trailing", "whiten": "batch"}, "not written for dropped groups"),
        (
            {"on_misaligned": "drop_trailing", "whiten": "trajectories", "advantage_estimator": "grpo"},
            "not written for dropped groups, whose advantages whiten: trajectories needs; use whiten: mini_batch",
        ),
        (
            {
                "on_misaligned": "drop_trailing",
                "advantage_estimator": "grpo",
                "grpo_std_over": "batch",
                "kl_in_reward": {"coef": 0.1, "column": "kl"},
                "columns": [column("kl", scope="row")],
            },
            "not written for dropped groups, whose scores grpo_std_over: batch needs; use grpo_std_over: group",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_configuration(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_config(CONFIG | settings)
