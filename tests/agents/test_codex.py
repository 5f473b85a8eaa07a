"""Codex, which calls by Responses, streamed."""

from __future__ import annotations

import json

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call, together
from tests.recorder.engine import Words

CONFIG = """
model = "toy"
model_provider = "recorder"
web_search = "disabled"
check_for_update_on_startup = false
analytics.enabled = false

[model_providers.recorder]
name = "recorder"
base_url = "{url}/v1"
wire_api = "responses"
"""


def wait(spawned: str) -> Words:
    return call("multi_agent_v1__wait_agent", targets=[json.loads(spawned)["agent_id"]])


def test_a_task_with_a_sub_agent_is_a_row_of_each(rollout: Rollout) -> None:
    main = (
        together(
            call("exec_command", "Look first.", "\n\nI look.", cmd="cat numbers.txt"),
            call("exec_command", cmd="ls"),
        ),
        call("multi_agent_v1__spawn_agent", "Not mine.", message="SUBTASK: count the lines"),
        wait,
        call("exec_command", cmd="echo 3 > count.txt"),
        Words("Done.", "There are three."),
    )
    helper = (call("exec_command", "Count.", cmd="wc -l numbers.txt"), Words(text="Three lines."))
    rollout.script(Branch("sub-agent", "SUBTASK", helper), Branch("main", "TASK", main))
    (rollout.folder / "numbers.txt").write_text("1\n2\n3\n")
    (rollout.folder / ".codex").mkdir()
    (rollout.folder / ".codex/config.toml").write_text(CONFIG.format(url=rollout.url))
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    assert "There are three." in rollout.launch("codex", "exec", *flags, "TASK: count the lines")
    assert (rollout.folder / "count.txt").read_text() == "3\n"
    rollout.check()
