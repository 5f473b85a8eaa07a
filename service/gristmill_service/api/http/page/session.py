"""Signing in to the page: the browser keeps the token where no script can read it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from gristmill.errors import UnauthenticatedError
from gristmill_service.access.caller import ANYONE
from gristmill_service.api.http.dependencies import ApiDep
from gristmill_service.api.http.guards.identified import COOKIE

router = APIRouter(prefix="/v1/session", tags=["page"])
_DAY_S = 24 * 60 * 60


class SignIn(BaseModel):
    token: str = Field(description="As in `authorization: Bearer TOKEN`.", max_length=8192, pattern=r"^[!-~]+$")


class SignedIn(BaseModel):
    name: str = Field(description="The caller's name.")
    roles: list[str] = Field(description="What it may do.")


@router.post("")
async def sign_in(request: Request, response: Response, body: SignIn, api: ApiDep) -> SignedIn:
    """Keeps a token for the page, as a cookie for a day."""
    found = await api.gate.identify(f"Bearer {body.token}")
    if found is ANYONE:
        raise UnauthenticatedError("the token is not known here; ask the service's operator for one")
    # A proxy may have taken off the encryption.
    schemes = (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(COOKIE, body.token, max_age=_DAY_S, httponly=True, samesite="strict", secure="https" in schemes)
    return SignedIn(name=found.name, roles=sorted(found.roles))


@router.delete("", status_code=204)
async def sign_out(response: Response) -> None:
    """Forgets the token."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
