"""Clients while replicas are replaced as a cluster replaces pods: see `tests.faults.pods`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ISOLATED = ["unshare", "--net", "--mount"]
# 3 s are promised, and mostly it is below 1.3 s; a machine that runs other tests meanwhile adds to it.
_LONGEST_S = 5.0


def may_isolate() -> bool:
    """Whether this process may have a network of its own."""
    tools = shutil.which("unshare") and shutil.which("ip")
    return bool(tools) and subprocess.run([*_ISOLATED, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_isolate(), reason="a network of one's own needs root, unshare and ip")
@pytest.mark.timeout(240)
def test_replicas_that_restart_one_after_another_hold_up_no_call_by_list_or_by_name(tmp_path: Path) -> None:
    command = [*_ISOLATED, sys.executable, "-m", "tests.faults.pods", str(tmp_path)]
    played = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    longest_s = json.loads(played.stdout)
    assert len(longest_s) == 4
    assert max(longest_s.values()) < _LONGEST_S, longest_s
