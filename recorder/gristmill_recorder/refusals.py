"""The recorder's own error answers, in the format that OpenAI's and Anthropic's clients parse."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson


class RefusalError(Exception):
    """Refuses a call. The message names the problem and the remedy. Clients retry if `retry_after_s` is set."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    retry_after_s: ClassVar[float | None] = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-should-retry": "true" if self.retry_after_s else "false"}
        return headers if self.retry_after_s is None else {**headers, "retry-after": f"{self.retry_after_s:g}"}

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON. OpenAI's and Anthropic's clients read different fields of it."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": f"gristmill_{type(self).__name__}"}
        return {"type": "error", "error": error}

    def event(self) -> bytes:
        """Returns the event that ends a stream with this error. Both clients raise it as an exception."""
        return b"event: error\ndata: " + orjson.dumps(self.body) + b"\n\n"


class WrongCall(RefusalError):  # noqa: N818 - the name is a code in the answer
    """The call is invalid, or cannot be recorded, so that it could not be trained."""


class NoThread(WrongCall):
    """The call needs a server that stores the conversation. Anthropic's library then sends the whole conversation."""

    @property
    def body(self) -> dict[str, Any]:
        body = super().body
        body["error"]["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return body


class UnknownPath(RefusalError):  # noqa: N818
    status, kind = 404, "not_found_error"


class WrongToken(RefusalError):  # noqa: N818
    status, kind = 401, "authentication_error"


class OtherSite(RefusalError):  # noqa: N818
    """The call comes from a web page."""

    status, kind = 403, "permission_error"


class OtherHost(OtherSite):
    """The request names the host of another site."""

    status = 421


class Busy(RefusalError):  # noqa: N818
    """A limit is reached."""

    status, kind, retry_after_s = 503, "overloaded_error", 1.0


class Conflict(RefusalError):  # noqa: N818
    """The end of a trajectory contradicts its recorded state."""

    status = 409


class CallsUnderWay(Conflict):
    retry_after_s = 1.0


class TrajectoryOver(RefusalError):  # noqa: N818
    """The trajectory has ended or was dropped, and accepts no more calls."""

    status = 410


class TooLarge(RefusalError):  # noqa: N818
    status, kind = 413, "request_too_large"


class NotRecorded(RefusalError):  # noqa: N818
    """The engine's answer could not be recorded, and is not forwarded."""

    status, kind = 502, "api_error"


class EngineAway(RefusalError):  # noqa: N818
    status, kind, retry_after_s = 502, "api_error", 1.0


class EngineSlow(RefusalError):  # noqa: N818
    status, kind = 504, "timeout_error"
