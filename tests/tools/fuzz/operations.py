"""Requests made of the HTTP API's own description, right and wrong ones, and whether the answers are as it says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.serving import FREE_PORTS
from tests.tools.fuzz.campaign import Outcome

_CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
_CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 2, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
_ROW = {"uid": "a", "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}


def run(seed: int, *, examples: int, seconds: float = 0.0) -> Outcome:
    """Sends each operation that many right and wrong requests, and again until that many seconds are over."""
    outcome, end = Outcome("operations"), time.monotonic() + seconds
    with _service() as service:
        schema = schemathesis.openapi.from_url(f"{service.http_url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
        for turn in count():
            for operation in operations:
                for mode in GenerationMode:
                    _ask(service, operation, mode, examples, f"{seed} {turn}", outcome)
            if time.monotonic() >= end:
                return outcome
    raise AssertionError("turns have no end")


@contextmanager
def _service() -> Iterator[Service]:
    served = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=1))
    served.start()
    try:
        yield served
    finally:
        served.stop()


def _ask(service: Service, operation: Any, mode: GenerationMode, examples: int, seed: str, outcome: Outcome) -> None:
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        # Its path alone, which is text: whatever is there is right.
        return

    # Of the phases this one alone: what is found is reported as it was generated, not shrunk.
    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        _make_run(service)
        _aim(case, outcome.inputs)
        outcome.inputs += 1
        response = case.call(timeout=60)
        outcome.taken += response.status_code < 400
        case.validate_response(response, checks=_CHECKS)

    try:
        ask()
    except (Exception, FailureGroup) as error:  # noqa: BLE001 - that is what is looked for
        outcome.findings.setdefault(f"{operation.label}: {error}", b"")


def _make_run(service: Service) -> None:
    """One with a batch, where there is none: requests delete it."""
    if "r" not in service.runs.names():
        rows = [_ROW | {"sample": sample} for sample in range(2)]
        with httpx.Client(base_url=service.http_url) as client:
            client.post("/v1/runs", json={"run": "r", "config": _CONFIG}).raise_for_status()
            client.post("/v1/runs/r/rows", json={"rows": rows}).raise_for_status()
            client.get("/v1/runs/r/shards", params={"rank": 0, "wait_s": 20}).raise_for_status()


def _aim(case: Any, number: int) -> None:
    """At what there is, mostly, and without waiting: nothing would come."""
    path, query = case.path_parameters or {}, case.query or {}
    if number % 4:
        path |= {name: value for name, value in (("run", "r"), ("batch", 0), ("mini_batch", 0)) if name in path}
    for holds in (query, case.body):
        if isinstance(holds, dict) and isinstance(holds.get("wait_s"), int | float):
            holds["wait_s"] = 0
