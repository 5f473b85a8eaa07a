"""Names that clients gave do nothing to a terminal."""

from gristmill.v1 import run_pb2
from gristmill_service.cli.terminal import printable
from gristmill_service.cli.watch.printed import _lines
from gristmill_service.cli.watch.tail import sentence


def test_escapes_and_new_lines_are_written_out() -> None:
    assert printable("\x1b[2Jwhy\nfake batch 9 sealed") == "\\x1b[2Jwhy\\nfake batch 9 sealed"
    assert printable("数学 é 'ok'") == "数学 é 'ok'"


def test_a_line_of_tail_stays_one_line() -> None:
    line = sentence(
        {"event": "groups dropped", "reason": "\x1b[2J\nx", "count": 1, "groups": [{"uid": "a\nb", "round": 0}]}
    )
    assert line == "1 group dropped (\\x1b[2J\\nx): a\\nb"


def test_of_many_reasons_the_most_frequent_are_shown() -> None:
    status = run_pb2.RunStatus(groups_dropped={f"reason {number}": 1 + (number == 7) for number in range(50)})
    [dropped] = [text for name, text in _lines(status) if name == "dropped"]
    assert dropped.startswith("2 reason 7, 1 reason 0, ")
    assert dropped.endswith(", and 30 more reasons")
