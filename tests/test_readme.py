"""The README's examples are run here, word for word but for the address."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined
from safetensors.numpy import load_file

from gristmill_service.config import SETTINGS
from tests.on_loop import Service

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _found(pattern: str, flags: re.RegexFlag) -> str:
    """The group of the pattern in the README."""
    match = re.search(pattern, README, flags)
    assert match is not None, pattern
    return match.group(1)


def snippet(name: str, address: str) -> str:
    code = _found(rf"<!-- readme-{name} -->\n```python\n(.*?)```", re.DOTALL)
    return code.replace("127.0.0.1:50051", address)


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
    assert "no group was begun, of uid 'prompt-1' and others (2 in all)" in caplog.text
    exec(snippet("trainer", service.grpc_address), names)
    assert service.runs.get("my-run").status().rows_accepted == 8


@pytest.mark.skipif(shutil.which("curl") is None, reason="without curl")
def test_the_calls_over_http_train_a_batch(service: Service, tmp_path: Path) -> None:
    code = _found(r"<!-- readme-curl -->\n```bash\n(.*?)```", re.DOTALL)
    code = code.replace("http://127.0.0.1:8080", service.http_url).replace("curl ", "curl --noproxy '*' -fsS ")
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert load_file(tmp_path / "shard.safetensors")["sequences"].tolist() == [[1, 2, 3], [1, 2, 4]]
    assert service.runs.get("by-hand").status().batches_freed == 1


def test_the_commands_on_a_file_make_its_shards(tmp_path: Path) -> None:
    code = _found(r"<!-- readme-file -->\n```bash\n(.*?)```", re.DOTALL)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 batch; 1 prompt group; 2 rows sent" in done.stderr
    shard = load_file(tmp_path / "shards/batch-00000/policy-000/rank-000.safetensors")
    assert shard["sequences"].tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 6]]


TABLE = README[README.index("| setting | default | meaning |") : README.index("## What it promises")]
NOT_BUILT: set[str] = set()
_WORDS: dict[str, tuple[object, ...]] = {
    "none": (None, "none", {}),
    "off": (None, ()),
    "true": (True,),
    "false": (False,),
    "required": (PydanticUndefined,),
}


def documented_defaults() -> Iterator[tuple[str, str]]:
    """Each setting's default as the configuration table has it, several of a line by turns or alike."""
    for line in TABLE.splitlines()[2:]:
        if line.startswith("|"):
            names, defaults = (cell.strip() for cell in line.strip("|").split("|")[:2])
            named, told = re.findall(r"`([a-z_]+)`", names), [one.strip(" `") for one in defaults.split(",")]
            yield from zip(named, told if len(told) == len(named) else told * len(named), strict=True)


def test_every_setting_of_a_run_is_in_the_configuration_table() -> None:
    assert {name for name, _ in documented_defaults()} == set(SETTINGS) - NOT_BUILT


@pytest.mark.parametrize(("name", "told"), list(documented_defaults()))
def test_the_configuration_table_tells_the_default(name: str, told: str) -> None:
    number = re.fullmatch(r"(\d+(?:e-\d+)?)( GiB)?", told)
    meant = (float(number[1]) * (2**30 if number[2] else 1),) if number else _WORDS.get(told, (told,))
    assert SETTINGS[name].default in meant


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^(?:    )?gristmill (\w+)", README, re.MULTILINE))))
def test_every_command_that_is_named_exists(command: str) -> None:
    gristmill = Path(sys.executable).with_name("gristmill")
    done = subprocess.run([gristmill, command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
