"""What only HTTP has: bodies of several kinds, the OpenAPI page, probes, metrics."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator

import httpx
import pytest
from pydantic import ByteSize
from safetensors.numpy import load

from gristmill_service.api.http import models
from gristmill_service.settings import Settings
from tests.api.apis import CONFIG, HttpApi, Refused, group, row, rows_message
from tests.on_loop import Service
from tests.serving import FREE_PORTS

PATHS = {
    "/v1/session": {"post", "delete"},
    "/v1/runs": {"get", "post"},
    "/v1/runs/{run}": {"get", "delete"},
    "/v1/runs/{run}/finish": {"post"},
    "/v1/runs/{run}/batches/{batch}/policy/{mini_batch}/{rank}": {"put"},
    "/v1/runs/{run}/policy-version": {"get", "put"},
    "/v1/runs/{run}/groups": {"get", "post"},
    "/v1/runs/{run}/groups:abort": {"post"},
    "/v1/runs/{run}/rows": {"post"},
    "/v1/runs/{run}/rewards": {"post"},
    "/v1/runs/{run}/trajectories:abort": {"post"},
    "/v1/runs/{run}/seal": {"post"},
    "/v1/runs/{run}/batches/{batch}": {"get"},
    "/v1/runs/{run}/batches/{batch}/rollouts": {"get"},
    "/v1/runs/{run}/batches/{batch}/table": {"get"},
    "/v1/runs/{run}/batches/{batch}/{model}/{mini_batch}/{rank}": {"get"},
    "/v1/runs/{run}/shards": {"get"},
    "/v1/runs/{run}/ack": {"post"},
    "/v1/runs/{run}/commit": {"post"},
    "/v1/runs/{run}/resume": {"post"},
    "/v1/overview": {"get"},
    "/v1/runs/{run}/health": {"get"},
    "/v1/runs/{run}/timeline": {"get"},
    "/v1/runs/{run}/batches/{batch}/rows/{row}": {"get"},
    "/v1/runs/{run}/batches/{batch}/distributions": {"get"},
    "/v1/runs/{run}/find": {"get"},
    "/v1/runs/{run}/samples": {"get"},
    "/v1/runs/{run}/samples/{sample}/rows/{step}": {"get"},
    "/v1/runs/{run}/settings": {"get"},
    "/v1/runs/{run}/history": {"get"},
    "/v1/runs/{run}/batches/{batch}/picture": {"get"},
    "/v1/runs/{run}/batches/{batch}/breaks": {"get"},
    "/v1/runs/{run}/batches/{batch}/scores": {"get"},
    "/healthz": {"get"},
    "/readyz": {"get"},
    "/metrics": {"get"},
}


def metric(asked: HttpApi, name: str, **labels: str) -> float | None:
    """The value of the first series with these labels."""
    for line in asked.client.get("/metrics").text.splitlines():
        if line.startswith(name) and all(f'{label}="{value}"' in line for label, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return None


def test_openapi_lists_every_call(http_api: HttpApi) -> None:
    paths = http_api.client.get("/openapi.json").json()["paths"]
    assert {path: set(calls) for path, calls in paths.items()} == PATHS


def test_the_page_of_the_api_describes_a_plan_and_plans_are_as_it_says(http_api: HttpApi, run_name: str) -> None:
    page = http_api.client.get("/openapi.json").json()
    answer = page["paths"]["/v1/runs/{run}/batches/{batch}"]["get"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"] == {"$ref": "#/components/schemas/Batch"}
    schemas = page["components"]["schemas"]
    assert {"$ref": "#/components/schemas/PlanDocument"} in schemas["Batch"]["properties"]["plan"]["anyOf"]
    http_api.create(run_name, CONFIG)
    for uid in ("a", "b"):
        http_api.submit(run_name, group(uid))
    response = http_api.client.get(f"/v1/runs/{run_name}/batches/0", params={"wait_s": 20}).json()
    plan = response["plan"]
    assert list(plan) == schemas["PlanDocument"]["required"]
    assert [*plan, "baselines", "steps"] == list(schemas["PlanDocument"]["properties"])
    (first, *_), part = plan["mini_batches"], schemas["MiniBatchDocument"]
    assert [*first, "partitions"] == list(part["properties"])
    assert [*first["ranks"][0], "shared"] == list(schemas["RankDocument"]["properties"])
    assert models.Batch.model_validate(response).plan is not None


def test_the_plan_of_a_tree_has_the_steps_of_each_row(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, {**CONFIG, "merge": "tree"})
    for uid in ("a", "b"):
        http_api.submit(run_name, group(uid))
    answer = http_api.client.get(f"/v1/runs/{run_name}/batches/0", params={"wait_s": 20}).json()
    assert len(answer["plan"]["steps"]) == answer["plan"]["rows"]
    plan = models.Batch.model_validate(answer).plan
    assert plan is not None
    assert plan.steps == answer["plan"]["steps"]


def test_openapi_says_what_each_call_does_and_how_it_fails(http_api: HttpApi) -> None:
    for path, calls in http_api.client.get("/openapi.json").json()["paths"].items():
        for call in calls.values():
            assert call["description"]
            if path.startswith("/v1"):
                assert {"404", "409", "412", "413", "422", "429", "503"} <= call["responses"].keys()


def test_the_page_loads_nothing_from_elsewhere(http_api: HttpApi) -> None:
    page = http_api.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(files) == 3
    for text in (page.text, *(http_api.client.get(f"/{path}").text for path in files if not path.endswith(".svg"))):
        assert not re.search(r"https?:|[\"']//", text)


OTHER_PATHS = ["/healthz", "/readyz", "/metrics", "/v1/runs", "/v1/overview", "/v1/runs/nobody", "/nowhere"]


@pytest.mark.parametrize("path", ["/", "/docs", "/page/app.js"])
def test_a_page_may_load_and_run_the_files_of_the_service_alone(http_api: HttpApi, path: str) -> None:
    policy = http_api.client.get(path).headers["content-security-policy"].split("; ")
    allowed = {part.split(" ", 1)[0]: part.split(" ", 1)[1] for part in policy}
    assert allowed.pop("default-src") == allowed.pop("base-uri") == "'none'"
    assert allowed.pop("form-action") == allowed.pop("frame-ancestors") == "'none'"
    assert set(allowed.values()) == {"'self'"}


@pytest.mark.parametrize("path", ["/", "/docs", "/page/app.js", "/page/nowhere", "/openapi.json", *OTHER_PATHS])
def test_a_browser_takes_no_answer_for_another_type_than_it_says(http_api: HttpApi, path: str) -> None:
    answers = [http_api.client.request(method, path) for method in ("GET", "PATCH")]
    assert [answer.headers["x-content-type-options"] for answer in answers] == ["nosniff"] * 2


def test_probes_answer(http_api: HttpApi) -> None:
    assert http_api.client.get("/healthz").json() == {"status": "alive"}
    assert http_api.client.get("/readyz").json() == {"status": "ready"}


def test_rows_may_be_a_protobuf_message(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    answer = http_api.client.post(
        f"/v1/runs/{run_name}/rows",
        content=rows_message(group("a")).SerializeToString(),
        headers={"Content-Type": "application/x-protobuf"},
    )
    assert answer.json() == {"outcomes": ["accepted"] * 4}
    assert http_api.submit(run_name, group("a")) == ["duplicate"] * 4


def test_rows_may_be_compressed(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    body = gzip.compress(json.dumps({"rows": group("a")}).encode())
    answer = http_api.client.post(f"/v1/runs/{run_name}/rows", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.json() == {"outcomes": ["accepted"] * 4}


def test_a_shard_says_where_its_bytes_are(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    for uid in ("a", "b"):
        http_api.submit(run_name, group(uid))
    shard = http_api.call("GET", f"/runs/{run_name}/shards", rank=1, wait_s=20).json()
    answer = http_api.client.get(shard["path"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert len(answer.content) == shard["size_bytes"]


BAD_BODIES: dict[str, tuple[bytes, dict[str, str], str]] = {
    "not JSON": (b"{rows", {}, "the body is not valid JSON"),
    "no rows": (b"{}", {}, "not an object with the list rows"),
    "rows no list": (b'{"rows": 3}', {}, "not an object with the list rows"),
    "row no object": (b'{"rows": [3]}', {}, "row 0 is a int; pass a list of dicts, one per row"),
    "unknown field": (json.dumps({"rows": [row("a", 0, color=1)]}).encode(), {}, "unknown field color"),
    "another framework's field": (
        json.dumps({"rows": [row("a", 0, responses=[4], response_ids=...)]}).encode(),
        {},
        "rename responses to response_ids",
    ),
    "text for tokens": (
        json.dumps({"rows": [row("a", 0, response_ids="Hello")]}).encode(),
        {},
        "response_ids is a string; pass token ids",
    ),
    "protobuf that does not say so": (b"\x0a\x03\xff\xff\xff", {}, "the header content-type: application/x-protobuf"),
    "missing field": (json.dumps({"rows": [row("a", 0, loss_mask=...)]}).encode(), {}, "loss_mask is missing"),
    "foreign protobuf": (
        b"\xff\xff\xff",
        {"Content-Type": "application/x-protobuf"},
        "not a complete gristmill.v1.Rows",
    ),
    "foreign gzip": (b"\x00\x01", {"Content-Encoding": "gzip"}, "the body is not"),
    "truncated gzip": (gzip.compress(b"x" * 99)[:-9], {"Content-Encoding": "gzip"}, "the gzip body is incomplete"),
    "unknown encoding": (b"{}", {"Content-Encoding": "br"}, "content-encoding 'br'"),
}


@pytest.mark.parametrize("bad", BAD_BODIES)
def test_a_bad_body_is_refused_with_the_reason(http_api: HttpApi, run_name: str, bad: str) -> None:
    http_api.create(run_name, CONFIG)
    body, headers, message = BAD_BODIES[bad]
    answer = http_api.client.post(f"/v1/runs/{run_name}/rows", content=body, headers=headers)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert message in error["message"]


def test_a_field_of_the_wrong_type_is_named_with_its_value(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    answer = http_api.client.post(f"/v1/runs/{run_name}/groups", json={"uids": "a"})
    assert answer.status_code == 422
    assert "body.uids: input should be a valid list, got 'a'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "came"),
    [({}, "without content-type"), ({"Content-Type": "text/plain"}, "as content-type 'text/plain'")],
)
def test_a_body_that_does_not_say_that_it_is_json_is_asked_to(
    http_api: HttpApi, run_name: str, headers: dict[str, str], came: str
) -> None:
    body = json.dumps({"run": run_name, "config": CONFIG}).encode()
    answer = http_api.client.post("/v1/runs", content=body, headers=headers)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert message == f"the body was sent {came}; send JSON with the header content-type: application/json"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("PATCH", "/v1/runs", 405)])
def test_an_unknown_call_is_refused_in_the_same_form(http_api: HttpApi, method: str, path: str, status: int) -> None:
    answer = http_api.client.request(method, path)
    assert answer.status_code == status
    assert f"{method} {path}" in answer.json()["error"]["message"]


def test_a_table_is_a_safetensors_file_on_request(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    http_api.submit(run_name, [*group("a"), *group("b")])
    http_api.batch(run_name, 0, wait_s=20)
    columns = http_api.table(run_name, 0)
    file = http_api.call("GET", f"/runs/{run_name}/batches/0/table", format="safetensors").content
    tensors = load(file)
    entries = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    texts = {name: json.loads(listed) for name, listed in entries["__metadata__"].items()}
    assert set(texts) == {"uid", "tag", "agent", "stop_reason"}
    for name, values in columns.items():
        numbers = tensors[name].tolist()
        assert [texts[name][number] for number in numbers] == values if name in texts else numbers == values
    with pytest.raises(Refused, match="format"):
        http_api.call("GET", f"/runs/{run_name}/batches/0/table", format="parquet")


def test_a_place_within_no_batch_is_refused(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    answer = http_api.client.get(f"/v1/runs/{run_name}/shards", params={"rank": 0, "epoch": 1})
    assert "set batch, or leave them out" in answer.json()["error"]["message"]


def test_metrics_count_what_a_run_got_and_forget_it_with_the_run(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    for _ in range(2):
        http_api.submit(run_name, group("a"))
    http_api.submit(run_name, [row("b", 0)])
    http_api.abort_groups(run_name, ["b"], "bad prompt")
    assert metric(http_api, "gristmill_rows_total", run=run_name, outcome="accepted") == 5
    assert metric(http_api, "gristmill_rows_total", run=run_name, outcome="duplicate") == 4
    assert metric(http_api, "gristmill_tokens_total", run=run_name, outcome="accepted") == 2 * (5 + 7) + 5
    assert metric(http_api, "gristmill_tokens_total", run=run_name, outcome="duplicate") == 2 * (5 + 7)
    assert metric(http_api, "gristmill_groups", run=run_name, state="complete") == 1
    assert metric(http_api, "gristmill_groups_dropped_total", run=run_name) == 1
    assert metric(http_api, "gristmill_policy_version", run=run_name) == 0
    http_api.delete(run_name)
    assert metric(http_api, "gristmill_", run=run_name) is None
    http_api.create(run_name, CONFIG)
    assert metric(http_api, "gristmill_rows_total", run=run_name, outcome="accepted") == 0


def test_metrics_time_each_call_by_its_name(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, CONFIG)
    http_api.client.get("/nowhere")
    assert metric(http_api, "gristmill_call_seconds_count", api="http", call="create_run", status="200")
    assert metric(http_api, "gristmill_call_seconds_count", api="http", call="unknown", status="404")


@pytest.fixture
def small_api() -> Iterator[HttpApi]:
    """To a service that takes requests of 10,000 bytes."""
    running = Service(Settings(**FREE_PORTS, store="memory", max_message_bytes=ByteSize(10_000), shutdown_grace_s=5))
    running.start()
    api = HttpApi(running.http_url)
    yield api
    api.close()
    running.stop()


def test_a_body_beyond_the_limit_is_refused_however_it_comes(small_api: HttpApi) -> None:
    small_api.create("small", CONFIG)
    large = json.dumps({"rows": [row("a", 0, prompt_token_ids=[1] * 10_000)]}).encode()
    pieces = (large[start : start + 1000] for start in range(0, len(large), 1000))
    bomb = {"Content-Encoding": "gzip"}
    for content, headers in ((large, {}), (pieces, {}), (gzip.compress(large), bomb)):
        answer = httpx.post(
            f"{small_api.client.base_url}/v1/runs/small/rows", content=content, headers=headers, trust_env=False
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "RESOURCE_EXHAUSTED"
        assert "max_message_bytes is 10000" in answer.json()["error"]["message"]
        assert "Retry-After" not in answer.headers
    assert small_api.submit("small", [row("a", 0)]) == ["accepted"]
