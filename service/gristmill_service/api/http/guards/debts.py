"""Callers over HTTP who owe for calls that were refused wait, and then are refused before anything is read."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE
from gristmill_service.access.debts import Debts
from gristmill_service.access.gate import Gate
from gristmill_service.api.errors import STATUSES, refusal
from gristmill_service.api.http.guards.bodies import TOO_LARGE

_CODES = {status: code for code, (_, status) in STATUSES.items()} | {TOO_LARGE: "INVALID_ARGUMENT"}


class Indebted:
    """ASGI middleware, for whom the caller is known. Where no tokens are asked for callers cannot be told apart, and
    nobody waits."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._gate.is_open or caller.current() is ANYONE:
            await self._app(scope, receive, send)
            return
        debts, debtor, nbytes = self._gate.debts, _debtor(scope), 0
        await _wait(debts, debtor)
        try:
            debts.check(debtor)
        except ResourceExhaustedError as error:
            told = refusal(error)
            await JSONResponse(told.body, told.http_status, {**told.headers, "Connection": "close"})(
                scope, receive, send
            )
            return

        async def counted() -> Message:
            nonlocal nbytes
            message = await receive()
            nbytes += len(message.get("body", b""))
            return message

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start" and (code := _CODES.get(message["status"])):
                debts.charge(debtor, code, nbytes)
            await send(message)

        await self._app(scope, counted, observed)


async def refuse_unknown(debts: Debts, scope: Scope) -> None:
    """Returns when a caller whose token is not known may be told so."""
    debtor = _address(scope)
    debts.charge(debtor, "UNAUTHENTICATED", 0)
    await _wait(debts, debtor)


async def _wait(debts: Debts, debtor: str) -> None:
    if debts.wait_s(debtor):
        with debts.waiting(debtor) as wait_s:
            await asyncio.sleep(wait_s)


def _debtor(scope: Scope) -> str:
    """A caller's machine: workers of other machines that show the same token do not wait for it."""
    return f"{caller.current().name} {_address(scope)}"


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])
