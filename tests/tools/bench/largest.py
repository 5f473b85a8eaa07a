"""The largest requests of every gRPC method and HTTP route that are accepted, and the worst that are refused.

Both are made of the descriptors and of the API's description, so that a new method or route has them, too. A method
with a list also needs an entry in `ACCEPTED`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gristmill._wire.codecs import submit_codec, tensor_file
from gristmill._wire.codecs.varints import varint
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.api.bounds import DOCUMENT, MOST_ENTRIES, MOST_RANKS, PROTOBUF, most_bytes
from tests.api.apis import CONFIG, row, rows_message

RUN = "r"
MIB = 1 << 20
MESSAGE_BYTES = 8 * MIB
"""`max_message_bytes` of the service."""
SETTINGS = CONFIG | {"train_batch_size": 1 << 16, "policy_mini_batch_size": 1 << 16, "n_samples_per_prompt": 1}
"""The settings of `RUN`, which seals nothing by itself."""


class Request(NamedTuple):
    """way: a method's path, or a route as `POST /v1/runs`. name: what it has much of. url: for a route. kind: the
    content type. is_refused: whether it is too much."""

    way: str
    name: str
    body: bytes
    url: str = ""
    kind: str = "application/json"
    is_refused: bool = True


# --- gRPC


def methods() -> dict[str, Any]:
    """Each method by its path."""
    return {
        f"/{service.full_name}/{method.name}": method
        for contract in (run_pb2, rollout_pb2, trainer_pb2)
        for service in contract.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def call_of(method: Any) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()


def is_list(field: FieldDescriptor) -> bool:
    """Whether a field is repeated. Newer versions of protobuf have a property for it, and older ones a label."""
    has: bool | None = getattr(field, "is_repeated", None)
    label: int = getattr(field, "label", 0)
    return label == FieldDescriptor.LABEL_REPEATED if has is None else has


def refused_messages(path: str) -> Iterator[Request]:
    """Messages of a method that have as much of each field as fits into the largest one, and unknown fields."""
    method = methods()[path]
    size = (most_bytes(call_of(method)) or MESSAGE_BYTES) - 64
    begin = _text(1, RUN.encode()) if method.input_type.fields else b""
    for name, entry in _entries(method.input_type, size):
        yield Request(path, name, begin + entry * ((size - len(begin)) // len(entry)))


def _entries(message: Descriptor, size: int, nested: str = "") -> Iterator[tuple[str, bytes]]:
    yield f"{nested}unknown numbers", varint(1023 << 3) + b"\0"
    yield f"{nested}unknown texts", varint(1023 << 3 | 2) + b"\0"
    yield f"{nested}groups", varint(1023 << 3 | 3)
    for field in message.fields:
        name = f"{nested}{field.name}"
        if field.message_type is not None:
            yield f"{name} empty", _text(field.number, b"")
            if not nested:
                for inner, entry in _entries(field.message_type, size, f"{name}."):
                    content = entry * ((size - 64) // len(entry))
                    yield inner, _text(field.number, content)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            yield f"{name} empty", _text(field.number, b"")
            for text, shown in (("text", b"x" * (size - 64)), *_documents(field.name, size - 64)):
                yield f"{name} {text}", _text(field.number, shown)
        else:
            yield f"{name} packed", _text(field.number, bytes(size - 64))
            yield f"{name} one by one", varint(field.number << 3) + b"\0"


def _documents(name: str, size: int) -> Iterator[tuple[str, bytes]]:
    if name.endswith("_json"):
        for kind, document in wrong_documents(size):
            yield kind, document
            yield f"settings of {kind}", b'{"columns":' + document[:-12] + b"}"


def _text(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def accepted_messages(path: str, number: int) -> list[Request]:
    """The largest messages of a method that are accepted, the first time with this number."""
    make = ACCEPTED.get(path.rpartition("/")[2])
    return [] if make is None else [Request(path, name, body, is_refused=False) for name, body in make(number)]


def large(size: int, count: int) -> Iterator[tuple[str, list[Request]]]:
    """Yields requests of about that many bytes with rows or tensors, that many at a time."""
    paths = {path.rpartition("/")[2]: path for path in methods()}
    tokens = np.ones((size - 4096) // 4, np.int32)
    rows = [_long_row(f"large {count} {number}", tokens) for number in range(count)]
    messages = [submit_codec.encode(RUN, [submit_codec.read_rows(one).steps]) for one in rows]
    yield "rows", [Request(paths["SubmitRows"], "", one) for one in messages]
    url = f"/v1/runs/{RUN}/rows"
    yield "rows_over_http", [Request(f"POST {url}", "", one, url, PROTOBUF) for one in rows]
    file, url = tensor_file.encode({"c": tokens}), f"/v1/runs/{RUN}/batches/0/policy/0/0?incarnation=0"
    written = _message(trainer_pb2.WriteColumnsRequest(run=RUN)) + _text(6, file)
    yield "columns", [Request(paths["WriteColumns"], "", written)] * count
    yield "columns_over_http", [Request(f"PUT {url}", "", file, url, "application/octet-stream")] * count


def _long_row(uid: str, tokens: np.ndarray) -> bytes:
    """An encoded table of one row."""
    table = rows_message([row(uid, 0, prompt_token_ids=[1], response_ids=[], loss_mask=[])])
    table.prompt_lengths[:], table.response_lengths[:] = [len(tokens) - 1], [1]
    table.tokens, table.loss_mask = tokens.tobytes(), b"\1"
    return _message(table)


def _uids(number: int) -> list[str]:
    return [f"{number:04}-{one:0985}" for one in range(MOST_ENTRIES)]


def _groups(number: int) -> Iterator[tuple[str, bytes]]:
    yield "groups", _message(rollout_pb2.BeginGroupsRequest(run=RUN, uids=_uids(number), n_samples=[1] * MOST_ENTRIES))


def _rows(number: int) -> Iterator[tuple[str, bytes]]:
    fields: dict[str, Any] = {"stop_reason": "stop", "reward": None, "agent": "a", "step_key": "k"}
    rows = [row(uid, 0, **fields) for uid in _uids(number)]
    yield "rows of begun groups", _message(rollout_pb2.SubmitRowsRequest(run=RUN, rows=rows_message(rows)))
    yield "rows again", _message(rollout_pb2.SubmitRowsRequest(run=RUN, rows=rows_message(rows)))
    rows = [row(f"new {uid}", 0, **fields) for uid in _uids(number)]
    yield "rows of new groups", _message(rollout_pb2.SubmitRowsRequest(run=RUN, rows=rows_message(rows)))
    long = _text(2, _long_row(f"long {number}", np.ones((MESSAGE_BYTES - 4096) // 4, np.int32)))
    yield "a long row", _message(rollout_pb2.SubmitRowsRequest(run=RUN)) + long


def _rewards(number: int) -> Iterator[tuple[str, bytes]]:
    rewards = [rollout_pb2.Reward(trajectory=_key(uid), value=1.0) for uid in _uids(number)]
    yield "rewards", _message(rollout_pb2.SetRewardsRequest(run=RUN, rewards=rewards))


def _aborts(number: int) -> Iterator[tuple[str, bytes]]:
    keys = [_key(f"new {uid}") for uid in _uids(number)]
    yield "trajectories", _message(rollout_pb2.AbortTrajectoriesRequest(run=RUN, trajectories=keys, reason="x"))


def _group_aborts(number: int) -> Iterator[tuple[str, bytes]]:
    yield "groups", _message(rollout_pb2.AbortGroupsRequest(run=RUN, uids=_uids(number), reason="x"))


def _listed(number: int) -> Iterator[tuple[str, bytes]]:
    yield "groups", _message(run_pb2.ListGroupsRequest(run=RUN, uids=_uids(number)))


def _settings(number: int) -> Iterator[tuple[str, bytes]]:
    columns = [{"name": f"c{one}", "dtype": "int32", "scope": "token"} for one in range(64)]
    document = json.dumps(SETTINGS | {"columns": columns})
    yield "columns", _message(run_pb2.CreateRunRequest(run=f"{RUN}-{number}", config_json=document))


def _ranks(number: int) -> Iterator[tuple[str, bytes]]:
    yield "ranks", _message(trainer_pb2.GetBatchRequest(run=RUN, ranks=range(MOST_RANKS)))


def _begun_ranks(number: int) -> Iterator[tuple[str, bytes]]:
    yield "ranks", _message(trainer_pb2.ResumeRequest(run=RUN, ranks=range(MOST_RANKS)))


def _columns(number: int) -> Iterator[tuple[str, bytes]]:
    names = [f"column-{one}" for one in range(MOST_ENTRIES)]
    yield "columns", _message(trainer_pb2.ReadShardRequest(run=RUN, chooses_columns=True, columns=names))


def _tensors(number: int) -> Iterator[tuple[str, bytes]]:
    file = tensor_file.encode({"c": np.zeros(MESSAGE_BYTES // 4 - 1024, np.int32)})
    yield "tensors", _message(trainer_pb2.WriteColumnsRequest(run=RUN, tensors=file))
    entries = {f"c{one}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for one in range(MOST_ENTRIES)}
    header = json.dumps(entries).encode()
    file = len(header).to_bytes(8, "little") + header
    yield "a long header", _message(trainer_pb2.WriteColumnsRequest(run=RUN, tensors=file))


def _key(uid: str) -> rollout_pb2.TrajectoryKey:
    return rollout_pb2.TrajectoryKey(uid=uid, sample=0)


def _message(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


ACCEPTED: dict[str, Callable[[int], Iterator[tuple[str, bytes]]]] = {
    "CreateRun": _settings,
    "BeginGroups": _groups,
    "SubmitRows": _rows,
    "SetRewards": _rewards,
    "AbortTrajectories": _aborts,
    "AbortGroups": _group_aborts,
    "ListGroups": _listed,
    "GetBatch": _ranks,
    "Resume": _begun_ranks,
    "ReadShard": _columns,
    "WriteColumns": _tensors,
}
"""The largest requests by method, in an order in which the run accepts them. Those of ranks, columns and tensors that
it does not have are read whole before they are refused."""


# --- HTTP


def wrong_documents(size: int) -> Iterator[tuple[str, bytes]]:
    """Documents of about that many bytes that take long to parse."""
    for name, entry in (
        ("numbers", b"1,"),
        ("fractions", b"1.5,"),
        ("texts", b'"",'),
        ("lists", b"[],"),
        ("objects", b"{},"),
        ("escapes", b'"\\\\\\"",'),
    ):
        yield name, b"[" + entry * ((size - 16) // len(entry)) + b"1]"
    yield "names", b"{" + b",".join(b'"k%06d":1' % one for one in range((size - 16) // 12)) + b"}"
    yield "nesting", b"[" * (size // 2) + b"]" * (size // 2)
    yield "deep nesting", b"[" * 4000 + b"]" * 4000
    yield "digits", b"[" + b"1" * (size - 16) + b"]"
    yield "a fraction", b"[1." + b"1" * (size - 16) + b"]"
    yield "text", b'"' + b"[,\\\\" * ((size - 16) // 4) + b'"'
    yield "UTF-16", b"\xff\xfe" + b"[\0" * (size // 2 - 8)


def routes(description: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each route of the API's description, as `POST /v1/runs`, with its operation."""
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            yield f"{method.upper()} {path}", operation


