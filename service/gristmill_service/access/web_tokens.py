"""Verifies JSON web tokens, such as those of Kubernetes service accounts, with their issuer's keys."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import structlog

from gristmill.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from gristmill_service.access.caller import Caller
from gristmill_service.access.tokens import Callers

_log = structlog.get_logger(__name__)

# Excludes HMAC, with which the public key would be accepted as a shared secret.
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# The allowed clock difference.
_LEEWAY_S = 10
_KEEP_S = 300.0
# The minimum interval between requests to the issuer, also if many tokens have unknown keys.
_PAUSE_S = 5.0
# Statuses with which an issuer refuses permanently, so that a retry does not help.
_REFUSED = frozenset([400, 401, 403, 404, 405, 410])


class WebTokens:
    """Verifies tokens.

    jwks: a file, or the URL at which the issuer publishes its keys; fetched again when a token has an unknown key.
    ca_file: the CA certificate for that URL's host; None: Python's default CAs.
    """

    def __init__(self, jwks: str, issuer: str, audience: str, ca_file: Path | None = None) -> None:
        try:
            import jwt
        except ImportError:
            raise InvalidArgumentError(
                "jwks needs PyJWT, not installed; pip install '.[jwt]' in the checkout"
            ) from None
        self._jwt, self._issuer, self._audience = jwt, issuer, audience
        self._published = _Published(jwks, ca_file) if "://" in jwks else None
        self._file = None if self._published else Path(jwks)
        if self._file is not None:
            self._keys()

    async def caller(self, token: str, callers: Callers) -> Caller:
        """Returns the caller. Raises UnauthenticatedError for an invalid token or an unknown subject."""
        jwt = self._jwt
        try:
            claims = jwt.decode(
                token,
                await self._key(token),
                algorithms=_ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub", "aud", "iss"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is invalid: {error}; request a new token") from None
        subject = str(claims["sub"])
        if identity := callers.with_subject(subject):
            return identity
        raise UnauthenticatedError(f"the subject {subject!r} is not in tokens_file; add an entry under subjects")

    async def _key(self, token: str) -> Any:
        asked = self._jwt.get_unverified_header(token).get("kid")
        if self._published is not None:
            return await self._published.key(asked)
        keys = await asyncio.to_thread(self._keys)
        matches = [key for key in keys if key.key_id == asked] if asked else keys
        if len(matches) != 1:
            raise self._jwt.InvalidTokenError(f"no key {asked!r} in {self._file}")
        return matches[0]

    def _keys(self) -> list[Any]:
        assert self._file is not None
        try:
            return list(self._jwt.PyJWKSet.from_dict(json.loads(self._file.read_text(encoding="utf-8"))).keys)
        except (OSError, ValueError, self._jwt.PyJWTError) as error:
            raise InvalidArgumentError(f"jwks: cannot read {self._file}: {error}; pass a JWKS document") from None


def _context(ca_file: Path | None) -> ssl.SSLContext | None:
    try:
        return None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(f"jwks_ca_file: cannot read {ca_file}: {error}; pass a PEM file") from None


class _Published:
    """An issuer's keys. Only one call at a time requests keys from the issuer, while others use the known keys, so that
    an issuer that hangs blocks only one thread."""

    def __init__(self, url: str, ca_file: Path | None) -> None:
        import jwt

        self._jwt, self._url = jwt, url
        self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=5, ssl_context=_context(ca_file))
        self._keys: dict[str, Any] = {}
        self._is_asking = False
        self._asked, self._failure, self._is_refused = float("-inf"), "the request is still running", False

    async def key(self, name: object) -> Any:
        """Returns a key. For an unknown key, raises UnavailableError if the issuer does not answer, and
        UnauthenticatedError if the issuer refuses the request."""
        key, age = self._keys.get(str(name)), time.monotonic() - self._asked
        if age >= (_PAUSE_S if key is None else _KEEP_S) and not self._is_asking:
            self._is_asking = True
            asking = asyncio.ensure_future(asyncio.to_thread(self._ask))
            asking.add_done_callback(self._end)
            # The answer is stored even if the caller disconnects in the meantime.
            await asyncio.shield(asking)
            key = self._keys.get(str(name))
        if key is not None:
            return key
        if self._is_refused:
            raise UnauthenticatedError(
                f"the token cannot be verified: the issuer refuses access to its keys at {self._url}: {self._failure}; "
                "let the service read them (docs/security.md)"
            )
        if self._failure:
            raise UnavailableError(f"the keys at {self._url} cannot be fetched: {self._failure}; retry")
        raise self._jwt.InvalidTokenError(f"no key {str(name)[:100]!r} at {self._url}")

    def _end(self, _: object) -> None:
        self._is_asking = False

    def _ask(self) -> None:
        """Fetches the keys. If the issuer does not answer with keys, the previous keys stay valid."""
        before = self._failure
        try:
            self._keys = {str(key.key_id): key for key in self._client.get_signing_keys()}
            self._failure, self._is_refused = "", False
        except (self._jwt.PyJWTError, OSError, ValueError, RecursionError) as error:
            self._failure = str(error)[:200] or type(error).__name__
            cause = error.__cause__
            self._is_refused = isinstance(cause, HTTPError) and cause.code in _REFUSED
        if self._failure not in ("", before):
            _log.error("keys cannot be fetched; known keys stay valid", jwks=self._url, reason=self._failure)
        self._asked = time.monotonic()
