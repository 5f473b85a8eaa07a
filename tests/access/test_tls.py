"""Connections are encrypted, certificates renewed without a restart, and clients asked for theirs where that is set."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from gristmill import Batch, RolloutClient, Shard, TrainerClient
from gristmill._client.connection.credentials import Credentials
from gristmill._wire.hosts import is_of_this_machine
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.access.certificates import Certificates, PeerCertificates
from gristmill_service.access.tokens import create_token
from gristmill_service.settings import load_settings
from tests.access.conftest import Files, Serve
from tests.client.faces import FACES, connecting
from tests.on_loop import Service
from tests.redis.servers import RedisServer
from tests.serving import StartService

CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}


def serial(address: str, ca_file: Path) -> str:
    """Of the certificate that is shown."""
    host, _, port = address.rpartition(":")
    shown = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), ca_certs=str(ca_file), timeout=10))
    return shown.hex()


def test_rollouts_are_trained_over_tls_by_the_environments_credentials(
    serve: Serve, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = files.certify("server")
    tokens = tmp_path / "tokens.yaml"
    token = create_token(tokens, "all", ["worker", "trainer"], ["*"], None)
    service = serve(tls_cert_file=cert, tls_key_file=key, tokens_file=tokens)
    monkeypatch.setenv("GRISTMILL_CA_FILE", str(files.ca_file))
    monkeypatch.setenv("GRISTMILL_TOKEN", token)
    with RolloutClient(service.grpc_address, "r") as client:
        client.create_run(CONFIG)
        with client.trajectory("a", 0) as trajectory:
            trajectory.step([1, 2], [3], reward=1.0, is_last_step=True)
        client.finish()
    with TrainerClient(service.grpc_address, "r", 0, auto_commit=True) as trainer:
        (uids,) = [shard.metadata["uids"] for batch in trainer for shard in _acknowledged(batch)]
    assert uids == ["a"]
    assert service.http_url.startswith("https://")
    context = ssl.create_default_context(cafile=files.ca_file)
    assert httpx.get(f"{service.http_url}/healthz", verify=context, trust_env=False).status_code == 200


def _acknowledged(batch: Batch) -> Iterator[Shard]:
    for shard in batch.mini_batches():
        yield shard
        shard.ack()


def test_a_client_that_does_not_know_the_authority_is_not_connected(serve: Serve, files: Files) -> None:
    cert, key = files.certify("server")
    service = serve(tls_cert_file=cert, tls_key_file=key)
    for credentials, error in ((Credentials(), InvalidArgumentError), (Credentials(tls=True), UnavailableError)):
        with (
            RolloutClient(service.grpc_address, "r", timeout_s=1, credentials=credentials) as client,
            pytest.raises(error),
        ):
            client.policy_version()


def test_a_renewed_certificate_is_shown_from_the_next_handshake_on(serve: Serve, files: Files) -> None:
    cert, key = files.certify("server")
    service = serve(tls_cert_file=cert, tls_key_file=key)
    apis = [service.grpc_address, urlsplit(service.http_url).netloc]
    before = [serial(api, files.ca_file) for api in apis]
    assert before[0] == before[1]
    # Half of a renewal: certificate and key do not fit together.
    old_key = key.read_bytes()
    files.certify("server")
    new_key = key.read_bytes()
    key.write_bytes(old_key)
    assert [serial(api, files.ca_file) for api in apis] == before
    key.write_bytes(new_key)
    os.utime(key, (time.time() + 1, time.time() + 1))
    after = [serial(api, files.ca_file) for api in apis]
    assert after[0] == after[1] != before[0]


def test_clients_show_a_certificate_where_the_service_asks_for_one(
    serve: Serve, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cert, key), (mine, my_key) = files.certify("server"), files.certify("client")
    service = serve(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=files.ca_file)
    service.runs.create("r", CONFIG)
    known = Credentials(ca_file=files.ca_file, cert_file=mine, key_file=my_key)
    with RolloutClient(service.grpc_address, "r", credentials=known) as client:
        assert client.policy_version() == 0
    with monkeypatch.context() as environment:
        for name, path in (("CA", files.ca_file), ("CERT", mine), ("KEY", my_key)):
            environment.setenv(f"GRISTMILL_{name}_FILE", str(path))
        with RolloutClient(service.grpc_address, "r") as client:
            assert client.policy_version() == 0
    with (
        RolloutClient(service.grpc_address, "r", timeout_s=1, credentials=Credentials(ca_file=files.ca_file)) as client,
        pytest.raises(UnavailableError),
    ):
        client.policy_version()
    context = ssl.create_default_context(cafile=files.ca_file)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{service.http_url}/healthz", verify=context, trust_env=False)
    context.load_cert_chain(mine, my_key)
    assert httpx.get(f"{service.http_url}/healthz", verify=context, trust_env=False).status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
@pytest.mark.parametrize("api", ["gRPC", "HTTP"])
def test_a_replaced_authority_of_clients_ends_the_sessions_of_its_clients(
    serve: Serve, files: Files, tmp_path: Path, api: str, version: ssl.TLSVersion
) -> None:
    (cert, key), (mine, my_key) = files.certify("server"), files.certify("client")
    authority = tmp_path / "clients.pem"
    authority.write_bytes(files.ca_file.read_bytes())
    service = serve(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=authority)
    context = ssl.create_default_context(cafile=files.ca_file)
    context.load_cert_chain(mine, my_key)
    context.maximum_version = version
    context.set_alpn_protocols(["h2" if api == "gRPC" else "http/1.1"])
    address = service.grpc_address if api == "gRPC" else urlsplit(service.http_url).netloc
    is_resumed, session = answered(address, context, None)
    assert not is_resumed
    if api == "HTTP":
        is_resumed, session = answered(address, context, session)
        assert is_resumed, "a session is resumed while its authority is the same"
    trustme.CA().cert_pem.write_to_path(str(authority))
    for known in (session, None):
        with pytest.raises((OSError, EOFError)):
            answered(address, context, known)


def answered(address: str, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession]:
    """Sends the first bytes of either protocol, which are answered once the client is known. Returns whether the
    session was resumed, and the session. Raises OSError or EOFError if the server ends the connection instead."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        is_http2 = connection.selected_alpn_protocol() == "h2"
        settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        connection.sendall(settings if is_http2 else b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not connection.recv(1000):
            raise EOFError
        assert connection.session is not None
        return bool(connection.session_reused), connection.session


def test_a_client_that_lives_on_shows_its_renewed_certificate_from_the_next_connection_on(
    serve: Serve, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill._client.connection.credentials._LOOK_S", 0.0)
    (tmp_path / "next").mkdir()
    following = Files(trustme.CA(), tmp_path / "next")
    (cert, key), (mine, my_key) = files.certify("server"), files.certify("client")
    tls = {"tls_cert_file": cert, "tls_key_file": key}
    first = serve(**tls, tls_client_ca_file=files.ca_file)
    first.runs.create("r", CONFIG)
    known = Credentials(ca_file=files.ca_file, cert_file=mine, key_file=my_key)
    with RolloutClient(first.grpc_address, "r", credentials=known) as client:
        assert client.policy_version() == 0
        first.stop()
        renewed = following.certify("client")
        for path, new in zip((mine, my_key), renewed, strict=True):
            new.replace(path)
        second = serve(**tls, tls_client_ca_file=following.ca_file, grpc_address=first.grpc_address)
        second.runs.create("r", CONFIG)
        assert client.policy_version() == 0


def test_what_services_show_each_other_is_renewed_when_it_is_whole(files: Files) -> None:
    cert, key = files.certify("server")
    peers = PeerCertificates(Certificates(cert, key, None), files.ca_file)
    before, context = peers.credentials(), peers.context()
    assert peers.credentials() is before
    old_key = key.read_bytes()
    files.certify("server")
    new_key = key.read_bytes()
    key.write_bytes(old_key)
    assert peers.credentials() is before, "certificate and key do not fit together"
    key.write_bytes(new_key)
    os.utime(key, (time.time() + 1, time.time() + 1))
    assert peers.credentials() is not before
    assert peers.context() is context


def test_services_on_redis_pass_calls_on_over_tls_with_the_callers_own_token(
    start_service: StartService, files: Files, tmp_path: Path
) -> None:
    cert, key = files.certify("server")
    tokens, ca = tmp_path / "tokens.yaml", files.ca_file
    worker, viewer = (create_token(tokens, name, [name], ["*"], None) for name in ("worker", "viewer"))
    tls = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-client-ca-file", ca, "--tls-peer-ca-file", ca)
    with RedisServer(tmp_path / "redis", appendonly="no") as redis:
        flags = [*map(str, tls), "--tokens-file", str(tokens), "--store", "redis", "--redis-url", redis.url]
        owner, other = start_service(*flags), start_service(*flags)
        shown = Credentials(token=worker, ca_file=ca, cert_file=cert, key_file=key)
        with RolloutClient(owner.grpc_address, "r", credentials=shown) as client:
            client.create_run(CONFIG)
        with RolloutClient(other.grpc_address, "r", credentials=shown) as client:
            assert client.begin_groups(["a"], wait_s=0) == ["a"]
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(cert, key)
        for token, expected in ((worker, 200), (viewer, 403)):
            response = httpx.post(
                f"{other.http_url}/v1/runs/r/groups",
                json={"uids": ["b"]},
                headers={"authorization": f"Bearer {token}"},
                verify=context,
                trust_env=False,
            )
            assert response.status_code == expected
        assert [service.stop() for service in (owner, other)] == [0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grpc_address": "0.0.0.0:1"}, "grpc_address: other machines can reach 0.0.0.0:1"),
        ({"http_address": "[::]:1"}, "http_address: other machines can reach"),
        ({"grpc_address": "example.org:1"}, "tls_cert_file, tls_key_file and tokens_file; set them, or set insecure"),
        ({"tls_cert_file": "a"}, "tls_cert_file and tls_key_file must be set together"),
        ({"tls_client_ca_file": "a"}, "need tls_cert_file and tls_key_file"),
        ({"jwks": "a"}, "jwks needs jwt_issuer, jwt_audience, and tokens_file"),
        ({"jwt_issuer": "a"}, "need jwks"),
    ],
)
def test_settings_that_would_leave_an_api_open_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_settings(settings)


def test_by_default_the_service_listens_on_its_own_machine_alone() -> None:
    settings = load_settings({})
    assert all(is_of_this_machine(address) for address in (settings.grpc_address, settings.http_address))
    assert settings.probe_address is None


@pytest.mark.filterwarnings("ignore:.*TLSv1:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1], ids=lambda version: version.name)
def test_versions_of_tls_before_1_2_are_refused_by_both_apis(
    serve: Serve, files: Files, version: ssl.TLSVersion
) -> None:
    cert, key = files.certify("server")
    service = serve(tls_cert_file=cert, tls_key_file=key)
    for address in (service.grpc_address, urlsplit(service.http_url).netloc):
        for last, is_taken in ((ssl.TLSVersion.TLSv1_2, True), (version, False)):
            context = ssl.create_default_context(cafile=files.ca_file)
            # OpenSSL offers the old versions only at this level.
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.set_alpn_protocols(["h2", "http/1.1"])
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, last
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as plain:
                if is_taken:
                    context.wrap_socket(plain, server_hostname="localhost").close()
                else:
                    with pytest.raises(OSError, match=r"PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL|EOF|reset"):
                        context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/gristmill.sock"])
def test_this_machine_alone_needs_nothing(address: str) -> None:
    assert load_settings({"grpc_address": address}).grpc_address == address


def test_a_service_that_says_insecure_listens_anywhere() -> None:
    assert load_settings({"grpc_address": "0.0.0.0:1", "insecure": True}).insecure


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_files_that_are_no_certificates_are_refused_at_the_start(serve: Serve, files: Files, content: bytes) -> None:
    cert, key = files.certify("server")
    key.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="are not a certificate and its key"):
        serve(tls_cert_file=cert, tls_key_file=key)
    key.unlink()
    with pytest.raises(InvalidArgumentError, match="tls_key_file: cannot read"):
        serve(tls_cert_file=cert, tls_key_file=key)


def test_a_service_without_tls_serves_a_client_without(service: Service, run_name: str) -> None:
    service.runs.create(run_name, CONFIG)
    with RolloutClient(service.grpc_address, run_name, credentials=Credentials()) as client:
        assert client.policy_version() == 0


@pytest.mark.parametrize("face", FACES)
def test_a_client_without_tls_at_a_port_with_it_and_the_reverse_are_refused_at_once(
    serve: Serve, service: Service, files: Files, face: str
) -> None:
    cert, key = files.certify("server")
    encrypted = serve(tls_cert_file=cert, tls_key_file=key)
    trusting = Credentials(ca_file=files.ca_file)
    began = time.monotonic()
    with connecting(face) as connect:
        with (
            connect(encrypted.grpc_address, "r", timeout_s=60, credentials=Credentials()) as client,
            pytest.raises(InvalidArgumentError, match="the service expects TLS, and the client does not use it"),
        ):
            client.status()
        with connect(service.grpc_address, "r", timeout_s=60, credentials=trusting) as client:
            with pytest.raises(InvalidArgumentError, match="and the service does not use TLS"):
                client.status()
            client.trajectory("a", 0, policy_version=0).step([1], [2])
            with pytest.raises(InvalidArgumentError, match="and the service does not use TLS"):
                client.flush()
        client = connect(encrypted.grpc_address, "r", timeout_s=60, credentials=Credentials())
        client.trajectory("a", 0, policy_version=0).step([1], [2])
        with pytest.raises(InvalidArgumentError, match="the service expects TLS"):
            client.__exit__(None, None, None)
    with (
        TrainerClient(encrypted.grpc_address, "r", 0, timeout_s=60, credentials=Credentials()) as trainer,
        pytest.raises(InvalidArgumentError, match="the service expects TLS"),
    ):
        next(iter(trainer))
    assert time.monotonic() - began < 50
