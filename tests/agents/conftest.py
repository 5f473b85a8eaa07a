"""Tests with agents of other makers, in their own virtual environment: `make test-agents`. A recorder that splices
stands between each and an engine whose model follows a script."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.agents.model import Branch, Model
from tests.engines.templates.families import FAMILIES
from tests.on_loop import Service
from tests.recorder.engine import serving
from tests.recorder.recorders import Recorder, create_run, end, start, trained

# They are collected only where these agents are installed, which is never the environment of `make test`.
collect_ignore_glob = ["*"] if find_spec("smolagents") is None else []

_PROGRAMS = Path(__file__).parents[2] / "build/agents/node_modules/.bin"
# Nothing listens here, so that an agent reaches only this machine.
_NOWHERE = "http://127.0.0.1:9"


@dataclass
class Rollout:
    """A trajectory that an agent plays. folder: for the agent's files."""

    run: str
    recorder: Recorder
    service: Service
    model: Model
    folder: Path

    @property
    def url(self) -> str:
        return self.recorder.base(self.run)

    def script(self, *branches: Branch) -> None:
        self.model.branches = list(branches)

    def launch(self, program: str, *arguments: str, **environment: str) -> str:
        """Runs a program from npm in the folder to its end. Returns what it printed."""
        proxies = {"HTTPS_PROXY": _NOWHERE, "HTTP_PROXY": _NOWHERE, "NO_PROXY": "127.0.0.1"}
        home = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        ended = subprocess.run(
            [str(_PROGRAMS / program), *arguments],
            cwd=self.folder,
            env={**home, **proxies, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert not ended.returncode, f"{ended.stdout[-5000:]}{self.recorder.log.read_text()[-5000:]}"
        return ended.stdout

    def check(self) -> None:
        """Ends the trajectory, and asserts that each branch is one row: all that its model said is trained once, with
        its logprobs, and each of its calls but the first was spliced."""
        branches = self.model.branches
        assert not self.model.unknown
        assert {each.name: each.calls for each in branches} == {each.name: len(each.answers) for each in branches}
        calls = sum(branch.calls for branch in branches)
        assert self.recorder.finish(self.run) == {"steps": calls, "outcome": "accepted"}
        rows = trained(self.service.grpc_address, self.run)
        names = {tuple(branch.tokens): branch.name for branch in branches}
        recorded = [(names.get(tuple(row.tokens), "unknown"), row.trained, row.logprobs) for row in rows]
        assert sorted(recorded) == sorted((each.name, each.trained, each.logprobs) for each in branches)
        assert self.recorder.metric('splices_total{result="spliced"}') == calls - len(branches)


@pytest.fixture(params=("qwen3", "gpt-oss", "glm-4.6"))
def rollout(request: pytest.FixtureRequest, service: Service, tmp_path: Path, run_name: str) -> Iterator[Rollout]:
    """With the template and tokenizer of a family of models."""
    create_run(service.grpc_address, run_name)
    flags = ("--journal", str(tmp_path / "journal"), "--splice", "on")
    folder = tmp_path / "agent"
    folder.mkdir()
    with serving(Model(FAMILIES[request.param])) as model:
        recorder = start(tmp_path / "log", model.url, service.grpc_address, *flags)
        yield Rollout(run_name, recorder, service, model, folder)
        end(recorder)
