"""JSON web tokens, as Kubernetes gives them to service accounts, checked against their issuer's keys."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gristmill.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from gristmill_service.access.caller import Caller
from gristmill_service.access.tokens import Callers

# No HMAC: its key would be the public one.
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# Clocks of a cluster differ by so much.
_LEEWAY_S = 10


class WebTokens:
    """jwks: a file, or the URL where the issuer publishes its keys, which are asked for again when a new one signs."""

    def __init__(self, jwks: str, issuer: str, audience: str) -> None:
        try:
            import jwt
        except ImportError:
            raise InvalidArgumentError("jwks needs PyJWT; pip install 'gristmill[jwt]'") from None
        self._jwt, self._issuer, self._audience = jwt, issuer, audience
        self._published = jwt.PyJWKClient(jwks, timeout=5) if "://" in jwks else None
        self._file = None if self._published else Path(jwks)
        if self._file is not None:
            self._keys()

    def caller(self, token: str, callers: Callers) -> Caller:
        """Raises UnauthenticatedError for a token that is not valid, or whose subject the file does not name."""
        jwt = self._jwt
        try:
            claims = jwt.decode(
                token,
                self._key(token),
                algorithms=_ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub", "aud", "iss"]},
            )
        except jwt.PyJWKClientConnectionError as error:
            raise UnavailableError(f"the keys of {self._issuer} cannot be had: {error}; retry") from None
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is not valid: {error}; get a new one") from None
        subject = str(claims["sub"])
        for entry in callers.subjects:
            if fnmatchcase(subject, entry.subject):
                return entry.caller(subject)
        raise UnauthenticatedError(f"no entry of tokens_file is for the subject {subject!r}; add one under subjects")

    def _key(self, token: str) -> Any:
        if self._published is not None:
            return self._published.get_signing_key_from_jwt(token)
        asked = self._jwt.get_unverified_header(token).get("kid")
        keys = self._keys()
        found = [key for key in keys if key.key_id == asked] if asked else keys
        if len(found) != 1:
            raise self._jwt.InvalidTokenError(f"no key {asked!r} in {self._file}")
        return found[0]

    def _keys(self) -> list[Any]:
        assert self._file is not None
        try:
            return list(self._jwt.PyJWKSet.from_dict(json.loads(self._file.read_text(encoding="utf-8"))).keys)
        except (OSError, ValueError, self._jwt.PyJWTError) as error:
            raise InvalidArgumentError(f"jwks: cannot read {self._file}: {error}; give a JWKS document") from None
