"""The README's examples are run here, word for word but for the address."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic_core import PydanticUndefined
from safetensors.numpy import load_file

from gristmill_service.config import SETTINGS
from gristmill_service.service import Service

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


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 10)

    def forward(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        assert sequences.shape == attention_mask.shape == position_ids.shape
        logits: torch.Tensor = self.embedding(sequences)
        return logits


def test_the_rollout_and_the_trainer_snippet_train_a_model_through_the_service(service: Service) -> None:
    exec(snippet("rollout", service.grpc_address), {})
    model = Model()
    before = model.embedding.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "rank": 0, "dp_size": 1}
    exec(snippet("trainer", service.grpc_address), names)
    assert not torch.equal(before, model.embedding.weight)
    status = service.runs.get("my-run").status()
    assert (status.batches_freed, status.rows_accepted) == (1, 8)


@pytest.mark.skipif(shutil.which("curl") is None, reason="without curl")
def test_the_calls_over_http_train_a_batch(service: Service, tmp_path: Path) -> None:
    code = _found(r"<!-- readme-curl -->\n```bash\n(.*?)```", re.DOTALL)
    code = code.replace("http://127.0.0.1:8080", service.http_url).replace("curl ", "curl --noproxy '*' -fsS ")
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert load_file(tmp_path / "shard.safetensors")["sequences"].tolist() == [[1, 2, 3], [1, 2, 4]]
    assert service.runs.get("by-hand").status().batches_freed == 1


def test_the_line_of_a_rollout_file_is_one(tmp_path: Path) -> None:
    row = json.loads(_found(r'^    (\{"uid".*\})$', re.MULTILINE))
    rollouts, config = tmp_path / "rollouts.jsonl", tmp_path / "run.yaml"
    rollouts.write_text("".join(json.dumps(row | {"sample": sample}) + "\n" for sample in range(2)))
    counts = {"train_batch_size": 1, "n_samples_per_prompt": 2, "policy_mini_batch_size": 1}
    config.write_text(json.dumps(counts | {"micro_batch": {"size": 2}, "step_wise": True}))
    gristmill = Path(sys.executable).with_name("gristmill")
    done = subprocess.run([gristmill, "plan", rollouts, "--config", config], capture_output=True, text=True)
    assert done.returncode == 0
    assert "1 batch; 1 prompt group; 2 rows sent" in done.stderr


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


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^    gristmill (\w+)", README, re.MULTILINE))))
def test_every_command_that_is_named_exists(command: str) -> None:
    gristmill = Path(sys.executable).with_name("gristmill")
    done = subprocess.run([gristmill, command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
