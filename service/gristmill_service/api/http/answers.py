"""How errors leave over HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse

from gristmill_service.api.errors import refusal

TOO_LARGE = 413
CLOSE = {"Connection": "close"}


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the answer to a call that raised this error. headers: sent with those of the error itself."""
    refused = refusal(error)
    headers = {**refused.headers, **(headers or {})}
    if refused.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refused.body, refused.http_status, headers)


def error_body(code: str, type_: str, message: str) -> dict[str, object]:
    """Returns the body of an answer whose status no error of ours has."""
    return {"error": {"code": code, "type": type_, "message": message}}
