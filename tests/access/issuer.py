"""An issuer of JSON web tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

SUBJECT = "system:serviceaccount:rl:trainer-0"


class Issuer:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "jwks.json"
        self.keys: list[dict[str, Any]] = []
        self.rotate()

    def rotate(self) -> None:
        """Signs with a new key from now on."""
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._id = f"key-{len(self.keys)}"
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        self.keys.append({**public, "kid": self._id, "use": "sig", "alg": "RS256"})
        self.path.write_text(json.dumps({"keys": self.keys}))

    def token(self, **claims: Any) -> str:
        payload = {"sub": SUBJECT, "iss": "https://issuer", "aud": "gristmill", "exp": time.time() + 600} | claims
        held = {name: value for name, value in payload.items() if value is not None}
        return jwt.encode(held, self._key, "RS256", headers={"kid": self._id})
