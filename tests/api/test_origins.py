"""A website that is open in a browser on the service's machine commands nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.on_loop import Service

FROM_ELSEWHERE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", FROM_ELSEWHERE)
def test_pages_of_other_sites_change_nothing(service: Service, run_name: str, headers: dict[str, Any]) -> None:
    config = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
    body = {"run": run_name, "config": config}
    url = f"{service.http_url}/v1/runs"
    refused = httpx.post(url, json=body, headers=headers)
    assert refused.status_code == 403
    assert "a web page of another site" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/{run_name}").status_code == 404, "nothing was created"
    assert httpx.get(url, headers=headers).status_code == 200, "reading is no command"


def test_programs_and_the_services_own_pages_are_answered(service: Service, run_name: str) -> None:
    config = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
    for headers in ({}, {"origin": service.http_url, "sec-fetch-site": "same-origin"}):
        response = httpx.post(f"{service.http_url}/v1/runs", json={"run": run_name, "config": config}, headers=headers)
        assert response.status_code in (200, 201), response.text
