"""Verifies JSON web tokens, such as those of Kubernetes service accounts, with their issuer's keys."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import structlog

from gristmill.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from gristmill_service.access.caller import Caller
from gristmill_service.access.tokens import Callers, digest_of, version_of

_log = structlog.get_logger(__name__)

# Excludes HMAC, with which the public key would be accepted as a shared secret.
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# The allowed clock difference.
_LEEWAY_S = 10
_MOST_KNOWN = 4096
_KEEP_S = 300.0
# The minimum interval between requests to the issuer, also if many tokens have unknown keys.
_PAUSE_S = 5.0
# Limits of the issuer's answer: seconds without a byte, seconds in all, and bytes.
_SILENT_S, _ANSWER_S, _ANSWER_BYTES = 5.0, 20.0, 1 << 20
# Statuses with which an issuer refuses permanently, so that a retry does not help.
_REFUSED = frozenset([400, 401, 403, 404, 405, 410])

_KeysByName = dict[str, Any]


class WebTokens:
    """Verifies tokens, and knows those that it verified until they expire or the issuer's keys change.

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
        self._keys = _PublishedKeys(jwks, ca_file) if "://" in jwks else _KeysFile(Path(jwks))
        self._verified_by: _KeysByName = {}
        self._verified: dict[str, tuple[str, int]] = {}

    def known(self, token: str, callers: Callers) -> Caller | None:
        """Returns the caller with a token that was verified before; None for another token. Raises UnauthenticatedError
        if its subject is unknown."""
        if (keys := self._keys.latest()) is not self._verified_by:
            self._verified_by, self._verified = keys, {}
        subject, expiry = self._verified.get(digest_of(token), ("", 0))
        return _caller(subject, callers) if time.time() < expiry + _LEEWAY_S else None

    async def caller(self, token: str, callers: Callers) -> Caller:
        """Verifies a token on the event loop, in 0.1 to 0.6 ms. Returns its caller. Raises UnauthenticatedError for an
        invalid token or an unknown subject."""
        jwt = self._jwt
        try:
            claims = jwt.decode(
                token,
                await self._keys.key(jwt.get_unverified_header(token).get("kid")),
                algorithms=_ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub", "aud", "iss"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is invalid: {error}; request a new token") from None
        if len(self._verified) >= _MOST_KNOWN:
            self._verified.clear()
        self._verified[digest_of(token)] = str(claims["sub"]), int(claims["exp"])
        return _caller(str(claims["sub"]), callers)


def _caller(subject: str, callers: Callers) -> Caller:
    if identity := callers.with_subject(subject):
        return identity
    raise UnauthenticatedError(f"the subject {subject!r} is not in tokens_file; add an entry under subjects")


def _parsed(document: bytes) -> _KeysByName:
    """Returns the keys for signatures of a JWKS document, by name. Raises ValueError, RecursionError or PyJWTError."""
    import jwt

    content = json.loads(document)
    if not isinstance(content, dict):
        raise ValueError("not a JWKS document")
    keys = jwt.PyJWKSet.from_dict(content).keys
    return {str(key.key_id or ""): key for key in keys if key.public_key_use in ("sig", None)}


class _KeysFile:
    """The keys in a file, reloaded when it changes. While it is unreadable, the previous keys stay valid."""

    def __init__(self, path: Path) -> None:
        import jwt

        self._jwt, self._path = jwt, path
        self._version = version_of(self._path)
        self._keys = self._read()

    def latest(self) -> _KeysByName:
        """Returns the keys: the same object until they change."""
        if (version := version_of(self._path)) != self._version:
            self._version = version
            try:
                self._keys = self._read()
            except InvalidArgumentError as error:
                _log.error("keys cannot be read; previous keys stay valid", reason=str(error))
        return self._keys

    async def key(self, name: object) -> Any:
        """Returns a key. Raises a PyJWTError for an unknown key."""
        keys = self.latest()
        if not name and len(keys) == 1:
            return next(iter(keys.values()))
        if (key := keys.get(str(name))) is None:
            raise self._jwt.InvalidTokenError(f"no key {str(name)[:100]!r} in {self._path}")
        return key

    def _read(self) -> _KeysByName:
        try:
            return _parsed(self._path.read_bytes())
        except (OSError, ValueError, RecursionError, self._jwt.PyJWTError) as error:
            raise InvalidArgumentError(f"jwks: cannot read {self._path}: {error}; pass a JWKS document") from None


def _context(ca_file: Path | None) -> ssl.SSLContext | None:
    try:
        return None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(f"jwks_ca_file: cannot read {ca_file}: {error}; pass a PEM file") from None


class _PublishedKeys:
    """The keys at an issuer's URL. Only one call at a time requests them, while others use the known keys, so that an
    issuer that hangs blocks only one thread."""

    def __init__(self, url: str, ca_file: Path | None) -> None:
        import jwt

        self._jwt, self._url, self._context = jwt, url, _context(ca_file)
        self._document: bytes | None = None
        self._keys = _KeysByName()
        self._asking: asyncio.Future[None] | None = None
        self._asked, self._failure, self._is_refused = float("-inf"), "the request is still running", False

    def latest(self) -> _KeysByName:
        """Returns the keys: the same object until they change."""
        self._refresh(_KEEP_S)
        return self._keys

    async def key(self, name: object) -> Any:
        """Returns a key. Raises a PyJWTError for an unknown key, UnavailableError if the issuer does not answer, and
        UnauthenticatedError if it refuses the request."""
        key = self._keys.get(str(name))
        if (asking := self._refresh(_PAUSE_S if key is None else _KEEP_S)) is not None:
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

    def _refresh(self, oldest_s: float) -> asyncio.Future[None] | None:
        """Begins a request to the issuer if the last answer is older. Returns the request; None if none was begun."""
        if self._asking is not None or time.monotonic() - self._asked < oldest_s:
            return None
        self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask))
        self._asking.add_done_callback(self._end)
        return self._asking

    def _end(self, _: object) -> None:
        self._asking = None

    def _ask(self) -> None:
        """Fetches the keys. If the issuer does not answer with keys, the previous keys stay valid."""
        before = self._failure
        try:
            if (document := self._fetched()) != self._document:
                self._keys, self._document = _parsed(document), document
            self._failure, self._is_refused = "", False
        except (self._jwt.PyJWTError, OSError, ValueError, RecursionError) as error:
            self._failure = str(error)[:200] or type(error).__name__
            self._is_refused = isinstance(error, HTTPError) and error.code in _REFUSED
        if self._failure not in ("", before):
            _log.error("keys cannot be fetched; known keys stay valid", jwks=self._url, reason=self._failure)
        self._asked = time.monotonic()

    def _fetched(self) -> bytes:
        document, began = b"", time.monotonic()
        with urlopen(self._url, timeout=_SILENT_S, context=self._context) as answer:  # noqa: S310 - the operator's URL
            while part := answer.read1(_ANSWER_BYTES):
                document += part
                if len(document) > _ANSWER_BYTES or time.monotonic() - began > _ANSWER_S:
                    raise OSError(f"the answer exceeds {_ANSWER_BYTES} bytes or {_ANSWER_S:g} s")
        return document