def refused_documents(way: str, operation: dict[str, Any], description: dict[str, Any]) -> Iterator[Request]:
    path = way.partition(" ")[2]
    url = _url(path)
    for kind in ("application/json", "text/plain", "application/x-protobuf", "application/octet-stream"):
        body = operation.get("requestBody")
        if body is None and kind != "text/plain":
            continue
        size = (8 * MIB if path.endswith("/rows") else DOCUMENT.nbytes) - 64
        for name, document in wrong_documents(size):
            if kind == "application/json" or name in ("numbers", "lists"):
                yield Request(way, f"{name} as {kind}", document, url, kind)
            if kind == "application/json":
                for field in _lists(body, description):
                    yield Request(way, f"{field} of {name}", b'{"%s":%s}' % (field.encode(), document), url)
    for field in ("x", *(one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")):
        for name, value, count in (
            ("values", "x", 15_000),
            ("text", "x" * 60_000, 1),
        ):
            query = "&".join([f"{field}={quote(value, safe='')}"] * count)[:60_000]
            yield Request(way, f"{field} of {name} in the URL", b"", f"{url}?{query}")
    yield Request(way, "a long path", b"", url.replace(RUN, "x" * 60_000, 1))


def _url(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: {"run": RUN, "model": "policy"}.get(match[1], "0"), path)


def _lists(body: dict[str, Any] | None, description: dict[str, Any]) -> list[str]:
    """The names of a body's fields."""
    schema = (body or {}).get("content", {}).get("application/json", {}).get("schema", {})
    for one in (schema, *schema.get("anyOf", ())):
        if "$ref" in one:
            schema = description["components"]["schemas"][one["$ref"].rpartition("/")[2]]
    return list(schema.get("properties", ()))
