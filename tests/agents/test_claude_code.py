"""Claude Code, which calls by Anthropic's messages, streamed."""

from __future__ import annotations

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call, together
from tests.recorder.engine import Words


def ask(rollout: Rollout, text: str, *flags: str) -> str:
    return rollout.launch(
        *("claude", "-p", text, "--model", "toy", "--allowed-tools", "Bash,Read,Edit,Agent", *flags),
        ANTHROPIC_BASE_URL=rollout.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        ENABLE_TOOL_SEARCH="false",
    )


def test_a_session_with_a_sub_agent_is_a_row_of_each(rollout: Rollout) -> None:
    numbers = rollout.folder / "numbers.txt"
    asked = {"description": "Count lines", "prompt": "SUBTASK: count the lines", "subagent_type": "general-purpose"}
    main = (
        together(
            call("Read", "Look first.", "\n\nI look.", file_path=str(numbers)),
            call("Bash", command="ls", description="List files"),
        ),
        call("Agent", "Not mine.", **asked, run_in_background=False),
        Words("Done.", "There are three."),
        # Claude Code rewrites these: it adds a default, removes spaces and a needless `cd`, and wraps what is no JSON.
        call("Edit", file_path=str(numbers), old_string="3", new_string="three  "),
        call("Bash", command=f"cd {rollout.folder} && cat numbers.txt", description="Look"),
        Words(tool=("Bash", '{"command": ')),
        Words(text="It is written."),
    )
    helper = (call("Bash", "Count.", command="wc -l numbers.txt", description="Count"), Words(text="Three lines."))
    rollout.script(Branch("sub-agent", "SUBTASK", helper), Branch("main", "TASK", main))
    numbers.write_text("1\n2\n3\n")
    assert "There are three." in ask(rollout, "TASK: count the lines")
    assert "It is written." in ask(rollout, "Write the last one as a word.", "--continue")
    assert numbers.read_text() == "1\n2\nthree\n"
    rollout.check()
