"""A table derives a run's settings from a trainer's configuration, and refuses everything that a run cannot follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gristmill import InvalidArgumentError
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.settings import (
    WORKERS_ONLY,
    Configured,
    Default,
    Derived,
    Fixed,
    Refuse,
    RefuseSetting,
    Same,
    SettingsTable,
    is_given,
    is_on,
    written_column,
)

ROWS = (
    Same("train_batch_size", "data.batch"),
    Same("gamma", "data.gamma", when=lambda c: c["estimator"] == "gae"),
    Derived("lambda", lambda c: 0.9 if c["estimator"] == "gae" else None),
    Fixed("layout", "packed", "the workers take rows without padding"),
    Default("merge", lambda c: "prefix"),
    Refuse("shuffle", is_on, "moves rows", "set it to False"),
    Refuse("estimator", lambda value, c: value == "opo", "is not computed", lambda c: f"use gae for {c.dp_size} ranks"),
    Refuse("newer.option", is_given, "is unknown", "leave it out"),
    RefuseSetting("whiten", lambda value, c: value == "mini_batch", "is not possible", "use batch"),
)


def configuration(**changes: Any) -> Any:
    return SimpleNamespace(**{"data": {"batch": 4, "gamma": 0.5}, "estimator": "gae", "shuffle": False} | changes)


def derive(own: dict[str, Any] | None = None, *, rollouts: Any = None, table: Any = None, **changes: Any) -> Any:
    gristmill = Gristmill("here:1", "my-run", settings=own or {}, rollouts=rollouts)
    table = table or SettingsTable("Example", ROWS, rollouts=("trainer", "workers"))
    return table.settings(Configured(configuration(**changes), gristmill, dp_size=2, pad_token_id=7))


def test_settings_are_read_from_mappings_and_attributes() -> None:
    assert derive() == {
        "train_batch_size": 4,
        "gamma": 0.5,
        "lambda": 0.9,
        "layout": "packed",
        "merge": "prefix",
        "dp_size": 2,
        "pad_token_id": 7,
    }


def test_settings_that_do_not_apply_are_left_out() -> None:
    assert derive(estimator="grpo").keys().isdisjoint({"gamma", "lambda"})


def test_the_options_settings_replace_defaults_and_add_to_the_run() -> None:
    settings = derive({"merge": "tree", "balance": "tokens"})
    assert (settings["merge"], settings["balance"]) == ("tree", "tokens")


def test_columns_of_the_options_come_after_those_of_the_adapter() -> None:
    table = SettingsTable("Example", ROWS, rollouts=("trainer",), columns=lambda c: [written_column("values")])
    column = {"name": "teacher", "dtype": "float32", "scope": "response"}
    assert derive({"columns": [column]}, table=table)["columns"] == [written_column("values"), column]


def test_everything_that_a_run_cannot_follow_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        derive({"train_batch_size": 8, "layout": "left_padded", "whiten": "mini_batch"}, shuffle=True, estimator="opo")
    assert sorted(str(refused.value).split("\n- ")) == [
        "estimator: 'opo' is not computed; use gae for 2 ranks",
        "run 'my-run': ",
        "settings: layout is fixed at 'packed', because the workers take rows without padding; omit it",
        "settings: train_batch_size follows from Example's configuration, where it is 4; omit it, or change it there",
        "settings: whiten: 'mini_batch' is not possible; use batch",
        "shuffle: True moves rows; set it to False",
    ]


def test_a_setting_that_the_trainer_s_version_does_not_have_is_not_refused() -> None:
    derive()
    with pytest.raises(InvalidArgumentError, match=r"newer.option: 1 is unknown"):
        derive(newer={"option": 1})


def test_a_setting_that_a_run_needs_is_missed_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"configuration has no data.batch; use a trainer version .* tested"):
        derive(data={"gamma": 1.0})


@pytest.mark.parametrize("setting", [*WORKERS_ONLY, "stale", "zero_variance_filter"])
def test_a_trainer_that_samples_itself_cannot_choose_among_groups(setting: str) -> None:
    value = {"stale": "drop", "zero_variance_filter": "replace"}.get(setting, 1)
    with pytest.raises(InvalidArgumentError, match=f"settings: {setting}: .* Example samples one batch at a time"):
        derive({setting: value})
    assert derive({setting: value}, rollouts="workers")[setting] == value


def test_values_that_keep_every_group_are_accepted() -> None:
    settings = derive({"stale": "count", "max_staleness": 2, "zero_variance_filter": "mask"})
    assert settings["stale"] == "count"


def test_rollouts_that_the_adapter_does_not_support_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="does not support 'trainer'; use 'workers'"):
        derive(rollouts="trainer", table=SettingsTable("Example", ROWS, rollouts=("workers",)))


def test_names_are_spelled_as_the_trainer_s_users_write_them() -> None:
    table = SettingsTable("Example", ROWS, rollouts=("trainer",), spell=lambda name: f"--{name}")
    with pytest.raises(InvalidArgumentError, match="--shuffle: True"):
        derive(table=table, shuffle=True)
