"""A vLLM with a tiny random model, and a recorder in front of it. Nothing is fetched from anywhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gristmill_service.settings import Settings
from tests.engines.vllm import tiny_model
from tests.engines.vllm.witness import Answer, Witness
from tests.on_loop import Service
from tests.recorder.engine import serving
from tests.recorder.recorders import Recorder, create_run, end, start, trained
from tests.serving import FREE_PORTS

MODEL = "tiny"
_TOLERANCE = 1e-4
_FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-scale-out",
)
# One core computes as many tokens as are sampled here.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save(folder)
    return folder


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[str]:
    """The URL of a vLLM."""
    with running(folder, "--max-model-len", "2048") as url:
        yield url


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[str]:
    """A vLLM that serves the model in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # Not `vllm serve`, which asks for the version of a package that is called vllm.
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *_FLAGS, *flags]
    command += ["--model", str(folder), "--port", str(port)]
    with (folder / "engine.log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **_ENVIRONMENT}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            assert process.poll() is None, (folder / "engine.log").read_text()[-5000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
        return answer.status == 200
    return False


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    running = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    running.start()
    yield running
    running.stop()


@dataclass
class Rollout:
    """A trajectory whose calls a recorder in front of vLLM records. Each of its steps becomes a row."""

    run: str
    recorder: Recorder
    service: Service
    witness: Witness
    model: Any

    @property
    def url(self) -> str:
        return self.recorder.base(self.run)

    def check(self, calls: int, temperature: float = 1.0) -> None:
        """Ends the trajectory, and asserts that its rows have what the engine answered, to the last bit, and that
        logprobs are those of a forward pass.

        calls: the least number of answers. A call with a grammar has other logprobs.
        """
        answers = self.witness.answers
        assert len(answers) >= calls
        assert self.recorder.finish(self.run)["steps"] == len(answers)
        rows = trained(self.service.grpc_address, self.run)
        recorded = [(row.tokens, row.trained, row.logprobs) for row in rows]
        said = [(each.prompt + each.response, each.response, _float32(each.logprobs)) for each in answers]
        assert sorted(recorded) == sorted(said)
        plain = [answer for answer in answers if not has_grammar(answer)]
        difference, tokens = self._difference(plain, temperature), sum(len(each.response) for each in answers)
        print(f"{len(answers)} answers, {tokens} tokens, {len(plain)} without a grammar: {difference:.1e}")
        assert difference <= _TOLERANCE

    def largest_difference(self) -> float:
        """Returns the largest difference of the engine's logprobs and those of a forward pass."""
        return self._difference(self.witness.answers)

    def _difference(self, answers: list[Answer], temperature: float = 1.0) -> float:
        return max(
            abs(of_engine - of_model)
            for answer in answers
            for of_engine, of_model in zip(
                answer.logprobs,
                tiny_model.logprobs(self.model, answer.prompt, answer.response, temperature),
                strict=True,
            )
        )


def has_grammar(answer: Answer) -> bool:
    """Whether a grammar forbade tokens."""
    functions = [tool["function"] for tool in answer.request.get("tools") or ()]
    is_free = answer.request.get("tool_choice") in (None, "none", "auto")
    return not is_free or any(function.get("strict") for function in functions)


def _float32(values: list[float]) -> list[float]:
    return np.array(values, np.float32).tolist()


@pytest.fixture
def flags() -> tuple[str, ...]:
    """More arguments of the recorder."""
    return ()


@pytest.fixture
def config() -> dict[str, Any]:
    """More settings of the run."""
    return {"merge": "none"}


@pytest.fixture
def rollout(
    engine: str,
    folder: Path,
    service: Service,
    tmp_path: Path,
    run_name: str,
    flags: tuple[str, ...],
    config: dict[str, Any],
) -> Iterator[Rollout]:
    create_run(service.grpc_address, run_name, **config)
    flags = ("--journal", str(tmp_path / "journal"), *flags)
    with serving(Witness(engine)) as witness:
        recorder = start(tmp_path / "log", witness.url, service.grpc_address, *flags)
        yield Rollout(run_name, recorder, service, witness, tiny_model.load(folder))
        end(recorder)
