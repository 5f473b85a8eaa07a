"""The package's surface: what it exports, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill
from gristmill import errors

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "gristmill.adapters",
    "gristmill.aio",
    "gristmill.completions",
    "gristmill.converters",
    "gristmill.environments",
    "gristmill.errors",
    "gristmill.torch",
}

EDGES = ("gristmill.adapters.", "gristmill.environments.")


def test_all_is_the_public_surface() -> None:
    assert gristmill.__all__ == [
        "AlreadyExistsError",
        "AsyncRolloutClient",
        "AsyncTrajectory",
        "Batch",
        "BatchFailedError",
        "Credentials",
        "DeadlineExceededError",
        "FailedPreconditionError",
        "Finding",
        "GristmillError",
        "Group",
        "GroupState",
        "InvalidArgumentError",
        "MicroBatch",
        "ModelProgress",
        "NotFoundError",
        "PermissionDeniedError",
        "Position",
        "ResourceExhaustedError",
        "RolloutClient",
        "RowOutcome",
        "RunHealth",
        "RunStatus",
        "Shard",
        "StaleIncarnationError",
        "TagGroups",
        "TrainerClient",
        "Trajectory",
        "TrajectoryKey",
        "UnauthenticatedError",
        "UnavailableError",
        "UnsupportedError",
        "capture",
    ]


@pytest.mark.parametrize("name", gristmill.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(gristmill, name).__name__ == name


@pytest.mark.parametrize("name", ["gristmill", "gristmill.completions", "gristmill.converters", "gristmill.torch"])
def test_a_public_module_shows_exactly_what_its_all_names(name: str) -> None:
    module = importlib.import_module(name)
    shown = {
        one
        for one, value in vars(module).items()
        if not one.startswith("_")
        and (str(getattr(value, "__module__", "")).startswith("gristmill") or isinstance(value, str))
    }
    for one in module.__all__:
        getattr(module, one)
    # Errors are public in a module of their own.
    assert shown - vars(errors).keys() <= set(module.__all__)
    assert module.__all__ == sorted(module.__all__, key=lambda one: (not one.isupper(), one))


def test_every_error_of_the_tree_is_public() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    # The clients answer these themselves.
    assert tree - set(gristmill.__all__) == {"PrefixUnknownError", "TooLargeError"}


def test_the_public_modules_are_few() -> None:
    """`gristmill.v1` is generated from the contract; two packages have a module for each trainer and environment."""
    modules = {module.name for module in pkgutil.walk_packages(gristmill.__path__, "gristmill.")}
    public = {name for name in modules if "._" not in name and not name.startswith(("gristmill.v1", *EDGES))}
    assert public == PUBLIC


def test_the_documentation_imports_from_public_modules_alone() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    imported = set(re.findall(r"^ *(?:from|import) (gristmill(?:\.\w+)*)\b", text, re.MULTILINE))
    imported = {name for name in imported if not name.startswith(EDGES)}
    assert {"gristmill", "gristmill.torch"} <= imported <= {"gristmill", *PUBLIC}
    assert not re.findall(r"gristmill\._\w+", text)


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse(Path(gristmill.__file__).read_text())
    (for_checkers,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in for_checkers.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(for_checkers.body)
    seen = [alias.name for node in imports for alias in node.names]
    assert sorted(seen) == gristmill.__all__


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rollout'"):
        _ = gristmill.Rollout


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_rollout_clients_import_no_torch() -> None:
    code = "import sys, gristmill; gristmill.RolloutClient, gristmill.AsyncRolloutClient; print('torch' in sys.modules)"
    assert run_python(code).stdout == "False\n"


def test_the_converters_import_no_framework() -> None:
    code = "import sys, gristmill.converters; print({'torch', 'verl', 'trl', 'skyrl'} & sys.modules.keys())"
    assert run_python(code).stdout == "set()\n"


def test_without_torch_the_trainer_client_says_what_to_install() -> None:
    code = "import sys, gristmill; sys.modules['torch'] = None; gristmill.TrainerClient"
    assert "pip install torch" in run_python(code).stderr.splitlines()[-1]
