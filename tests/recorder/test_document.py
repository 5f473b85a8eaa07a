"""docs/recorder.md: its examples run, and it has every metric and setting that it should have."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gristmill_recorder.columns import NAMES
from gristmill_recorder.languages.paths import RECORDED
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.settings import RecorderSettings
from tests.on_loop import Service
from tests.recorder.engine import Engine
from tests.recorder.recorders import Recorder, create_run, trained

TEXT = (Path(__file__).parents[2] / "docs/recorder.md").read_text()


OF_OTHERS = {
    *("logprobs-mode", "generation-config", "enable-scale-out", "return-sampling-mask"),
    *("enable-return-routed-experts", "conversations", "model", "mm-processor-kwargs", "context-shift", "temp"),
    *("reasoning-parser", "tool-call-parser"),
}


def snippet(name: str) -> str:
    match = re.search(rf"<!-- recorder-{name} -->\n```\w+\n(.*?)```", TEXT, re.DOTALL)
    assert match is not None, name
    return match[1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="without curl")
def test_a_run_an_agent_and_its_end_make_a_trajectory(recorder: Recorder, service: Service, run_name: str) -> None:
    def here(text: str) -> str:
        local = text.replace("http://127.0.0.1:8090", recorder.url).replace("127.0.0.1:50051", service.grpc_address)
        return local.replace("my-run", run_name)

    exec(here(snippet("run")), {})
    exec(f"{here(snippet('agent'))}agent.close()", {})
    end = here(snippet("finish")).replace("curl ", "curl --noproxy '*' -fsS ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", end], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == '{"steps":1,"outcome":"accepted"}'
    assert bytes(trained(service.grpc_address, run_name)[0].trained[:-1]) == b"hello"


def test_a_worker_records_by_the_client(engine: Engine, service: Service, run: str) -> None:
    code = snippet("client").replace("http://vllm:8000", engine.url).replace("my-run", run)
    exec(f"{code.replace('127.0.0.1:50051', service.grpc_address)}engine.close()", {})
    assert bytes(trained(service.grpc_address, run)[0].trained[:-1]) == b"hello"


def test_an_agent_is_captured_in_its_own_process(engine: Engine, service: Service, run: str) -> None:
    code = snippet("capture").replace("http://vllm:8000", engine.url).replace("my-run", run)
    exec(code.replace("127.0.0.1:50051", service.grpc_address), {})
    (row,) = trained(service.grpc_address, run)
    assert (bytes(row.trained[:-1]), row.reward) == (b"hello", 1.0)


def test_every_metric_is_documented_with_its_labels(recorder: Recorder) -> None:
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(
            r"^\| `(gristmill_recorder_\w+)` \| (\w+) \| ([^|]*)\|", TEXT, re.MULTILINE
        )
    }
    metrics = Metrics()
    families = list(metrics.registry.collect())
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert documented.keys() == names
    for collector in vars(metrics).values():
        if labels := getattr(collector, "_labelnames", None):
            (family,) = collector.describe()
            kind_and_labels = documented[family.name + ("_total" if family.type == "counter" else "")]
            assert kind_and_labels == (family.type, set(labels))


def test_a_run_may_declare_every_column_as_documented(service: Service, run_name: str) -> None:
    declared = yaml.safe_load(snippet("columns"))["columns"]
    assert {column["name"] for column in declared} == {*NAMES}
    for column in declared:
        column["shape"] = [2 if isinstance(size, str) else size for size in column.get("shape", [])]
    create_run(service.grpc_address, run_name, columns=declared)


def test_every_recorded_path_and_every_flag_that_is_named_exists() -> None:
    assert all(f"/{path}`" in TEXT for path in RECORDED)
    flags = set(re.findall(r"`--(?:no-)?([a-z-]+)", TEXT)) - OF_OTHERS
    assert flags <= {name.replace("_", "-") for name in RecorderSettings.model_fields}
