"""Tokens: made on the command line, kept as digests, read again when their file changes; and those of an issuer."""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
import stat
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import structlog
import yaml
from structlog.testing import capture_logs

from gristmill import RolloutClient
from gristmill._client.connection.credentials import Credentials
from gristmill.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from gristmill_service.access.tokens import Callers, create_token, digest_of, read_callers
from gristmill_service.access.web_tokens import WebTokens
from tests.access.conftest import Files, Serve
from tests.access.issuer import SUBJECT, Issuer
from tests.cli.terminal import gristmill
from tests.on_loop import Service, on_loop
from tests.run.harness import wait_until


def status(service: Service, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.get(f"{service.http_url}/v1/runs", headers=headers, trust_env=False).status_code


def test_the_command_prints_a_token_and_keeps_only_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    made = gristmill("token", "create", "rollouts", "--role", "worker", "--run", "math-*", "--tokens-file", path)
    assert (made.returncode, made.stderr) == (0, "")
    token = made.stdout.strip()
    assert yaml.safe_load(path.read_text())["tokens"] == [
        {
            "roles": ["worker"],
            "runs": ["math-*"],
            "name": "rollouts",
            "sha256": hashlib.sha256(token.encode()).hexdigest(),
        }
    ]
    assert token not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = gristmill("token", "create", "rollouts", "--role", "viewer", "--tokens-file", path)
    assert again.returncode == 1
    assert "has a token named 'rollouts'" in again.stderr
    caller = read_callers(path).with_token(token)
    assert caller is not None
    assert (caller.name, list(caller.roles)) == ("rollouts", ["worker"])
    assert (caller.sees("math-1"), caller.sees("other")) == (True, False)


def test_tokens_that_are_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    names = [f"caller-{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        tokens = list(pool.map(lambda name: create_token(path, name, ["worker"], ["*"], None), names))
    callers = read_callers(path)
    assert [getattr(callers.with_token(token), "name", None) for token in tokens] == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tokens: [{name: a, sha256: abc, roles: [worker]}]", r"tokens\.0\.sha256: string should match"),
        (f"tokens: [{{name: a, sha256: {'0' * 64}, roles: [king]}}]", r"tokens\.0\.roles\.0: input should be 'worker'"),
        (f"tokens: [{{name: a, sha256: {'0' * 64}, roles: []}}]", r"tokens\.0\.roles: list should have at least 1"),
        ("people: []", "people: extra inputs are not permitted"),
        ("tokens: [", "cannot read the tokens"),
        ("- a", "input should be"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_its_values(
    serve: Serve, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        serve(tokens_file=path)
    assert "abc" not in str(refused.value)


def test_a_file_that_changes_is_read_again_and_a_broken_one_leaves_who_was_known(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    first = create_token(path, "first", ["viewer"], ["*"], None)
    service = serve(tokens_file=path)
    second = create_token(path, "second", ["viewer"], ["*"], None)
    assert [status(service, token) for token in (first, second)] == [200, 200]
    path.write_text("tokens: [")
    assert [status(service, token) for token in (first, second)] == [200, 200]
    path.write_text("tokens: []")
    assert [status(service, token) for token in (first, second)] == [401, 401]


def test_a_client_reads_its_token_file_again(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mine = tmp_path / "tokens.yaml", tmp_path / "token"
    mine.write_text(create_token(path, "first", ["worker"], ["*"], None) + "\n")
    service = serve(tokens_file=path)
    service.runs.create(
        "r", {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
    )
    monkeypatch.setattr("gristmill._client.connection.credentials._LOOK_S", 0.0)
    monkeypatch.setenv("GRISTMILL_TOKEN_FILE", str(mine))
    with RolloutClient(service.grpc_address, "r") as client:
        assert client.status().run == "r"
        path.unlink()
        mine.write_text(create_token(path, "second", ["worker"], ["*"], None))
        assert client.status().run == "r"
        mine.write_text("stale")
        with pytest.raises(UnauthenticatedError, match="the token is unknown"):
            client.status()


def test_a_token_is_shown_by_no_representation() -> None:
    assert "secret" not in repr(Credentials(token="secret"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token": "a", "token_file": "b"}, "token and token_file are both set"),
        ({"cert_file": "a"}, "only one of cert_file and key_file is set"),
        ({"token": "a\nb"}, "characters that a header cannot contain"),
        ({"token_file": "/nowhere/token"}, "token_file: cannot read /nowhere/token"),
    ],
)
def test_credentials_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        Credentials(**settings)
    assert "a\nb" not in str(refused.value)


# JSON web tokens.

CALLERS = Callers.model_validate({"subjects": [{"subject": SUBJECT, "roles": ["trainer"]}]})


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


@pytest.fixture
def trusting(serve: Serve, tmp_path: Path, issuer: Issuer) -> Service:
    """A service that takes the issuer's tokens for service accounts of the namespace rl."""
    path = tmp_path / "tokens.yaml"
    path.write_text("subjects: [{subject: 'system:serviceaccount:rl:trainer-*', roles: [trainer], runs: ['math-*']}]")
    return serve(tokens_file=path, jwks=str(issuer.path), jwt_issuer="https://issuer", jwt_audience="gristmill")


def test_a_service_accounts_token_has_its_subjects_roles(trusting: Service, issuer: Issuer) -> None:
    assert status(trusting, issuer.token()) == 200
    assert status(trusting, issuer.token(aud=["other", "gristmill"])) == 200
    assert status(trusting, issuer.token(exp=time.time() - 1)) == 200, "clocks differ"
    issuer.rotate()
    assert status(trusting, issuer.token()) == 200
    headers = {"authorization": f"Bearer {issuer.token()}"}
    response = httpx.delete(f"{trusting.http_url}/v1/runs/math-1", headers=headers, trust_env=False)
    assert response.status_code == 403
    assert SUBJECT in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1000},
        {"exp": None},
        {"aud": "other"},
        {"aud": None},
        {"iss": "https://other"},
        {"sub": "system:serviceaccount:other:trainer-0"},
        {"sub": None},
        {"nbf": 1 << 40},
    ],
    ids=str,
)
def test_a_token_that_is_not_for_us_is_refused(trusting: Service, issuer: Issuer, claims: dict[str, Any]) -> None:
    assert status(trusting, issuer.token(**claims)) == 401


def test_neither_unsigned_nor_foreign_nor_symmetric_signatures_are_taken(
    trusting: Service, issuer: Issuer, tmp_path: Path
) -> None:
    header, payload, signature = issuer.token().split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","kid":"key-0"}').rstrip(b"=").decode()
    other = Issuer(Path(os.fspath(tmp_path)) / "..")
    other.path.unlink()
    claims = {"sub": SUBJECT, "iss": "https://issuer", "aud": "gristmill", "exp": time.time() + 600}
    symmetric = jwt.encode(claims, b"0" * 32, "HS256", headers={"kid": "key-0"})
    forged = payload[:-4] + "AAAA"
    for token in (f"{none}.{payload}.", other.token(), symmetric, f"{header}.{forged}.{signature}", "a.b.c"):
        assert status(trusting, token) == 401


def test_a_verified_token_is_known_until_it_expires_or_the_keys_change(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now = WebTokens(str(issuer.path), "https://issuer", "gristmill"), time.time()
    token = issuer.token(exp=now + 60)
    assert keys.known(token, CALLERS) is None
    assert on_loop(keys.caller, token, CALLERS).name == SUBJECT
    known = keys.known(token, CALLERS)
    assert known is not None
    assert known.name == SUBJECT
    with pytest.raises(UnauthenticatedError, match="is not in tokens_file"):
        keys.known(token, Callers())
    monkeypatch.setattr("gristmill_service.access.web_tokens.time.time", lambda: now + 60 + 11)
    assert keys.known(token, CALLERS) is None
    monkeypatch.undo()
    assert keys.known(token, CALLERS) == known
    issuer.rotate()
    assert keys.known(token, CALLERS) is None
    assert on_loop(keys.caller, token, CALLERS) == known


def test_a_token_that_is_known_ends_soon_after_its_issuer_withdraws_the_key(
    publisher: tuple[str, type[Publisher]], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = publisher
    handler.content = issuer.path.read_bytes()
    keys, token = WebTokens(url, "https://issuer", "gristmill"), issuer.token()
    assert on_loop(keys.caller, token, CALLERS).name == SUBJECT
    issuer.keys.clear()
    issuer.rotate()
    handler.content = issuer.path.read_bytes()
    monkeypatch.setattr("gristmill_service.access.web_tokens._KEEP_S", 0.0)

    async def known() -> object:
        return keys.known(token, CALLERS)

    wait_until(lambda: on_loop(known) is None)


def test_web_tokens_without_their_package_are_refused_at_the_start(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(InvalidArgumentError, match="jwks needs PyJWT"):
        WebTokens(str(issuer.path), "https://issuer", "gristmill")


def test_keys_that_cannot_be_read_leave_those_before(trusting: Service, issuer: Issuer) -> None:
    first, document = issuer.token(), issuer.path.read_bytes()
    for content in (b"", b"[]", b"[" * 100_000, b"\xff", document[:-9]):
        issuer.path.write_bytes(content)
        assert [status(trusting, token) for token in (first, issuer.token(), "a.b.c")] == [200, 200, 401]
    issuer.path.unlink()
    assert status(trusting, issuer.token()) == 200


def test_an_issuer_that_sends_its_keys_byte_by_byte_is_not_waited_for(
    publisher: tuple[str, type[Publisher]], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = publisher
    handler.content = issuer.path.read_bytes()
    monkeypatch.setattr("gristmill_service.access.web_tokens._ANSWER_S", 0.0)
    with pytest.raises(UnavailableError, match="the answer exceeds"):
        on_loop(WebTokens(url, "https://issuer", "gristmill").caller, issuer.token(), CALLERS)


SECRET = "gristmill_put_here_in_place_of_its_digest"


@pytest.mark.parametrize(
    "content",
    [
        f"tokens:\n - name: a\n   sha256: {SECRET}]: [x",
        f"tokens: [{{name: 2026-13-01, sha256: {SECRET}}}]",
        "[" * 5000,
        "",
        "\x00",
    ],
    ids=["broken", "no date", "deep", "empty", "no text"],
)
def test_a_file_that_cannot_be_read_leaves_who_was_known_and_is_not_logged(
    serve: Serve, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "tokens.yaml"
    token = create_token(path, "first", ["viewer"], ["*"], None)
    service = serve(tokens_file=path)
    with structlog.testing.capture_logs() as lines:
        path.write_text(content)
        assert [status(service, token) for _ in range(2)] == [200, 200]
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [
        "tokens cannot be read; previous tokens stay valid"
    ]
    assert SECRET not in str(lines)


def test_a_file_is_read_again_where_its_times_are_kept(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    first = create_token(path, "first", ["viewer"], ["*"], None)
    before = path.stat()
    service = serve(tokens_file=path)
    path.write_text(path.read_text().replace(digest_of(first), digest_of("another")))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [status(service, token) for token in (first, "another")] == [401, 200]


def test_a_link_to_another_directory_is_followed(serve: Serve, tmp_path: Path) -> None:
    """As Kubernetes changes what it mounts."""
    tokens = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tokens[name] = create_token(tmp_path / name / "tokens.yaml", name, ["viewer"], ["*"], None)
    data, path = tmp_path / "..data", tmp_path / "tokens.yaml"
    data.symlink_to("one")
    path.symlink_to("..data/tokens.yaml")
    service = serve(tokens_file=path)
    assert [status(service, token) for token in tokens.values()] == [200, 401]
    fresh = tmp_path / "..data_new"
    fresh.symlink_to("two")
    fresh.replace(data)
    assert [status(service, token) for token in tokens.values()] == [401, 200]


@pytest.mark.parametrize("content", [None, "", "two\nlines", "n\u00f6"])
def test_a_client_goes_on_with_its_token_while_the_file_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    monkeypatch.setattr("gristmill._client.connection.credentials._LOOK_S", 0.0)
    credentials = Credentials(token_file=path)
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    assert credentials.metadata() == (("authorization", "Bearer first"),)
    with pytest.raises(InvalidArgumentError, match="token_file"):
        Credentials(token_file=path)
    path.write_text("second")
    assert credentials.metadata() == (("authorization", "Bearer second"),)


class Publisher(BaseHTTPRequestHandler):
    """Serves an issuer's keys, or hangs, or serves something else."""

    content: bytes | None
    status: int = 200
    asked: threading.Event
    goes_on: threading.Event

    def do_GET(self) -> None:
        self.asked.set()
        if self.content is None:
            self.goes_on.wait(30)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.content or b"")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def publisher() -> Iterator[tuple[str, type[Publisher]]]:
    handler: Any = type(
        "KeyPublisher", (Publisher,), {"content": b"", "asked": threading.Event(), "goes_on": threading.Event()}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", handler
    handler.goes_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_keys_outlive_their_issuers_garbage_and_one_call_alone_waits_for_it(
    publisher: tuple[str, type[Publisher]], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = publisher
    monkeypatch.setattr("gristmill_service.access.web_tokens._PAUSE_S", 0.0)
    monkeypatch.setattr("gristmill_service.access.web_tokens._KEEP_S", 0.0)
    keys = WebTokens(url, "https://issuer", "gristmill")
    callers = CALLERS
    for garbage in (b"", b"<html>", b"[]", b'{"keys": []}', b"\xff", b"[" * 100_000, b" " * (2 << 20)):
        handler.content = garbage
        with pytest.raises(UnavailableError, match="cannot be fetched"):
            on_loop(keys.caller, issuer.token(), callers)
    handler.status = 403
    with (
        capture_logs() as logs,
        pytest.raises(UnauthenticatedError, match=r"the issuer refuses access to its keys .* 403"),
    ):
        on_loop(keys.caller, issuer.token(), callers)
    assert [line["event"] for line in logs] == ["keys cannot be fetched; known keys stay valid"]
    handler.status, handler.content = 200, issuer.path.read_bytes()
    assert on_loop(keys.caller, issuer.token(), callers).name == SUBJECT
    known = issuer.token()
    issuer.rotate()
    with pytest.raises(UnauthenticatedError, match="no key 'key-1'"):
        on_loop(keys.caller, issuer.token(), callers)
    handler.content = None
    handler.asked.clear()
    waiting = threading.Thread(target=on_loop, args=(keys.caller, known, callers))
    waiting.start()
    assert handler.asked.wait(30)
    assert on_loop(keys.caller, known, callers).name == SUBJECT
    assert waiting.is_alive()
    handler.goes_on.set()
    waiting.join()


def test_keys_at_a_url_are_had_by_the_authority_that_is_configured(
    publisher: tuple[str, type[Publisher]], issuer: Issuer, files: Files, tmp_path: Path
) -> None:
    _, handler = publisher
    handler.content = issuer.path.read_bytes()
    cert, key = files.certify("issuer")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"https://localhost:{server.server_port}/"
        callers = CALLERS
        known = WebTokens(url, "https://issuer", "gristmill", files.ca_file)
        assert on_loop(known.caller, issuer.token(), callers).name == SUBJECT
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            on_loop(WebTokens(url, "https://issuer", "gristmill").caller, issuer.token(), callers)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(InvalidArgumentError, match="jwks_ca_file: cannot read"):
        WebTokens(url, "https://issuer", "gristmill", tmp_path / "nowhere.pem")
