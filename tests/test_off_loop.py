"""Work that goes on when its caller is gone: what fails of it is no traceback in the log, unless it is a defect."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gristmill.errors import UnavailableError
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.off_loop import finished
from gristmill_service.storage.run_store import OwnedElsewhereError

PATIENCE_S = 60.0


def unretrieved(test: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """Runs a test on a loop of its own. Returns the errors of tasks that asyncio reports as never retrieved."""
    messages: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: messages.append(context["message"]))
        await test()
        gc.collect()

    asyncio.run(watched())
    return messages


@pytest.mark.parametrize(("error", "logged"), [(UnavailableError("moved"), 0), (AssertionError("a defect"), 1)])
def test_work_that_fails_after_its_caller_is_gone_is_logged_only_if_it_is_a_defect(
    error: Exception, logged: int
) -> None:
    async def test() -> None:
        may_fail = asyncio.Event()

        async def work() -> None:
            await may_fail.wait()
            raise error

        caller = asyncio.create_task(finished(work()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        await asyncio.wait([caller])
        assert caller.cancelled()

    with capture_logs() as logs:
        assert unretrieved(test) == []
    assert [line["event"] for line in logs] == ["task failed"] * logged


class Call:
    """A call's context without a deadline and metadata."""

    def time_remaining(self) -> None:
        """There is no deadline."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def test_an_owner_that_answers_while_it_is_asked_whether_it_is_the_owner_is_listened_to() -> None:
    async def test() -> None:
        asked, answered = asyncio.Event(), asyncio.Event()

        async def refuse(request: bytes, context: Any) -> bytes:
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            answered.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "moved")
            raise AssertionError("unreachable")

        async def is_owner(run: str, address: str) -> bool:
            asked.set()
            await asyncio.wait_for(answered.wait(), PATIENCE_S)
            # The refusal is under way.
            await asyncio.sleep(0.5)
            return False

        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        handlers = {"y": grpc.unary_unary_rpc_method_handler(refuse)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x", handlers)])
        await server.start()
        forwarding = Forwarding(is_owner, None)
        owner = OwnedElsewhereError("owned", "run", f"127.0.0.1:{port}")
        with pytest.raises((grpc.aio.AioRpcError, UnavailableError), match=r"moved|changed during the call"):
            await forwarding.unary("/x/y", b"", owner, Call())
        await forwarding.close()
        await server.stop(None)

    assert unretrieved(test) == []
