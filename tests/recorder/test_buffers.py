"""The requests and answers in memory have a limit, and each call frees what it had."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from gristmill_recorder import calls
from gristmill_recorder.buffers import Buffers
from gristmill_recorder.refusals import Busy, NotRecorded, TooLarge, WrongCall


def test_requests_leave_half_of_the_memory_to_the_answers() -> None:
    buffers = Buffers(max_each=50, max_total=100)
    with buffers.buffer() as first, buffers.buffer() as second:
        first.add_request(30)
        with pytest.raises(Busy, match="have 30 bytes in memory, where --max-in-flight-bytes is 100"):
            second.add_request(21)
        second.add_request(20)
        first.resize_answer("an answer", 50)
        with pytest.raises(Busy):
            second.resize_answer("an answer", 1)
        first.resize_answer("an answer", 10)
        second.resize_answer("an answer", 40)
        assert buffers.size == 100
    assert buffers.size == 0


def test_one_call_has_a_limit_of_its_own() -> None:
    buffers = Buffers(max_each=50, max_total=1000)
    with buffers.buffer() as buffer:
        buffer.add_request(30)
        with pytest.raises(TooLarge, match="the request is larger than --max-body-bytes, 50"):
            buffer.add_request(21)
        with pytest.raises(NotRecorded, match="an event is larger than --max-body-bytes, 50"):
            buffer.resize_answer("an event", 51)
    assert buffers.size == 0


def test_a_request_that_pauses_is_refused_and_frees_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LONGEST_PAUSE_S", 0.05)
    buffers = Buffers(max_each=50, max_total=100)

    async def read() -> None:
        loop = asyncio.get_running_loop()
        content = aiohttp.StreamReader(Mock(BaseProtocol), 1 << 16, loop=loop)
        content.feed_data(b"{")
        request: Any = SimpleNamespace(content=content)
        with buffers.buffer() as buffer, pytest.raises(WrongCall, match=r"paused for 0\.05 s after 1 bytes"):
            await calls.read_body(request, buffer)

    asyncio.run(read())
    assert buffers.size == 0
