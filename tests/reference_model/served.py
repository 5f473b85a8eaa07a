"""The same through a service: rows over a client, plans and the shards of all ranks over HTTP."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import numpy as np

from gristmill import RolloutClient
from tests.reference_model.batch import Expected, expected
from tests.reference_model.comparing import Disagreement, compare
from tests.reference_model.credit import compared, score
from tests.reference_model.layout import ARRAYS, Tensors
from tests.reference_model.rows import DEFAULTS, Config, Group, Row, group_of, groups_of

_numbers = itertools.count()
# What rows and announced versions are at most behind.
NEWEST = 4
# What the service computes with, and trainers may write.
_CREDIT = {"values", "old_logprobs", "ref_logprobs", "kl_sum", "sum_pi_squared", "next_value"}


class ByService:
    """A check of `fuzz`, by runs of one service."""

    def __init__(self, grpc_address: str, http_url: str) -> None:
        self._grpc, self._http = grpc_address, httpx.Client(base_url=f"{http_url}/v1/runs", timeout=60)

        # Of the run before its next batch.
        self._baselines: dict[tuple[str, str], float] = {}

    def close(self) -> None:
        self._http.close()

    def __call__(self, rows: list[Row], config: Config) -> int:
        self._baselines.clear()
        if config.get("max_staleness") is not None and config.get("stale", "count") != "count":
            # Such a run refuses what it would train of an unknown version.
            rows = [row if "policy_versions" in row else {"policy_version": 0} | row for row in rows]
        run, config = f"fuzz-{next(_numbers)}", _served(rows, config)
        is_sent = {column["name"] for column in config["columns"] if column.get("source") != "trainer"}
        names = {column["name"] for column in config["columns"]}
        arrived = groups_of(rows)
        with RolloutClient(self._grpc, run) as client:
            client.create_run(config | {"columns": [_declared(column) for column in config["columns"]]})
            self._http.put(f"/{run}/policy-version", json={"version": NEWEST}).raise_for_status()
            for group in arrived:
                sent = [row for row in rows if group_of(row) == (group.round, group.uid)]
                _submit(client, group, [{k: v for k, v in row.items() if k not in names - is_sent} for row in sent])
            count = client.finish()
            batches = _sealed(arrived, config)
            if count != len(batches):
                raise Disagreement(f"expected {len(batches)} batches, got {count}")
            for number, groups in enumerate(batches):
                ordered = [row for group in groups for row in rows if group_of(row) == (group.round, group.uid)]
                self._compare(run, number, ordered, config, is_forward=names != is_sent)
            client.delete_run()
        return len(batches)

    def _compare(self, run: str, number: int, rows: list[Row], config: Config, is_forward: bool) -> None:
        plan = self._plan(run, number, "forward" if is_forward else "published")
        try:
            want = expected(rows, config, run=run, number=number, got=plan, announced=NEWEST, baselines=self._baselines)
        except AssertionError as error:
            raise Disagreement(f"placement: {error!r}") from error
        if is_forward:
            forward = _forward(want, config)
            compare(forward, {**plan, "counts": forward.plan["counts"]}, self._shards(run, number, forward))
            written = {column["name"] for column in config["columns"] if column.get("source") == "trainer"}
            place = {"rank": 0, "batch": number, "mini_batch": 0, "forward": True}
            incarnation = self._http.get(f"/{run}/shards", params=place).json()["incarnation"]
            for model, mini_batch, rank in forward.shards:
                columns = {
                    name: tensor
                    for name, tensor in want.shards[model, mini_batch, rank][0].items()
                    if name.rpartition("/")[2] in written
                }
                path = f"/{run}/batches/{number}/{model}/{mini_batch}/{rank}"
                answer = self._http.put(path, params={"incarnation": incarnation}, content=_file(columns))
                if answer.status_code != 200:
                    raise Disagreement(f"writing {sorted(columns)}: {answer.text}")
            plan = self._plan(run, number, "published")
        compare(want, plan, self._shards(run, number, want))

    def _plan(self, run: str, number: int, state: str) -> dict[str, Any]:
        answer = self._http.get(f"/{run}/batches/{number}", params={"wait_s": 20}).json()
        if answer.get("state") != state:
            raise Disagreement(f"batch {number}: expected {state}, got {json.dumps(answer)[:2000]}")
        return dict(answer["plan"])

    def _shards(self, run: str, number: int, want: Expected) -> dict[tuple[str, int, int], bytes]:
        return {
            key: self._http.get(f"/{run}/batches/{number}/{'/'.join(map(str, key))}").content for key in want.shards
        }


def _served(rows: list[Row], config: Config) -> Config:
    """The configuration without what only files can have; of every second one, trainers write what credit is computed
    from, and of every third, groups of equal scores are replaced."""
    kept = {name: value for name, value in config.items() if name not in ("on_misaligned", "tag_shares")}
    trainers = {"source": "trainer"} if len(rows) % 2 and config["advantage_estimator"] != "rae" else {}
    columns = [column | (trainers if column["name"] in _CREDIT else {}) for column in config.get("columns", [])]
    if len(rows) % 3 == 0 and config["advantage_estimator"] != "rae":
        kept["zero_variance_filter"] = "replace"
    # No trainer acknowledges until all groups have been sent.
    waits = {"seal_order": "completion", "max_buffered_batches": 8, "max_batches_ahead": 8}
    return DEFAULTS | kept | waits | {"columns": columns}


def _declared(column: Config) -> Config:
    """The column as a run has it: what trainers write is of merged rows, so that it is not merged."""
    is_written = column.get("source") == "trainer"
    return {name: value for name, value in column.items() if name != "merge" or not is_written}


def _submit(client: RolloutClient, group: Group, rows: list[Row]) -> None:
    """A group's rows, and of a second sample the rewards behind them; what it lacks is aborted."""
    client.begin_groups([group.uid], round=group.round)
    rows = sorted(rows, key=lambda row: (row["sample"], row.get("step", 0)))
    late = [row for row in rows if row["sample"] == 1]
    outcomes = client.submit([{k: v for k, v in row.items() if k != "reward" or row not in late} for row in rows])
    if any(str(outcome) != "ACCEPTED" and outcome.name != "ACCEPTED" for outcome in outcomes):
        raise Disagreement(f"outcomes: {outcomes}")
    for row in late:
        client.set_reward(row["uid"], row["sample"], row["reward"], round=row["round"], step=row.get("step"))
    n, samples = client.status().config["n_samples_per_prompt"], {row["sample"] for row in rows}
    for sample in set(range(n)) - samples:
        client.abort_trajectory(group.uid, sample, round=group.round)


