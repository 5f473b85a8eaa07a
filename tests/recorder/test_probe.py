"""At its start the recorder asks the engine once, and says what is missing and how to get it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from gristmill_recorder.columns import NAMES
from gristmill_recorder.engines.connection import Engine as Connection
from gristmill_recorder.engines.probe import Probe
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.settings import load
from tests.recorder.dynamo import Dynamo
from tests.recorder.engine import Engine, prompt_of, serving, turn
from tests.recorder.llamacpp import SETTINGS, LlamaServer


def with_a_system(messages: list[Any]) -> list[int]:
    return [*turn("system", "a"), *prompt_of(messages)]


def name_of(engine: Engine | Dynamo | LlamaServer) -> str:
    if isinstance(engine, Engine):
        return "sglang" if engine.is_sglang else "vllm"
    return "dynamo" if isinstance(engine, Dynamo) else "llamacpp"


def problems(
    engine: Engine | Dynamo | LlamaServer, *, splice: bool = False, columns: Collection[str] = ()
) -> list[str]:
    name = name_of(engine)

    async def probe() -> list[str]:
        flags = {"splice": "on" if splice else "off", "columns": ",".join(columns)}
        settings = load(RecorderSettings, {"upstream": engine.url, "engine": name, **flags})
        connection = Connection(settings)
        try:
            return [problem async for problem in Probe(connection, settings).problems()]
        finally:
            await connection.close()

    return asyncio.run(probe())


def test_an_engine_that_cannot_be_reached_yet_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_recorder.engines.probe._PAUSE_S", 0.01)
    settings = load(RecorderSettings, {"upstream": "http://127.0.0.1:9"})

    async def probe() -> None:
        connection = Connection(settings)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(Probe(connection, settings).run(), 0.5)
        finally:
            await connection.close()

    asyncio.run(probe())
    (record,) = caplog.records
    assert "engine not probed, will be retried: the engine at http://127.0.0.1:9 cannot be reached" in record.message


@pytest.mark.parametrize("is_sglang", [False, True])
def test_an_engine_that_gives_all_has_no_problem(is_sglang: bool) -> None:
    with serving(Engine(is_sglang=is_sglang)) as engine:
        assert problems(engine, splice=True) == []
        assert [request["max_tokens"] for request in engine.requests] == [1, 1]


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"takes_tokens": False}, "ignores the tokens of a prompt, so calls are not spliced; use vLLM 0.32 or newer"),
        ({"template": with_a_system}, "start vLLM with --enable-scale-out"),
        ({"template": lambda messages: []}, "renders no conversation"),
        ({"says": "tokenless a"}, "no token ids, so no call can be recorded; use vLLM 0.10.2 or newer"),
        ({"says": "fail 401"}, "refused with status 401"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(fault: dict[str, Any], problem: str) -> None:
    with serving(Engine(**fault)) as engine:
        (said,) = problems(engine, splice=True)
        assert problem in said


def test_columns_that_answers_lack_are_named_with_their_remedies() -> None:
    with serving(Engine()) as engine:
        assert problems(engine, columns=NAMES) == [
            "/v1/chat/completions returned no routed_experts, so rows are without it; start vLLM with "
            "--enable-return-routed-experts",
            "/v1/chat/completions returned no sampling_mask, so rows are without it; start vLLM with "
            "--return-sampling-mask, and call /inference/v1/generate",
        ]
    with serving(Engine(says="reload hi")) as engine:
        assert problems(engine, columns=["routed_experts"]) == []
    with serving(LlamaServer()) as server:
        (said,) = problems(server, columns=["sampling", "routed_experts"])
        assert "omit routed_experts from --columns" in said


class Parsing(Engine):
    """An SGLang with this parser."""

    def __init__(self, parser: str | None) -> None:
        super().__init__(is_sglang=True)
        self._about = {"tool_call_parser": parser, "reasoning_parser": None}

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/server_info", self._server_info)
        return app

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self._about)


def test_an_sglang_without_a_parser_streams_too_few_logprobs() -> None:
    with serving(Parsing("qwen")) as engine:
        assert problems(engine) == []
    with serving(Parsing(None)) as engine:
        (said,) = problems(engine)
        assert said.endswith("start SGLang with --tool-call-parser or --reasoning-parser")


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (Dynamo(), ""),
        (Dynamo(gives=()), "use Dynamo 1.6.1 or newer, without DYN_ENABLE_FRONTEND_NVEXT=false"),
        (LlamaServer(), ""),
        (LlamaServer(has_tokens=False), "use a llama-server of 2025 or newer"),
        (LlamaServer(settings={**SETTINGS, "temperature": 0.8, "min_p": 0.05}), "(min_p, temperature)"),
    ],
)
def test_engines_that_are_not_spliced_are_probed_too(engine: Dynamo | LlamaServer, problem: str) -> None:
    with serving(engine):
        said = problems(engine)
        assert len(said) == bool(problem)
        assert all(problem in each for each in said)
