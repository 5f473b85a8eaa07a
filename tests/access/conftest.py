"""Services that ask for tokens, and show certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from gristmill_service.access.roles import ROLES
from gristmill_service.access.tokens import create_token
from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.serving import FREE_PORTS

Serve = Callable[..., Service]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts services with these settings more."""
    with ExitStack() as running:

        def start(**settings: Any) -> Service:
            service = Service(Settings(**(FREE_PORTS | {"store": "memory", "shutdown_grace_s": 5} | settings)))
            running.callback(service.stop)
            service.start()
            return service

        yield start


@dataclass(frozen=True)
class Files:
    """Certificates that one authority signed."""

    authority: trustme.CA
    directory: Path

    @property
    def ca_file(self) -> Path:
        path = self.directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(path))
        return path

    def certify(self, name: str) -> tuple[Path, Path]:
        """Writes a new certificate under the name, and its key."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(trustme.CA(), tmp_path)


@dataclass(frozen=True)
class Guarded:
    """A service that asks for tokens, and one token of each role, under its name."""

    service: Service
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens: dict[str, str] = {role: create_token(path, role, [role], ["r", "math-*"], None) for role in ROLES}
    tokens |= {f"rank {rank}": create_token(path, f"rank {rank}", ["trainer"], ["*"], rank) for rank in range(2)}
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, tokens_file=path))
    service.start()
    yield Guarded(service, tokens)
    service.stop()
