"""No website that is open in a browser on a recorder's machine samples, ends a trajectory, or reads an answer, except
under the origins that an operator allows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from gristmill import InvalidArgumentError
from gristmill_recorder.app import _PASSED_ON, RecorderApp
from gristmill_recorder.engines.connection import Engine as EngineConnection
from gristmill_recorder.journal import Journal
from gristmill_recorder.languages.paths import RECORDED
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.run import Service
from gristmill_recorder.runs import Runs
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.settings import load
from tests.api.test_origins import FROM_ELSEWHERE
from tests.on_loop import Service as RunningService
from tests.recorder.broken import BrokenEngine, breaking, completion, whole
from tests.recorder.engine import Engine
from tests.recorder.recorders import Recorder, post

PAGE = "https://agents.example"
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "say hi"}]}

Work = Callable[[RecorderApp, "TestClient[Any, Any]"], Awaitable[None]]


def serve(directory: Path, work: Work, upstream: str, address: str = "127.0.0.1:9", **flags: object) -> None:
    """Runs a recorder in this process while `work` calls it."""

    async def serving() -> None:
        settings = load(RecorderSettings, {"upstream": upstream, **flags})
        journal, metrics, engine = Journal(directory / "journal.sqlite3"), Metrics(), EngineConnection(settings)
        runs = Runs(Service(address), journal, (), metrics)
        app = RecorderApp(settings, runs, engine, metrics)
        try:
            async with TestClient(TestServer(app.application())) as client:
                await work(app, client)
            await runs.close(1.0)
        finally:
            await engine.close()
            journal.close()

    asyncio.run(serving())


async def message(answer: ClientResponse) -> tuple[int, str]:
    return answer.status, (await answer.json())["error"]["message"]


def test_no_call_of_a_page_is_answered_at_any_path(tmp_path: Path, engine: Engine) -> None:
    """The figure: calls of a web page that a recorder answers, other than GETs, or under a foreign host: 0."""

    async def work(app: RecorderApp, client: TestClient[Any, Any]) -> None:
        (route,) = {route.handler for route in client.app.router.routes()}
        assert route == app._answer, "all requests pass the guard"
        of_trajectories = [*RECORDED, *_PASSED_ON, *app._ends, *(f"v1/{end}" for end in app._ends)]
        paths = [f"/runs/r/uid/u/sample/0/{path}" for path in of_trajectories]
        paths += [f"/{path}" for path in (*RECORDED, *_PASSED_ON, *app._own, "v1/models", "unknown")]
        calls, answered = 0, []
        for path in paths:
            rebound = {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"}
            tries = [(method, rebound) for method in ("GET", "HEAD", "POST", "OPTIONS")]
            tries += [(method, headers) for method in ("POST", "PUT", "DELETE") for headers in FROM_ELSEWHERE]
            for method, headers in tries:
                sent = {"content-type": "text/plain", **headers}
                async with client.request(method, path, headers=sent, data=b"{}") as answer:
                    calls += 1
                    assert "access-control-allow-origin" not in answer.headers
                    if answer.status != (421 if "host" in headers else 403):
                        answered.append((method, path, headers, answer.status))
        assert (len(answered), answered) == (0, [])
        assert app._metrics.refused.labels("OtherSite")._value.get() > 0
        assert app._runs._runs == {}
        print(f"calls of a page that were answered: {len(answered)} of {calls}")

    asked = len(engine.headers)
    serve(tmp_path, work, engine.url)
    assert len(engine.headers) == asked


@pytest.mark.parametrize(
    "host", ["recorder:8090", "recorder.rl.svc.cluster.local", "host.docker.internal:8090", "10.0.0.7", "[::1]:8090"]
)
def test_agents_in_other_containers_are_answered(recorder: Recorder, run: str, host: str) -> None:
    assert post(f"{recorder.base(run, uid=host)}/v1/chat/completions", CHAT, {"host": host})[0] == 200


def test_names_that_are_configured_are_answered(tmp_path: Path) -> None:
    async def work(app: RecorderApp, client: TestClient[Any, Any]) -> None:
        for host, status in (("Recorder.Example.org", 200), ("example.org", 421), ("recorder.example.com", 421)):
            async with client.get("/healthz", headers={"host": host}) as answer:
                assert answer.status == status
        refused = await message(await client.get("/metrics", headers={"host": "example.com"}))
        assert refused == (421, "the host 'example.com' is not a name of this recorder; add it to --http-host-names")

    serve(tmp_path, work, "http://127.0.0.1:9", http_host_names="a.example, *.example.org")


def test_a_page_with_agents_calls_under_an_allowed_origin_and_reads_the_answer(
    tmp_path: Path, engine: Engine, service: RunningService, run: str
) -> None:
    url = f"/runs/{run}/uid/a/sample/0"

    async def work(_: RecorderApp, client: TestClient[Any, Any]) -> None:
        page = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        async with client.options(f"{url}/v1/chat/completions", headers={**page, **asks}) as answer:
            assert answer.status == 204
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "POST" in answer.headers["access-control-allow-methods"]
        for stream in (False, True):
            async with client.post(
                f"{url}/v1/chat/completions", json={**CHAT, "stream": stream}, headers=page
            ) as answer:
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        async with client.post(f"{url}/v1/embeddings", headers=page, data=b"[") as answer:
            assert answer.headers["access-control-allow-origin"] == PAGE, "errors are readable, too"
        other = {"origin": "https://agents.example.org", "sec-fetch-site": "cross-site", **asks}
        async with client.options(f"{url}/v1/chat/completions", headers=other) as answer:
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (404, None)

    serve(tmp_path, work, engine.url, service.grpc_address, allowed_origins=f"http://localhost:3000, {PAGE}")


def test_an_engine_that_allows_every_page_to_read_its_answers_does_not_decide_for_the_recorder(tmp_path: Path) -> None:
    async def work(_: RecorderApp, client: TestClient[Any, Any]) -> None:
        headers = {"origin": str(client.make_url("")).rstrip("/")}
        async with client.post("/tokenize", json={}, headers=headers) as answer:
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, None)

    broken: BrokenEngine
    with breaking() as broken:
        headers = "content-type: application/json\r\naccess-control-allow-origin: *"
        broken.answer, broken.keeps = whole(completion(), headers), True
        serve(tmp_path, work, broken.url)
        assert b"\r\norigin:" not in broken.heads[-1].lower()


@pytest.mark.parametrize("origins", ["*", "agents.example", f"{PAGE}/", "https://Agents.example", f"{PAGE},"])
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origins: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected origins such as https://agents\.example"):
        load(RecorderSettings, {"upstream": "http://vllm", "allowed_origins": origins})


@pytest.mark.parametrize("end", ["finish", "v1/finish", "abort", "v1/abort"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_json_ends_a_trajectory(recorder: Recorder, run: str, end: str, kind: str) -> None:
    status, document = post(f"{recorder.base(run)}/{end}", {}, {"content-type": kind})
    assert (status, f"the body was sent as content-type '{kind}'" in document["error"]["message"]) == (400, True)


@pytest.mark.parametrize("end", ["finish", "v1/finish", "abort", "v1/abort"])
def test_an_agent_without_the_token_does_not_end_its_trajectory(
    tmp_path: Path, engine: Engine, service: RunningService, run: str, end: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    url = f"/runs/{run}/uid/a/sample/0"

    async def work(_: RecorderApp, client: TestClient[Any, Any]) -> None:
        (await client.post(f"{url}/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer own"})).close()
        for sent in ({}, {"authorization": "Bearer own"}, {"authorization": "Bearer "}, {"authorization": "secre"}):
            status, text = await message(await client.post(f"{url}/{end}", headers=sent))
            assert (status, "send the token of --end-token-file" in text) == (401, True)
        async with client.post(f"{url}/{end}", headers={"authorization": "Bearer secret"}) as answer:
            assert answer.status == 200

    serve(tmp_path, work, engine.url, service.grpc_address, end_token_file=str(token))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot read it: No such file"), (b"\n", "a file with a token"), (b"\xff", "can't decode byte 0xff")],
)
def test_a_recorder_without_its_token_does_not_start(tmp_path: Path, content: bytes | None, problem: str) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=f"--end-token-file: end_token_file is '{token}': .*{problem}"):
        load(RecorderSettings, {"upstream": "http://vllm", "end_token_file": token})
