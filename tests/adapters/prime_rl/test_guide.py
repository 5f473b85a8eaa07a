"""docs/trainers/prime_rl.md: its run can be created, and its commands are understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from gristmill.adapters.prime_rl._micro_batches import COLUMNS, MicroBatch
from gristmill_service.config import parse_config

GUIDE = (Path(__file__).parents[3] / "docs/trainers/prime_rl.md").read_text(encoding="utf-8")


def test_the_run_can_be_created() -> None:
    (settings,) = re.findall(r"<!-- prime-rl-run -->\n```yaml\n(.*?)```", GUIDE, re.DOTALL)
    config = parse_config(yaml.safe_load(settings))
    assert (config.layout, config.loss_reduction) == ("packed", "none")


def test_the_commands_have_the_options_that_there_are() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "gristmill.adapters.prime_rl", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"--[a-z-]+", help_text))
    commands = re.findall(r"^    python (-m gristmill\.adapters\.prime_rl (?:.*\\\n)*.*)$", GUIDE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert {word for word in shlex.split(command) if word.startswith("--")} <= known
    assert set(re.findall(r"`(--[a-z-]+)`", GUIDE)) <= known


def test_every_field_of_a_micro_batch_is_documented() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", GUIDE))
    assert {*MicroBatch.__struct_fields__, *COLUMNS} <= documented
