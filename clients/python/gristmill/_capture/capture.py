"""`gristmill.capture`, and what it does with each call within its block."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread
from typing import Any, Literal, NamedTuple

from gristmill._capture.answers import Answer, StreamedAnswer, WholeAnswer
from gristmill._client.rollout.trajectory import AsyncTrajectory, Trajectory
from gristmill._engines.completion_calls import CompletionCall
from gristmill._engines.fields import FIELDS
from gristmill.completions import Sampled
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

# The other APIs in which engines sample tokens.
_OTHER = re.compile(r"/v1/(messages|responses)$|(^|/inference/v1)/generate$|^/completion$|:(g|streamG)enerateContent$")


class CapturedCall(NamedTuple):
    """A call to record. body: to send to the engine."""

    body: bytes
    answer: Callable[[str], Answer]


class Capture:
    """Records the calls of one block on its trajectory."""

    def __init__(self, trajectory: Trajectory | AsyncTrajectory, base_url: str, engine: str) -> None:
        if not isinstance(trajectory, (Trajectory, AsyncTrajectory)):
            raise InvalidArgumentError(f"trajectory is a {type(trajectory).__name__}; pass client.trajectory(...)")
        if not re.match("https?://[^/]", base_url):
            raise InvalidArgumentError(
                f"base_url is {base_url!r}; pass the URL at which the agent calls the trained engine, such as "
                "http://vllm:8000/v1: answers of other servers, such as a judge, are not the policy's"
            )
        if engine not in FIELDS:
            raise InvalidArgumentError(f"engine is {engine!r}; pass one of {', '.join(FIELDS)}")
        self._trajectory, self._fields = trajectory, FIELDS[engine]
        self._base = base_url.rstrip("/") + "/"
        self._loop = asyncio.get_running_loop() if isinstance(trajectory, AsyncTrajectory) else None

    def takes(self, method: str, url: str) -> bool:
        """Returns whether to record this call. Raises InvalidArgumentError if it samples tokens in another API."""
        path = url.partition("?")[0]
        if method.upper() != "POST" or not path.startswith(self._base):
            return False
        if _OTHER.search(re.sub(r"^\w+://[^/]*", "", path)):
            raise InvalidArgumentError(
                f"{url}: gristmill.capture records only chat completions and completions; record this call by the "
                "recorder (gristmill record)"
            )
        return path.endswith("/completions")

    def call(self, url: str, body: bytes | Mapping[str, Any], *, blocks: bool) -> CapturedCall:
        """Reads a call. blocks: whether the caller will block until the answer is recorded.

        Raises InvalidArgumentError if its answer could not be recorded, and FailedPreconditionError if the trajectory
        takes no more steps."""
        if blocks and self._loop is not None and asyncio._get_running_loop() is self._loop:
            raise FailedPreconditionError(
                f"{url}: this call blocks the event loop that records it; call the engine by an asynchronous client "
                "(AsyncOpenAI, httpx.AsyncClient), or in a thread (asyncio.to_thread)"
            )
        self._trajectory._check_captures()
        try:
            document = json.loads(body) if isinstance(body, bytes) else body
        except ValueError as error:
            raise InvalidArgumentError(f"{url}: the request is not JSON: {error}; send a JSON object") from None
        if not isinstance(document, dict):
            raise InvalidArgumentError(f"{url}: the request is a {type(document).__name__}; send a JSON object")
        is_chat = url.partition("?")[0].endswith("/chat/completions")
        call = CompletionCall(document, self._fields, is_chat=is_chat, logprobs=True)
        sent = json.dumps(call.request).encode()

        def answer(content_type: str) -> Answer:
            kind = StreamedAnswer if content_type.startswith("text/event-stream") else WholeAnswer
            return kind(call, self._fields)

        return CapturedCall(sent, answer)

    def record(self, samples: Sequence[Sampled]) -> None:
        """Records the samples of an answer, and blocks until it is done."""
        if isinstance(self._trajectory, Trajectory):
            self._trajectory._capture(samples)
        else:
            self._start(samples).result()

    async def record_async(self, samples: Sequence[Sampled]) -> None:
        """Records the samples of an answer, also if the caller is cancelled meanwhile."""
        await asyncio.shield(asyncio.wrap_future(self._start(samples)))

    def _start(self, samples: Sequence[Sampled]) -> Future[None]:
        if isinstance(self._trajectory, AsyncTrajectory):
            assert self._loop is not None
            return asyncio.run_coroutine_threadsafe(self._trajectory._capture(samples), self._loop)
        # The loop's own threads may all wait for capacity that calls of the loop would free.
        trajectory, future = self._trajectory, Future[None]()

        def run() -> None:
            try:
                trajectory._capture(samples)
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                future.set_exception(error)

        Thread(target=run, name="gristmill-capture", daemon=True).start()
        return future


active: ContextVar[Capture | None] = ContextVar("gristmill-capture", default=None)
"""The innermost block around the running code."""


@contextmanager
def activated(capture: Capture | None) -> Iterator[None]:
    token = active.set(capture)
    try:
        yield
    finally:
        active.reset(token)


@contextmanager
def capture(
    trajectory: Trajectory | AsyncTrajectory,
    base_url: str,
    engine: Literal["vllm", "sglang", "dynamo"] = "vllm",
) -> Iterator[None]:
    """Records the completions that code within the block requests by httpx or aiohttp as steps of a trajectory.

    base_url: of the trained engine, as the agent has it: calls of `/chat/completions` and `/completions` below it are
        recorded, and calls to other servers, such as a judge, are not. engine: the engine that is called there.

    Each call gets the fields by which the engine returns token ids and logprobs, and the agent gets its answer without
    them, after its choices were added to the trajectory. `Trajectory.finish` ends the trajectory with the last of them.
    An answer without token ids, and a call in another API, is an error for the agent.

    The block is that of the current task or thread and of tasks that are started within it. Threads of a pool do not
    inherit it: open a block of the same trajectory in the thread, or run `contextvars.copy_context().run`. Innermost
    blocks win.

        with client.trajectory("math/17", sample=0) as trajectory:
            with gristmill.capture(trajectory, base_url="http://vllm:8000/v1"):
                text = agent.run()
            trajectory.finish(reward=score(text))
    """
    from gristmill._capture.clients import install

    install()
    with activated(Capture(trajectory, base_url, engine)):
        yield
