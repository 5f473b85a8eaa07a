"""What the recorder itself answers where it does not answer with the engine's words: in the form that the agent's
library reads, with what was wrong and the remedy."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson


class RefusalError(Exception):
    """A call that the engine does not answer. Libraries call again by themselves where there is a `retry_after_s`."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    retry_after_s: ClassVar[float | None] = None

    @property
    def headers(self) -> dict[str, str]:
        found = {"content-type": "application/json", "x-should-retry": "true" if self.retry_after_s else "false"}
        return found if self.retry_after_s is None else {**found, "retry-after": f"{self.retry_after_s:g}"}

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's and Anthropic's libraries read it, each its own part."""
        told = {"message": str(self), "type": self.kind, "param": None, "code": f"gristmill_{type(self).__name__}"}
        return {"type": "error", "error": told}

    def event(self) -> bytes:
        """In place of the rest of a stream, which both libraries raise."""
        return b"event: error\ndata: " + orjson.dumps(self.body) + b"\n\n"


class WrongCall(RefusalError):  # noqa: N818 - the name is a code in the answer
    """What was asked for cannot be recorded, and would not be trained."""


class UnknownPath(RefusalError):  # noqa: N818
    status, kind = 404, "not_found_error"


class Busy(RefusalError):  # noqa: N818
    """A limit is reached."""

    status, kind, retry_after_s = 503, "overloaded_error", 1.0


class Conflict(RefusalError):  # noqa: N818
    """The end of a trajectory that does not fit what was recorded."""

    status = 409


class CallsUnderWay(Conflict):
    retry_after_s = 1.0


class TrajectoryOver(RefusalError):  # noqa: N818
    """No more calls of this trajectory are of use."""

    status = 410


class TooLarge(RefusalError):  # noqa: N818
    status, kind = 413, "request_too_large"


class NotRecorded(RefusalError):  # noqa: N818
    """The engine answered, and the answer could not be recorded: it is not passed on."""

    status, kind = 502, "api_error"


class EngineAway(RefusalError):  # noqa: N818
    status, kind, retry_after_s = 502, "api_error", 1.0


class EngineSlow(RefusalError):  # noqa: N818
    status, kind = 504, "timeout_error"
