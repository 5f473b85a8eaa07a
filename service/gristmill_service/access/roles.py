"""The roles that may make each call, over gRPC and HTTP. A test checks that the table lists every call."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["worker", "trainer", "viewer", "data_reader", "scraper", "admin"]
"""worker: submits rollouts and ends runs. trainer: pulls shards, writes columns, acknowledges, commits. viewer: sees
runs, but no tokens of rows. data_reader: also reads tokens of rows. scraper: reads the metrics. admin: everything."""

ROLES: tuple[Role, ...] = get_args(Role)

_WORKER: frozenset[Role] = frozenset(["worker"])
_TRAINER: frozenset[Role] = frozenset(["trainer"])
_DATA: frozenset[Role] = frozenset(["data_reader"])
_SEE: frozenset[Role] = frozenset(["worker", "trainer", "viewer", "data_reader"])
_ADMIN: frozenset[Role] = frozenset()

CALLS: dict[str, frozenset[Role]] = {
    # Runs.
    "create_run": _WORKER | _TRAINER,
    "get_run": _SEE,
    "list_runs": _SEE,
    "list_groups": _SEE,
    "finish_run": _WORKER,
    "delete_run": _ADMIN,
    "announce_policy_version": _TRAINER,
    "wait_policy_version": _SEE,
    # Rollouts.
    "begin_groups": _WORKER,
    "submit_rows": _WORKER,
    "set_rewards": _WORKER,
    "abort_trajectories": _WORKER,
    "abort_groups": _WORKER,
    "seal_batch": _WORKER,
    # Trainers.
    "get_batch": _TRAINER,
    "get_shard": _TRAINER,
    "read_shard": _TRAINER,
    "read_table": _TRAINER,
    "write_columns": _TRAINER,
    "acknowledge": _TRAINER,
    "commit": _TRAINER,
    "resume": _TRAINER,
    "export_batch": _DATA,
    # The page.
    "overview": _SEE,
    "run_health": _SEE,
    "run_timeline": _SEE,
    "run_history": _SEE,
    "run_settings": _SEE,
    "find_groups": _SEE,
    "group_samples": _SEE,
    "batch_distributions": _SEE,
    "batch_picture": _SEE,
    "batch_scores": _SEE,
    "batch_breaks": _DATA,
    "batch_row": _DATA,
    "group_row": _DATA,
    # Operation.
    "metrics": frozenset(["scraper"]),
    "openapi": _SEE,
}
"""The roles that may make each call; admin may make all. A gRPC method and its HTTP handler have the same name."""

OPEN_CALLS = frozenset(["get_health", "healthz", "readyz", "index", "docs", "asset", "sign_in", "sign_out"])
"""The calls that need no token: probes, and the files of the page, which contain no data."""

AUDITED = frozenset(
    (
        "create_run",
        "finish_run",
        "delete_run",
        "seal_batch",
        "abort_groups",
        "abort_trajectories",
        "resume",
        "export_batch",
        "batch_breaks",
        "batch_row",
        "group_row",
    )
)
"""The calls that are logged with their caller: they start or end something, or return tokens of rows."""
