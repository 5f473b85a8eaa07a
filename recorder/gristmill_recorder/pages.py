"""Refuses the calls of web pages: any site could otherwise call a recorder on the machine of its visitor."""

from __future__ import annotations

from aiohttp import web

from gristmill._wire.browsers import READS, HostNames, is_of_other_site
from gristmill_recorder.refusals import OtherHost, OtherSite
from gristmill_recorder.settings import RecorderSettings

_PREFLIGHT_S = 600


class Pages:
    """Decides which pages may call. Pages of `allowed_origins` may, and read the answers (CORS)."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._names, self._origins = HostNames(settings.http_host_names.split(",")), settings.origins

    def check(self, request: web.Request) -> None:
        """Raises OtherHost for a request under the host name of another site, and OtherSite for a call of a page."""
        host = request.headers.get("host", "")
        if not self._names.has(host):
            raise OtherHost(f"the host {host[:100]!r} is not a name of this recorder; add it to --http-host-names")
        if request.method not in READS and is_of_other_site(request.headers) and not self._is_allowed(request):
            raise OtherSite(
                f"the call comes from a web page, of origin {request.headers.get('origin', '')[:100]!r}; call the "
                "recorder from a program, or add the origin to --allowed-origins"
            )

    def preflight(self, request: web.Request) -> web.Response | None:
        """Returns the answer to a browser that asks whether an allowed page may make a call; None for other
        requests."""
        if request.method != "OPTIONS" or not self._is_allowed(request):
            return None
        allowed = {"methods": "GET, POST", "headers": request.headers.get("access-control-request-headers", "")}
        headers = {f"access-control-allow-{name}": value for name, value in allowed.items()}
        return web.Response(status=204, headers={**headers, "access-control-max-age": str(_PREFLIGHT_S)})

    async def share(self, request: web.Request, response: web.StreamResponse) -> None:
        """Lets an allowed page read the answer. A signal of aiohttp before an answer begins."""
        if self._is_allowed(request):
            origin = {"access-control-allow-origin": request.headers["origin"], "vary": "origin"}
            response.headers.update({**origin, "access-control-expose-headers": "*"})

    def _is_allowed(self, request: web.Request) -> bool:
        return request.headers.get("origin") in self._origins
