"""The examples of the README and of the pages it leads to run here, word for word but for the address."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic_core import PydanticUndefined
from safetensors.numpy import load_file

from gristmill_service.config import SETTINGS
from tests.on_loop import Service

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(page: str, name: str) -> str:
    """Return the code of the block after this name."""
    match = re.search(rf"<!-- readme-{name} -->\n```\w+\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert match is not None, name
    return match[1]


def snippet(name: str, address: str) -> str:
    return block("README.md", name).replace("127.0.0.1:50051", address)


def test_the_rollout_and_the_trainer_snippet_train_a_model_through_the_service(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    exec(snippet("rollout", service.grpc_address), {})
    names: dict[str, Any] = {}
    exec(snippet("trainer", service.grpc_address), names)
    assert names["optimizer"].state[names["model"].weight]["step"] == 2
    status = service.runs.get("my-run").status()
    assert (status.batches_freed, status.rows_accepted) == (1, 8)
    # A second time they do nothing, and say so.
    assert not [text for text in caplog.messages if "my-run" in text]
    exec(snippet("rollout", service.grpc_address), {})
    assert "no group was begun of 2 requested (first uid 'prompt-1')" in caplog.text
    exec(snippet("trainer", service.grpc_address), names)
    assert service.runs.get("my-run").status().rows_accepted == 8


@pytest.mark.skipif(shutil.which("curl") is None, reason="without curl")
def test_the_calls_over_http_train_a_batch(service: Service, tmp_path: Path) -> None:
    code = (
        block("docs/http.md", "curl")
        .replace("http://127.0.0.1:8080", service.http_url)
        .replace("curl ", "curl --noproxy '*' -fsS ")
    )
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert load_file(tmp_path / "shard.safetensors")["sequences"].tolist() == [[1, 2, 3], [1, 2, 4]]
    assert service.runs.get("by-hand").status().batches_freed == 1


def test_the_commands_on_a_file_make_its_shards(tmp_path: Path) -> None:
    code = block("docs/files.md", "file")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 batch; 1 prompt group; 2 rows sent" in done.stderr
    shard = load_file(tmp_path / "shards/batch-00000/policy-000/rank-000.safetensors")
    assert shard["sequences"].tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 6]]


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) < 200


def test_the_page_of_the_http_api_lists_every_call_of_rollouts_and_trainers(service: Service) -> None:
    paths = httpx.get(f"{service.http_url}/openapi.json").json()["paths"]
    calls = {
        (method.upper(), path.removeprefix("/v1/runs") or "/")
        for path, methods in paths.items()
        for method, call in methods.items()
        if path.startswith("/v1/runs") and not {"page"} & set(call["tags"])
    }
    page = (ROOT / "docs/http.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]+) (\S+)` \|", page, re.MULTILINE)) == calls


SETTINGS_PAGE = (ROOT / "docs/settings.md").read_text()
_WORDS: dict[str, tuple[object, ...]] = {
    "none": (None, "none", {}),
    "off": (None, ()),
    "true": (True,),
    "false": (False,),
    "required": (PydanticUndefined,),
}


def documented_defaults() -> Iterator[tuple[str, str]]:
    """Each setting and its default in the tables; a line may have several settings, with one default or one each."""
    for line in SETTINGS_PAGE.splitlines():
        if line.startswith("| `"):
            names, defaults = (cell.strip() for cell in line.strip("|").split("|")[:2])
            named, values = re.findall(r"`([a-z_]+)`", names), [one.strip(" `") for one in defaults.split(",")]
            yield from zip(named, values if len(values) == len(named) else values * len(named), strict=True)


def test_every_setting_of_a_run_is_in_one_table_once() -> None:
    assert sorted(name for name, _ in documented_defaults()) == sorted(SETTINGS)


def is_documented_as(default: object, text: str) -> bool:
    number = re.fullmatch(r"(\d+(?:e-\d+)?)( GiB)?", text)
    meant = (float(number[1]) * (2**30 if number[2] else 1),) if number else _WORDS.get(text, (text,))
    return default in meant


def test_the_tables_of_settings_have_the_defaults() -> None:
    wrong = [
        (name, text, SETTINGS[name].default)
        for name, text in documented_defaults()
        if not is_documented_as(SETTINGS[name].default, text)
    ]
    assert wrong == []
