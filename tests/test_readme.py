"""What the README shows is run here, word for word but for the address."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gristmill_service.config import RunConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def snippet(name, address):
    code = re.search(rf"<!-- readme-{name} -->\n```python\n(.*?)```", README, re.DOTALL).group(1)
    return code.replace("127.0.0.1:50051", address)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 10)

    def forward(self, sequences, attention_mask, position_ids):
        assert sequences.shape == attention_mask.shape == position_ids.shape
        return self.embedding(sequences)


def test_the_rollout_and_the_trainer_snippet_train_a_model_through_the_service(service):
    exec(snippet("rollout", service.grpc_address), {})
    model = Model()
    before = model.embedding.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "rank": 0, "dp_size": 1}
    exec(snippet("trainer", service.grpc_address), names)
    assert not torch.equal(before, model.embedding.weight)
    status = service.runs.get("my-run").status()
    assert (status.batches_freed, status.rows_accepted) == (1, 8)


def test_every_setting_of_a_run_is_in_the_configuration_table():
    table = README[README.index("## Configuration") : README.index("## What it promises")]
    named = set(re.findall(r"`([a-z_]+)`", table))
    not_built = {"columns"}
    assert set(RunConfig.model_fields) - not_built <= named


@pytest.mark.parametrize("command", re.findall(r"^    gristmill (\w+)", README, re.MULTILINE))
def test_every_command_that_is_named_exists(command):
    gristmill = Path(sys.executable).with_name("gristmill")
    done = subprocess.run([gristmill, command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0


@pytest.mark.parametrize("target", re.findall(r"^    make (\w+)", README, re.MULTILINE))
def test_every_make_target_that_is_named_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"\]\(([\w/.]+)\)|`(tests/[\w/.]+)`", README))
def test_every_file_that_is_named_exists(path):
    assert (ROOT / next(filter(None, path))).exists()
