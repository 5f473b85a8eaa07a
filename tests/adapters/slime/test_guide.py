"""docs/trainers/slime.md: its options are accepted, and it documents every key of the train data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from gristmill.adapters.slime._settings import ADVANTAGE_FUNCTION, options_of, run_settings
from gristmill_service.config import parse_config
from tests.adapters.slime.golden import GOLDEN
from tests.adapters.slime.samples import PARALLEL, arguments

GUIDE = (Path(__file__).parents[3] / "docs/trainers/slime.md").read_text(encoding="utf-8")


def test_the_options_give_a_run() -> None:
    (options,) = re.findall(r"<!-- slime-config -->\n```yaml\n(.*?)```", GUIDE, re.DOTALL)
    args = arguments(**yaml.safe_load(options))
    assert parse_config(run_settings(args, options_of(args), dp_size=PARALLEL["dp_size"])).merge == "prefix"


def test_every_key_of_the_train_data_is_documented() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", GUIDE))
    numbers = {"sample_indices", "rollout_ids"}
    assert json.loads(GOLDEN.read_text())[0].keys() - numbers <= documented


def test_the_advantage_function_is_found_by_its_name() -> None:
    module, _, name = ADVANTAGE_FUNCTION.rpartition(".")
    assert ADVANTAGE_FUNCTION in GUIDE
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_without_a_script_the_command_says_how_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-m", "gristmill.adapters.slime"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "usage: python -m gristmill.adapters.slime path/to/slime/train.py ARGUMENTS OF slime\n",
    )
