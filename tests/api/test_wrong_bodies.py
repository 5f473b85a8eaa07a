"""However much of a body is wrong, it is refused within a second, in a few lines."""

from __future__ import annotations

import gzip
import time

import pytest

from tests.api.apis import CONFIG, HttpApi


@pytest.fixture
def run(http_api: HttpApi, run_name: str) -> str:
    http_api.create(run_name, CONFIG)
    return run_name


MIB = 1 << 20
MANY = b",".join(b'"field_%06d":1' % number for number in range(MIB // 18))
UNKNOWN = b",".join(b'"field_%06d":1' % number for number in range(4000))
REWARD = b'"uid":"a","sample":0,"reward":'

BODIES = {
    "numbers for uids": ("groups", b'{"uids":[' + b"1," * 8000 + b"1]}", "body.uids.0"),
    "many numbers for uids": ("groups", b'{"uids":[' + b"1," * (MIB // 2 - 50) + b"1]}", "the body has 524241 values"),
    "more uids than are read": ("groups", b'{"uids":[' + b'"a",' * 1024 + b'"a"]}', "body.uids: list should have at"),
    "a list for an object": ("groups", b"[" + b"1," * 8000 + b"1]", "body: "),
    "text for an object": ("groups", b'"' + b"x" * (MIB - 50) + b'"', "body: "),
    "many lists": (
        "groups",
        b"[" * MIB,
        "the body has 1048576 lists and objects, and the limit for JSON in this call is",
    ),
    "deep lists": ("groups", b"[" * 4000, "not JSON in UTF-8, or nested too deeply"),
    "UTF-16": ("groups", '{"uids":[]}'.encode("utf-16"), "not JSON in UTF-8"),
    "many lists in UTF-16 as text": ("groups", ("\u5b22" * 10_000).encode("utf-16"), "lists and objects"),
    "unknown fields": ("groups", b'{"uids":[],' + UNKNOWN + b"}", "body: unknown field 'field_000000'"),
    "many unknown fields": ("groups", b'{"uids":[],' + MANY + b"}", "the body has 116511 values"),
    "numbers for rewards": ("rewards", b'{"rewards":[' + b"1," * 60_000 + b"1]}", "body.rewards.0"),
    "empty rewards": ("rewards", b'{"rewards":[' + b"{}," * 4000 + b"{}]}", "body.rewards.0.uid: field required"),
    "unknown fields of a reward": (
        "rewards",
        b'{"rewards":[{' + REWARD + b"1," + UNKNOWN + b"}]}",
        "body.rewards.0: unknown field 'field_000000'",
    ),
    "text for a reward's values": (
        "rewards",
        b'{"rewards":[{' + REWARD + b"[" + b'"a",' * 60_000 + b'"a"]}]}',
        "body.rewards.0.reward",
    ),
    "numbers for trajectories": (
        "trajectories:abort",
        b'{"trajectories":[' + b"1," * 8000 + b"1]}",
        "body.",
    ),
    "a long name of a model": ("commit", b'{"model":"' + b"x" * (MIB - 50) + b'"}', "body.model"),
    "rows without fields": ("rows", b'{"rows":[' + b"{}," * 1000 + b"{}]}", "row 0"),
    "a row of a long uid": ("rows", b'{"rows":[{"uid":"' + b"x" * (MIB - 50) + b'"}]}', "uid 'xxx"),
    "more rows than are read": (
        "rows",
        b'{"rows":[' + b"{}," * 20_000 + b"{}]}",
        "rows has 20001 entries or more, and the limit",
    ),
    "a longer row than is read": (
        "rows",
        b'{"rows":["' + b"x" * (5 * MIB) + b'"]}',
        "limits for JSON are 4194304 bytes",
    ),
    "more JSON of rows than is read": ("rows", b" " * (9 * MIB), "the body exceeds 8388608 bytes, the limit for JSON"),
    "more JSON than is read": ("groups", b" " * (2 * MIB), "the body exceeds 1048576 bytes, the limit for JSON"),
    "a boolean for a batch": ("seal", b'{"batch":false}', "body.batch: true and false are not numbers"),
    "a boolean for a sample": (
        "trajectories:abort",
        b'{"reason":"r","trajectories":[{"uid":"a","sample":true}]}',
        "body.trajectories.0.sample: true and false are not numbers",
    ),
    "a boolean for a reward": ("rewards", b'{"rewards":[{' + REWARD + b"true}]}", "body.rewards.0.reward"),
    "unknown settings": ("", b'{"run":"x","config":{' + UNKNOWN + b"}}", "unknown setting field_000000"),
    "columns": ("", b'{"run":"x","config":{"columns":[' + b"{}," * 2000 + b"{}]}}", "columns: 2001 are declared"),
    "a long name": ("", b'{"config":{},"run":"' + b"x" * (MIB - 50) + b'"}', "run name 'xxx"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_wrong_body_is_refused_within_a_second_and_in_a_few_lines(
    http_api: HttpApi, run: str, name: str
) -> None:
    call, body, reason = BODIES[name]
    path = f"/v1/runs/{run}/{call}" if call else "/v1/runs"
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    packed = gzip.compress(body, 1)
    # The service is of this process; what else the machine does is not counted.
    start = time.process_time()
    answer = http_api.client.post(path, content=packed, headers=headers)
    assert time.process_time() - start < 1
    assert answer.status_code == 422
    assert reason in answer.json()["error"]["message"]
    assert len(answer.content) < 10_000


@pytest.mark.parametrize(("call", "most"), [("groups", MIB), ("rows", 8 * MIB)])
def test_a_body_of_json_has_a_limit(http_api: HttpApi, run: str, call: str, most: int) -> None:
    for size, is_too_large in ((most, False), (most + 1, True)):
        headers = {"content-type": "application/json"}
        answer = http_api.client.post(f"/v1/runs/{run}/{call}", content=b" " * size, headers=headers)
        assert (answer.status_code, f"exceeds {most} bytes" in answer.json()["error"]["message"]) == (422, is_too_large)


def test_a_body_that_is_no_json_is_refused_with_the_place(http_api: HttpApi) -> None:
    answer = http_api.client.post("/v1/runs", content=b'{"run": x}', headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith("the body is not valid JSON at character 8; send JSON")


def test_the_first_ten_problems_of_a_body_are_named_and_its_values_cut_short(http_api: HttpApi, run: str) -> None:
    wrong = {"uid": 1, "sample": "x" * 1000, "round": "y", "reward": None, "step": "z"}
    answer = http_api.client.post(f"/v1/runs/{run}/rewards", json={"rewards": [wrong]})
    message = answer.json()["error"]["message"]
    assert "body.rewards.0.uid: input should be a valid string, got 1; body.rewards.0.sample: " in message
    assert "body.rewards.0.step: " in message
    assert "x" * 100 not in message
    assert message.endswith("; see /docs for the expected format")
    answer = http_api.client.post(f"/v1/runs/{run}/resume", json={"position": dict.fromkeys("abcdefghijkl", "x")})
    assert "unknown field 'a'" in answer.json()["error"]["message"]


def test_a_body_of_bytes_that_are_no_text_is_refused_as_any_other_that_is_no_json(http_api: HttpApi) -> None:
    answer = http_api.client.post("/v1/runs", content=b"\xff\xfe{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "InvalidArgumentError")
    assert "not JSON in UTF-8" in answer.json()["error"]["message"]
