"""The package's surface: what it exports, and what importing it costs."""

import subprocess
import sys

import pytest

import gristmill
from gristmill import errors


def test_all_is_the_public_surface():
    assert gristmill.__all__ == [
        "AlreadyExistsError",
        "AsyncRolloutClient",
        "AsyncTrajectory",
        "Batch",
        "BatchFailedError",
        "DeadlineExceededError",
        "FailedPreconditionError",
        "GristmillError",
        "Group",
        "InvalidArgumentError",
        "MicroBatch",
        "NotFoundError",
        "PrefixUnknownError",
        "ResourceExhaustedError",
        "RolloutClient",
        "RowOutcome",
        "Shard",
        "StaleIncarnationError",
        "TrainerClient",
        "Trajectory",
        "UnavailableError",
        "UnsupportedError",
    ]


@pytest.mark.parametrize("name", gristmill.__all__)
def test_every_public_name_is_there(name):
    assert getattr(gristmill, name).__name__ == name


def test_every_error_of_the_tree_is_public():
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(gristmill.__all__)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'Rollout'"):
        _ = gristmill.Rollout


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_rollout_clients_import_no_torch():
    code = "import sys, gristmill; gristmill.RolloutClient, gristmill.AsyncRolloutClient; print('torch' in sys.modules)"
    assert run_python(code).stdout == "False\n"


def test_without_torch_the_trainer_client_says_what_to_install():
    code = "import sys, gristmill; sys.modules['torch'] = None; gristmill.TrainerClient"
    assert "pip install gristmill[torch]" in run_python(code).stderr.splitlines()[-1]
