"""The options are the same for every trainer, and are read from YAML, Hydra or flags."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from typing import Any

import pytest

from gristmill import InvalidArgumentError, RolloutClient
from gristmill.adapters._core.options import Gristmill


def test_a_mapping_is_read_as_options() -> None:
    settings = {"merge": "prefix", "columns": ({"name": "a", "shape": (2, 3)},)}
    options = Gristmill.of({"address": "here:1", "run": "r", "settings": settings, "ignore": None}, "gristmill")
    assert (options.address, options.run, options.ignore) == ("here:1", "r", ())
    assert options.settings == {"merge": "prefix", "columns": [{"name": "a", "shape": [2, 3]}]}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (None, "gristmill is missing; set a mapping with address and run"),
        ({"address": "here"}, "gristmill.run is not set; set the service's address and the run's name"),
        ({"address": "here", "run": "r", "port": 1}, "unknown option 'port'; expected address, run, rollouts"),
        ({"address": "here", "run": "r", "rollouts": "both"}, "rollouts is 'both'; use trainer or workers"),
        ({"address": "here", "run": "r", "settings": 3}, "settings is 3; set a mapping"),
        ({"address": "here", "run": "r", "ignore": "tools"}, "ignore is the string 'tools'; set a list"),
    ],
)
def test_options_that_are_wrong_are_named(options: Any, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        Gristmill.of(options, "gristmill")


def test_flags_are_read_as_options() -> None:
    parser = ArgumentParser()
    Gristmill.add_flags(parser)
    assert Gristmill.of_flags(parser.parse_args(["here:1", "--run", "r"])) == Gristmill("here:1", "r")
    flags = parser.parse_args(["here:1", "--run", "r", "--timeout-s", "7"])
    assert Gristmill.of_flags(flags).timeout_s == 7


def test_the_timeout_is_that_of_clients() -> None:
    assert inspect.signature(RolloutClient).parameters["timeout_s"].default == Gristmill.timeout_s
