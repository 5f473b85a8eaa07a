"""The command of an install without the extra `service`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import gristmill_process

pytestmark = pytest.mark.slow

_HIDES = """
import sys

class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == {package!r}:
            raise {error}

sys.meta_path.insert(0, Hidden())
from gristmill_service.cli import main
main()
"""


def without(
    package: str, *arguments: str, error: str = 'ModuleNotFoundError(f"No module named {name!r}", name=name)'
) -> subprocess.CompletedProcess[str]:
    """`gristmill` where a package is not installed, or where importing it raises this."""
    code = _HIDES.format(package=package, error=error)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("package", ["typer", "pydantic_settings", "yaml"])
def test_what_is_missing_is_named_with_the_remedy(package: str) -> None:
    ended = without(package, "serve")
    assert ended.returncode == 2
    [message] = ended.stderr.splitlines()
    assert message.startswith(f"gristmill: the commands and the service need {package}, which is not installed; ")
    assert message.endswith("pip install '.[service]' in gristmill's checkout")


def test_ctrl_c_is_quiet_also_while_packages_are_imported() -> None:
    ended = without("typer", "serve", error="KeyboardInterrupt")
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_module_of_our_own_that_is_missing_is_no_matter_of_extras() -> None:
    ended = without("gristmill", "serve")
    assert ended.returncode == 1
    assert "ModuleNotFoundError" in ended.stderr


def test_a_shell_completes_commands_and_flags() -> None:
    for typed, completed in (("gristmill runs de", {"delete"}), ("gristmill status --js", {"--json"})):
        asked = gristmill_process(
            _GRISTMILL_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" "))
        )
        assert set(asked.stdout.split()) == completed


def test_a_refusal_is_one_line_in_a_pipe_however_long(tmp_path: Path) -> None:
    message = gristmill_process("runs", "create", "any", "--config", tmp_path / f"{'long' * 60}.yaml").stderr
    assert message.startswith("refused: ")
    assert len(message.splitlines()) == 1


def test_the_installed_command_is_this_entry_point() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '\ngristmill = "gristmill_service.cli:main"\n' in text
