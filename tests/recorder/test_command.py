"""`gristmill record` says what is wrong with its settings, and shows the service its token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gristmill import InvalidArgumentError
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.access.tokens import create_token
from gristmill_service.settings import load
from tests.recorder.engine import Engine
from tests.recorder.recorders import StartRecorder, create_run, post, trained
from tests.serving import StartService

pytestmark = pytest.mark.slow

GRISTMILL = str(Path(sys.executable).with_name("gristmill"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({}, "upstream is required; set --upstream or GRISTMILL_RECORD_UPSTREAM: The engine's URL"),
        ({"upstream": "vllm:8000"}, "--upstream: upstream is 'vllm:8000': expected http://HOST:PORT"),
        ({"upstream": "http://me:secret@vllm"}, "agents' own keys are forwarded to the engine"),
        ({"upstream": "http://vllm:99999"}, "--upstream: upstream is 'http://vllm:99999'"),
        ({"http_address": "8090"}, "--http-address: http_address is '8090': expected HOST:PORT"),
        (
            {"http_address": "0.0.0.0:0", "upstream": "http://vllm"},
            "http_address 0.0.0.0:0 can be reached from other machines",
        ),
    ],
)
def test_a_wrong_setting_is_named(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        load(RecorderSettings, flags)
    assert problem in str(raised.value)


@pytest.mark.parametrize(("given", "meant"), [("http://vllm:8000/v1/", "http://vllm:8000"), ("https://a", "https://a")])
def test_an_upstream_may_be_given_as_agents_have_it(given: str, meant: str) -> None:
    assert load(RecorderSettings, {"upstream": given}).upstream == meant


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    command = [GRISTMILL, "record", "--upstream", "http://vllm", "--address", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "gristmill record: address is 'x'; expected HOST:PORT" in done.stderr


def test_it_shows_the_service_the_token_of_its_environment(
    start_service: StartService,
    start_recorder: StartRecorder,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = tmp_path / "tokens.yaml"
    worker = create_token(tokens, "worker", ["worker"], ["mine"], None)
    admin = create_token(tokens, "admin", ["admin"], ["*"], None)
    service = start_service("--tokens-file", str(tokens), "--store", "memory")
    monkeypatch.setenv("GRISTMILL_TOKEN", worker)
    recorder = start_recorder(engine.url, service.grpc_address)
    monkeypatch.setenv("GRISTMILL_TOKEN", admin)
    create_run(service.grpc_address, "mine")
    create_run(service.grpc_address, "others")
    with recorder.openai("mine") as client:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "say hi"}])
    assert recorder.finish("mine")["outcome"] == "accepted"
    assert bytes(trained(service.grpc_address, "mine")[0].trained[:-1]) == b"hi"
    document = {"model": "toy", "messages": [{"role": "user", "content": "say hi"}]}
    status, answer = post(f"{recorder.base('others')}/v1/chat/completions", document)
    assert (status, "refused the recorder's token for run 'others'" in answer["error"]["message"]) == (400, True)
