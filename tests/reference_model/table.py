"""The table of a batch, against its plan and its shards: the sums are the plan's metrics, the rows and ranks the
shards'."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.reference_model.comparing import Disagreement
from tests.reference_model.layout import ARRAYS

Columns = Mapping[str, Any]


def check_table(
    rows: Columns, plan: dict[str, Any], shards: Mapping[tuple[str, int, int], bytes], *, is_scaled: bool = True
) -> None:
    """rows: `BatchTable.by_row`, with lists or arrays. is_scaled: whether a loss reduction is in the shards'
    advantages."""
    table = [dict(zip(rows, values, strict=True)) for values in zip(*map(list, rows.values()), strict=True)]
    _same("rows", plan["rows"], len(table))
    _check_places(table, plan)
    _check_sums(table, plan["metrics"])
    for tag, metrics in plan["tag_metrics"].items():
        of_tag = [row for row in table if row["tag"] == tag]
        _check_sums(of_tag, metrics)
        kept = [row for row in of_tag if not row["dropped"]]
        _same(f"tag {tag!r}: padding", metrics["padding_tokens"], sum(row["padding_tokens"] for row in kept))
    for (model, mini_batch, rank), data in shards.items():
        _check_shard(f"shard {model} {mini_batch} {rank}", table, model, data)
    if not is_scaled:
        _check_advantages(table, [data for (model, _, _), data in shards.items() if model == "policy"])


def _check_places(table: list[dict[str, Any]], plan: dict[str, Any]) -> None:
    places: dict[tuple[str, int], tuple[int, int, int]] = {}
    for part in plan["mini_batches"]:
        loss_tokens = 0
        for rank in part["ranks"]:
            for number, positions in enumerate(rank["micro_batches"]):
                for row in (rank["rows"][position] for position in positions):
                    if row >= 0:
                        places[part["model"], row] = part["index"], rank["rank"], number
                        loss_tokens += table[row]["loss_tokens"]
        _same(f"{part['model']} {part['index']}: loss tokens", part["loss_tokens"], loss_tokens)
    models = {part["model"] for part in plan["mini_batches"]}
    for row in table:
        for model, prefix in (("policy", ""), ("critic", "critic_")):
            if model in models:
                got = tuple(row[prefix + name] for name in ("mini_batch", "rank", "micro_batch"))
                _same(f"row {row['row']} of {model}", places.get((model, row["row"]), (-1, -1, -1)), got)
        _same(f"row {row['row']}: dropped", ("policy", row["row"]) not in places, bool(row["dropped"]))


def _check_sums(table: list[dict[str, Any]], metrics: dict[str, Any]) -> None:
    trajectories = [*{row["trajectory"]: row for row in table}.values()]
    kept = [row for row in table if not row["dropped"]]
    _same("tokens", metrics["tokens"], sum(row["tokens"] for row in kept))
    for name, column in (
        ("score_mean", "score"),
        ("reward_mean", "reward"),
        ("response_length_mean", "response_tokens"),
    ):
        if name in metrics:
            mean = math.fsum(float(row[column]) for row in trajectories) / len(trajectories)
            if not math.isclose(metrics[name], mean, rel_tol=1e-9, abs_tol=1e-9):
                raise Disagreement(f"{name}: expected {metrics[name]}, got {mean}")
    if "staleness_max" in metrics:
        _same("staleness", metrics["staleness_max"], max(row["staleness"] for row in trajectories))


def _check_shard(where: str, table: list[dict[str, Any]], model: str, data: bytes) -> None:
    header, labels, tensor = _opened(data)
    prefix = "critic_" if model == "critic" else ""
    per_row = {name: tensor(name).tolist() for name in ("row", "sample", "step_first", "step_last", "policy_version")}
    for number, positions in enumerate(labels["micro_batches"]):
        block = f"micro_batch_{number:03d}/" if f"micro_batch_{number:03d}/sequences" in header else ""
        for place, position in enumerate(positions):
            index = per_row["row"][position]
            if index < 0:
                continue
            row = table[index]
            for name, values in per_row.items():
                _same(f"{where} row {index}: {name}", values[position], row[name])
            for name, label in (("uid", "uids"), ("round", "rounds"), ("tag", "tags"), ("agent", "agents")):
                if label in labels:
                    _same(f"{where} row {index}: {name}", labels[label][position], row[name])
            _same(f"{where} row {index}: micro-batch", number, row[f"{prefix}micro_batch"])
            mask = tensor(f"{block}loss_mask")
            if mask.ndim == 2:
                at = place if block else position
                _same(f"{where} row {index}: loss tokens", int(mask[at].sum()), row["loss_tokens"])
                _same(f"{where} row {index}: width", tensor(f"{block}sequences").shape[1], row[f"{prefix}width"])
            elif f"{block}cu_seqlens" in header:
                ends = tensor(f"{block}cu_seqlens")
                padded = tensor(f"{block}cu_seqlens_padded") if f"{block}cu_seqlens_padded" in header else ends
                span = slice(int(padded[place]), int(padded[place + 1]))
                _same(f"{where} row {index}: tokens", int(ends[place + 1] - ends[place]), row["tokens"])
                _same(f"{where} row {index}: width", span.stop - span.start, row[f"{prefix}width"])
                _same(f"{where} row {index}: loss tokens", int(mask[span].sum()), row["loss_tokens"])


def _check_advantages(table: list[dict[str, Any]], shards: list[bytes]) -> None:
    """A trajectory's advantage is the mean over its trained tokens. Those that share a position are left out."""
    tokens: dict[int, list[float]] = {}
    for data in shards:
        header, labels, tensor = _opened(data)
        rows = tensor("row").tolist()
        for number, positions in enumerate(labels["micro_batches"]):
            block = f"micro_batch_{number:03d}/" if f"micro_batch_{number:03d}/sequences" in header else ""
            if f"{block}advantages" not in header or f"{block}rows" in header:
                return
            mask, values = tensor(f"{block}loss_mask"), tensor(f"{block}advantages")
            for place, position in enumerate(positions):
                if rows[position] >= 0:
                    at: Any = place if block else position
                    if mask.ndim == 1:
                        if f"{block}cu_seqlens" not in header:
                            return
                        name = "cu_seqlens_padded" if f"{block}cu_seqlens_padded" in header else "cu_seqlens"
                        at = slice(*tensor(block + name)[place : place + 2].tolist())
                    of_row = values[at][mask[at] == 1].tolist()
                    tokens.setdefault(table[rows[position]]["trajectory"], []).extend(of_row)
    dropped = {row["trajectory"] for row in table if row["dropped"]}
    for row in table:
        of_row = tokens.get(row["trajectory"])
        if of_row and row["trajectory"] not in dropped:
            mean = math.fsum(of_row) / len(of_row)
            if not math.isclose(mean, row["advantage"], rel_tol=1e-5, abs_tol=1e-5):
                raise Disagreement(f"row {row['row']}: advantage: expected {mean}, got {row['advantage']}")


def _opened(data: bytes) -> tuple[dict[str, Any], dict[str, Any], Any]:
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    labels = {name: json.loads(text) for name, text in header.pop("__metadata__").items()}

    def tensor(name: str) -> Any:
        entry = header[name]
        first, last = entry["data_offsets"]
        return np.frombuffer(data[begin + first : begin + last], ARRAYS[entry["dtype"]]).reshape(entry["shape"])

    return header, labels, tensor


def _same(where: str, want: Any, got: Any) -> None:
    if want != got:
        raise Disagreement(f"{where}: expected {want}, got {got}")