def _sealed(groups: list[Group], config: Config) -> list[list[Group]]:
    """The batches that are sealed of these groups, which are complete in this order."""
    most = config["max_staleness"]
    if config["stale"] == "drop" and most is not None:
        groups = [
            group
            for group in groups
            if all(NEWEST - version <= most for one in group.trajectories for version in one.versions())
        ]
    if config["zero_variance_filter"] == "replace":
        groups = [group for group in groups if not _is_equal(group, config)]
    size = config["train_batch_size"]
    return [groups[begin : begin + size] for begin in range(0, len(groups), size)]


def _is_equal(group: Group, config: Config) -> bool:
    """Whether no trajectory's score differs from those that it is compared with."""
    scores = [score(one.steps, config) for one in group.trajectories]
    compares = [{scores[place] for place in members} for members in compared(group.trajectories, config)]
    return len(scores) > 1 and all(len(own) == 1 for own in compares)


def _forward(want: Expected, config: Config) -> Expected:
    """What there is before trainers have written: nothing that depends on their columns."""
    lacking = {column["name"] for column in config["columns"] if column.get("source") == "trainer"}
    kl, estimator = config["kl_in_reward"], config["advantage_estimator"]
    of_rewards = {config["kl_from"], "ref_logprobs"} if kl is not None and "estimator" in kl else set()
    of_rows = {kl["column"]} if kl is not None and "column" in kl else set()
    of_credit = of_rewards | of_rows | ({"values", "next_value"} if estimator == "gae" else set())
    of_credit |= {"old_logprobs", "sum_pi_squared"} if estimator == "otb" else set()
    gone = lacking | ({"rewards"} if lacking & of_rewards else set())
    gone |= {"advantages", "returns"} if lacking & of_credit else set()
    shards = {
        key: ({name: one for name, one in tensors.items() if name.rpartition("/")[2] not in gone}, labels)
        for key, (tensors, labels) in want.shards.items()
        if key[0] == "policy"
    }
    metrics = {name: value for name, value in want.plan["metrics"].items() if name != "shard_bytes"}
    return Expected(want.plan | {"metrics": metrics}, shards)


def _file(tensors: Tensors) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        part = np.array(values, ARRAYS[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
