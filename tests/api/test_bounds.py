"""No request keeps the event loop from others, nor takes much memory: what is built of it is bounded before it is."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from gristmill.errors import GristmillError, TooLargeError
from gristmill.v1 import rollout_pb2, rows_pb2, trainer_pb2
from gristmill_service.api import bounds
from gristmill_service.api.bounds import MOST_ENTRIES, MOST_RANKS, Json, check_json, check_message
from tests.api.apis import row, rows_message
from tests.tools.bench import largest
from tests.tools.bench.largest import MIB, Request
from tests.tools.bench.stalls import Stall, Stalls

LONGEST_S = 0.2
"""Of processor time, while the loop answers nobody. It is 0.05 on a machine of its own (`python -m tests.tools.bench
stalls`); the worst requests took seconds before they were bounded."""
ROWS = rollout_pb2.SubmitRowsRequest.DESCRIPTOR
MOST_TIMES = 12
"""Memory that a request adds, in terms of its bytes, or of 16 MiB if that is more."""

_SOME_MESSAGES = ("empty", "packed", "unknown texts", "run text")
_SOME_NESTED = ("rows.uids empty", "rows.rewards packed", "rows.columns empty", "trajectories.unknown texts")
_SOME_DOCUMENTS = ("lists as", "nesting as", "x of values in the URL", "long path")


@pytest.fixture(scope="module")
def stalls() -> Iterator[Stalls]:
    with Stalls() as opened:
        yield opened


def test_the_largest_requests_of_every_method_with_a_list_or_large_bytes_are_known() -> None:
    large = [
        name
        for path, method in largest.methods().items()
        if bounds.most_bytes(largest.call_of(method)) != bounds.DOCUMENT.nbytes
        or any(largest.is_list(field) for field in method.input_type.fields)
        for name in [path.rpartition("/")[2]]
    ]
    assert sorted({*large, "CreateRun"}) == sorted(largest.ACCEPTED)


def test_the_largest_requests_that_are_accepted_hold_up_nobody() -> None:
    of_the_runs_state = {"Resume", "ReadShard", "WriteColumns"}
    with Stalls() as stalls:
        for request in stalls.accepted(1):
            stall = stalls.of(request)
            check(stall)
            assert stall.status == "OK" or request.way.rpartition("/")[2] in of_the_runs_state, stall_of(stall)


def test_the_worst_messages_of_every_method_are_refused_and_hold_up_nobody(stalls: Stalls) -> None:
    sent = [one for one in stalls.refused() if not one.url]
    requests = [one for one in sent if one.name.endswith(_SOME_MESSAGES) and "." not in one.name]
    requests += [one for one in sent if one.name in _SOME_NESTED]
    assert {one.way for one in requests} == set(largest.methods())
    for request in requests:
        stall = stalls.of(request)
        check(stall)
        assert stall.status != "INTERNAL", stall


def test_the_worst_bodies_and_urls_of_every_route_are_refused_and_hold_up_nobody(stalls: Stalls) -> None:
    known = {way for way, _ in largest.routes(stalls.description)}
    requests = [one for one in stalls.refused() if one.url and any(some in one.name for some in _SOME_DOCUMENTS)]
    assert {one.way for one in requests} == known
    for request in requests:
        stall = stalls.of(request)
        check(stall)
        assert stall.status != "500", stall
        assert stall.status in ("404", "422") or "x of values" not in request.name, stall


def check(stall: Stall) -> None:
    assert stall.beats.computed_s < LONGEST_S, stall_of(stall)
    assert stall.beats.added <= MOST_TIMES * max(len(stall.request.body), 16 * MIB), stall_of(stall)


def stall_of(stall: Stall) -> tuple[Any, ...]:
    request: Request = stall.request
    return request.way, request.name, len(request.body), stall.beats, stall.status


def test_rows_in_several_tables_of_a_request_are_counted_together(stalls: Stalls) -> None:
    half = rows_message([row("u", 0)] * (MOST_ENTRIES // 2 + 1))
    request = rollout_pb2.SubmitRowsRequest(run=largest.RUN, rows=half).SerializeToString()
    half.tokens, half.loss_mask = half.tokens * 2, half.loss_mask * 2
    request += rollout_pb2.SubmitRowsRequest(rows=half).SerializeToString()
    with grpc.insecure_channel(stalls.service.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")(
            request, metadata=(("authorization", "Bearer token-0"),)
        )
    assert "rows has 1026 entries or more, and the limit is 1024" in refused.value.details()


def test_a_body_in_tiny_chunks_holds_up_nobody(stalls: Stalls) -> None:
    head = f"POST /v1/runs/{largest.RUN}/rows HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token-0\r\n"
    stalls.service.read()
    with opened(stalls) as wire:
        wire.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")
        assert b" 422 " in wire.recv(100)
    assert stalls.service.read().computed_s < LONGEST_S


def test_a_url_may_name_as_many_groups_as_a_request_in_several_pieces_too(stalls: Stalls) -> None:
    names = "&".join(f"uids=the-name-of-a-group-with-a-number-{number:04}" for number in range(MOST_ENTRIES))
    with opened(stalls) as wire:
        wire.sendall(f"GET /v1/runs/{largest.RUN}/groups?{names[:20_000]}".encode())
        time.sleep(0.05)
        rest = f"{names[20_000:]} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token-0\r\n\r\n"
        wire.sendall(rest.encode())
        assert b" 200 OK" in wire.recv(100)


def opened(stalls: Stalls) -> socket.socket:
    """A connection to the service's HTTP API."""
    where = urlsplit(stalls.service.http_url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


# --- The checks by themselves


def test_each_list_of_a_message_may_have_as_many_entries_as_a_request_decides_on() -> None:
    def rewards(count: int) -> bytes:
        key = rollout_pb2.TrajectoryKey(uid="uid", sample=1)
        rewards = [rollout_pb2.Reward(trajectory=key, value=1.0)] * count
        return rollout_pb2.SetRewardsRequest(run="r", rewards=rewards).SerializeToString()

    def ranks(count: int) -> bytes:
        return trainer_pb2.ResumeRequest(
            run="r", ranks=[-1, 300] * (count // 2) + [0] * (count % 2)
        ).SerializeToString()

    def rows(count: int) -> bytes:
        columns = [rows_pb2.Column(counts=[1 << 20] * count)]
        table = rows_pb2.Rows(uids=["u"] * 9, rewards=[0.5] * count, prefix_checksums=[1] * count, columns=columns)
        return rollout_pb2.SubmitRowsRequest(run="r", rows=table).SerializeToString()

    for make, message, most in (
        (rewards, rollout_pb2.SetRewardsRequest, MOST_ENTRIES),
        (ranks, trainer_pb2.ResumeRequest, MOST_RANKS),
        (rows, rollout_pb2.SubmitRowsRequest, MOST_ENTRIES),
    ):
        check_message(make(most), message.DESCRIPTOR)
        with pytest.raises(TooLargeError, match=f"entries or more, and the limit is {most} per request; send several"):
            check_message(make(most + 1), message.DESCRIPTOR)


def test_a_text_is_refused_by_its_size_and_other_bytes_are_not() -> None:
    large = bytes(MIB + 1)
    table = rows_pb2.Rows(tokens=large, column_values=[large])
    check_message(rollout_pb2.SubmitRowsRequest(run="r", rows=table).SerializeToString(), ROWS)
    with pytest.raises(TooLargeError, match="run is a text of 1048577 bytes, and the limit is 1048576; send less"):
        check_message(rollout_pb2.SubmitRowsRequest(run="r" * (MIB + 1)).SerializeToString(), ROWS)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_message_that_is_cut_is_left_to_protobuf(cut: int) -> None:
    data = rollout_pb2.AbortGroupsRequest(uids=["x" * 30] * 100).SerializeToString()
    check_message(data[:-cut], rollout_pb2.AbortGroupsRequest.DESCRIPTOR)


def test_values_lists_and_levels_of_documents_are_counted_outside_of_their_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "_PIECE_BYTES", 7)
    drawn = random.Random(1)
    for _ in range(2000):
        document = json.dumps([value := _drawn(drawn), value], ensure_ascii=drawn.random() < 0.5)
        lists, values, depth = _counted(json.loads(document))
        most = Json(MIB, lists + values, lists, depth)
        check_json(document.encode(), most)
        for less in (
            most._replace(entries=most.entries - 1),
            most._replace(lists=lists - 1),
            most._replace(nesting=depth - 1),
        ):
            with pytest.raises(GristmillError):
                check_json(document.encode(), less._replace(nesting=min(less.nesting, lists + values - 1)))


def _drawn(drawn: random.Random, depth: int = 0) -> Any:
    kind = drawn.random()
    if depth == 4 or kind < 0.4:
        return "".join(drawn.choices('a\\",[]{}:\u2222\n', k=drawn.randrange(9)))
    if kind < 0.7:
        return [_drawn(drawn, depth + 1) for _ in range(drawn.randrange(4))]
    return {_drawn(drawn, 4): _drawn(drawn, depth + 1) for _ in range(drawn.randrange(3))}


def _counted(value: Any) -> tuple[int, int, int]:
    """The lists and objects, the marks between their entries, and the levels of nesting."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    entries = [_counted(one) for one in (value if isinstance(value, list) else value.values())]
    marks = max(0, len(value) - 1) + (len(value) if isinstance(value, dict) else 0)
    return (
        1 + sum(one[0] for one in entries),
        marks + sum(one[1] for one in entries),
        1 + max((one[2] for one in entries), default=0),
    )
