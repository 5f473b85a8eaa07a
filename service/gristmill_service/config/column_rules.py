"""Rules about declared columns, decided when a run is created: which ones its settings need, and which they refuse."""

from __future__ import annotations

from gristmill._wire.column_spec import ColumnScope
from gristmill.errors import InvalidArgumentError
from gristmill_service.config.run_config import RunConfig
from gristmill_service.estimators import TokenEstimator


def check_kl(config: RunConfig) -> None:
    kl = config.kl_in_reward
    for name in config.estimator.columns:
        _check_declared(
            config, name, "response", f"advantage_estimator: {config.advantage_estimator} is computed of it"
        )
    if kl is None:
        return
    if (kl.estimator is None) == (kl.column is None):
        raise InvalidArgumentError("kl_in_reward: give exactly one of estimator (k1, k2 or k3) and column")
    if config.estimator.takes_advantages:
        raise InvalidArgumentError(
            "kl_in_reward changes the rewards that advantages are computed of, and with advantage_estimator: none you "
            "send them; leave kl_in_reward out, or use another estimator"
        )
    if kl.column is not None:
        if isinstance(config.estimator, TokenEstimator):
            raise InvalidArgumentError(
                f"kl_in_reward: column holds a sum a row, and advantage_estimator: {config.advantage_estimator} needs "
                "the KL of each token, whatever rows the steps became; give estimator: k1, k2 or k3"
            )
        _check_declared(config, kl.column, "row", "kl_in_reward takes a row's KL from it")
        _check_summed(config, kl.column)
        return
    needed = ["ref_logprobs"] if config.kl_from == "rollout_logprobs" else ["ref_logprobs", config.kl_from]
    for name in needed:
        _check_declared(config, name, "response", f"kl_in_reward: {kl.estimator} is computed of it")


def check_written(config: RunConfig) -> None:
    """Groups that alignment drops have no shard that could be written for."""
    if config.on_misaligned == "drop_trailing" and config.whiten == "batch" and config.written_columns:
        raise InvalidArgumentError(
            f"columns: {config.written_columns[0].name} has source: trainer, and with on_misaligned: drop_trailing it "
            "is not written for groups that are dropped, over whose tokens whiten: batch goes too; use whiten: "
            "mini_batch, or on_misaligned: pad"
        )


def check_tree(config: RunConfig) -> None:
    """Refuses columns by which rows that begin with the same tokens may still differ in what a model makes of these."""
    if config.layout != "prefix_tree":
        return
    for column in config.columns:
        if column.scope == "items" or column.merge == "equal":
            what = "scope: items" if column.scope == "items" else "merge: equal"
            raise InvalidArgumentError(
                f"columns: {column.name} has {what}, and with layout: prefix_tree rows share tokens by these alone, "
                "whatever else belongs to them; use layout: packed, or leave the column out"
            )


def _check_summed(config: RunConfig, name: str) -> None:
    """Refuses sums of steps of which a row that several became would have one alone."""
    (column,) = (column for column in config.columns if column.name == name)
    if config.merging.joins and column.source == "rollout" and column.merge != "sum":
        raise InvalidArgumentError(
            f"columns: {name} has merge: {column.merge}, so with merge: {config.merge} a row would have the KL of "
            "one of its steps; set merge: sum for it"
        )


def _check_declared(config: RunConfig, name: str, scope: ColumnScope, why: str) -> None:
    """Refuses a setting that needs a column which the run does not declare, or declares otherwise."""
    declared = [column for column in config.columns if column.name == name]
    if not declared:
        raise InvalidArgumentError(
            f"columns: {name} is missing, and {why}; declare it with scope: {scope} and dtype: float32"
        )
    (column,) = declared
    if column.scope != scope or column.dtype not in ("float32", "float64") or column.shape or not column.required:
        raise InvalidArgumentError(
            f"columns: {name} has scope: {column.scope}, dtype: {column.dtype}, shape: {list(column.shape)}, required: "
            f"{str(column.required).lower()}, and {why}; make it scope: {scope}, dtype: float32 or float64, one number "
            "each, and required"
        )
