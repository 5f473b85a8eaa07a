"""No client sends its token to another machine in plain text, unless it is set to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill import AsyncRolloutClient, Credentials, InvalidArgumentError, RolloutClient, TrainerClient
from gristmill._client.connection.transport import Transport
from gristmill_recorder.server import serve
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.cli.checks import trust
from gristmill_service.settings import load
from tests.access.conftest import Files
from tests.cli.terminal import gristmill

OTHERS = ["gristmill:50051", "10.0.0.7:50051", "[2001:db8::1]:50051", "127.0.0.1.example.org:1", "localhost.example:1"]
OWN = ["127.0.0.1:1", "127.8.0.1:1", "localhost:1", "[::1]:1", "unix:/run/gristmill", "localhost:1,unix:/run/gristmill"]
CLIENTS: dict[str, Callable[[str, Credentials | None], Any]] = {
    "rollout": lambda address, credentials: RolloutClient(address, "r", credentials=credentials),
    "trainer": lambda address, credentials: TrainerClient(address, "r", 0, credentials=credentials),
    "commands": lambda address, credentials: Transport(address, 1.0, "test", credentials),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("address", [*OTHERS, f"127.0.0.1:1,{OTHERS[0]}"])
def test_a_token_is_not_sent_to_another_machine_in_plain_text(client: str, address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"in plain text; set ca_file .*tls=False \(GRISTMILL_TLS=0\)") as no:
        CLIENTS[client](address, Credentials(token="secret"))
    assert f"sent to {address.rpartition(',')[2]} in plain text" in str(no.value)
    assert "secret" not in str(no.value)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_token_of_the_environment_is_not_either(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("GRISTMILL_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(InvalidArgumentError, match="in plain text"):
        CLIENTS[client](OTHERS[0], None)
    monkeypatch.setenv("GRISTMILL_TLS", "0")
    CLIENTS[client](OTHERS[0], None).close()


def test_nor_do_the_client_for_asyncio_and_the_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_TOKEN", "secret")
    settings = load(RecorderSettings, {"upstream": "http://vllm", "address": OTHERS[0], "journal": tmp_path / "j"})

    async def connect() -> None:
        AsyncRolloutClient(OTHERS[0], "r")

    for work in (connect(), serve(settings)):
        with pytest.raises(InvalidArgumentError, match="in plain text"):
            asyncio.run(work)


@pytest.mark.parametrize("command", ["status", "top", "tail r", "runs delete r --yes", "export r 0 --out x"])
def test_nor_does_a_command(command: str) -> None:
    done = gristmill(*command.split(), "--address", OTHERS[0], GRISTMILL_TOKEN="secret")
    assert done.returncode != 0
    assert "sent to gristmill:50051 in plain text" in done.stderr


def test_nor_does_doctor_which_reports_it() -> None:
    done = gristmill("doctor", "--address", OTHERS[0], GRISTMILL_TOKEN="secret")
    assert done.returncode == 1
    assert "WRONG  credentials: token: it would be sent to gristmill:50051 in plain text" in done.stdout


def test_a_certificate_that_nobody_vouches_for_gets_no_token() -> None:
    assert trust(Credentials(token="secret")).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("address", OWN)
def test_it_is_sent_within_the_machine(address: str) -> None:
    RolloutClient(address, "r", credentials=Credentials(token="secret")).close()


def test_it_is_sent_where_the_connection_is_encrypted_or_said_to_be_safe(files: Files) -> None:
    for safe in (
        Credentials(ca_file=files.ca_file, token="a"),
        *(Credentials(tls=tls, token="a") for tls in (False, True)),
    ):
        RolloutClient(OTHERS[0], "r", credentials=safe).close()
    RolloutClient(OTHERS[0], "r", credentials=Credentials()).close()


@pytest.mark.parametrize("value", ["true", "yes", "2", "00"])
def test_a_misspelled_variable_does_not_turn_encryption_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_TLS", value)
    with pytest.raises(InvalidArgumentError, match=f"GRISTMILL_TLS is '{value}'; set it to 1 or 0"):
        Credentials()
