"""Claude Code, which calls by Anthropic's messages, streamed."""

from __future__ import annotations

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call, together
from tests.recorder.engine import Words


def test_a_task_with_a_sub_agent_is_a_row_of_each(rollout: Rollout) -> None:
    numbers = rollout.folder / "numbers.txt"
    asked = {"description": "Count lines", "prompt": "SUBTASK: count the lines", "subagent_type": "general-purpose"}
    main = (
        together(
            call("Read", "Look first.", "\n\nI look.", file_path=str(numbers)),
            call("Bash", command="ls", description="List files"),
        ),
        call("Agent", "Not mine.", **asked, run_in_background=False),
        call("Bash", command="echo 3 > count.txt", description="Write the count"),
        Words("Done.", "There are three."),
    )
    helper = (call("Bash", "Count.", command="wc -l numbers.txt", description="Count"), Words(text="Three lines."))
    rollout.script(Branch("sub-agent", "SUBTASK", helper), Branch("main", "TASK", main))
    numbers.write_text("1\n2\n3\n")
    said = rollout.launch(
        *("claude", "-p", "TASK: count the lines", "--model", "toy", "--allowed-tools", "Bash,Read,Agent"),
        ANTHROPIC_BASE_URL=rollout.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    assert "There are three." in said
    assert (rollout.folder / "count.txt").read_text() == "3\n"
    rollout.check()
