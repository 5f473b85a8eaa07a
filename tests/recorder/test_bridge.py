"""The bridge is the template's own rendering of the new messages, whatever the template does to earlier ones.

A token is a character here. Control tokens are single signs: ▶ begins and ■ ends a turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_recorder.splicing.bridge import (
    bridge,
    bridge_without_end,
    end_of_turn,
    end_probes,
    following_passage,
    may_contain_passages,
    passage,
    skeletons,
)

Messages = list[dict[str, Any]]
Template = Callable[[Messages], str]


def last_user(messages: Messages) -> int:
    return max(place for place, message in enumerate(messages) if message["role"] == "user")


def calls_of(message: dict[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return "".join(f"<call>{each['name']}{json.dumps(json.loads(each['arguments']))}</call>" for each in functions)


def drops_thoughts(messages: Messages) -> str:
    """As Qwen3 does: an answer before the last user's message loses its thoughts, and one after it always has some."""
    turns, last = "", last_user(messages)
    for place, message in enumerate(messages):
        has_thoughts = message["role"] == "assistant" and place > last
        thoughts = f"<think>{message.get('reasoning', '')}</think>" if has_thoughts else ""
        turns += f"▶{message['role']}\n{thoughts}{message['content']}{calls_of(message)}■\n"
    return f"{turns}▶assistant\n"


def opens_thoughts(messages: Messages) -> str:
    """As Qwen3.5 and MiniMax do: the generation prompt begins the thoughts, and the history has none."""
    return "".join(f"▶{m['role']}\n{m['content']}{calls_of(m)}■\n" for m in messages) + "▶assistant\n<think>\n"


def writes_another_end(messages: Messages) -> str:
    """As gpt-oss does: the model ends its last answer by ◼ and a call by ◇; the history writes ◆ and ◇."""
    turns = ""
    for message in messages:
        name = "functions.look" if message["role"] == "tool" else message["role"]
        end = "◇" if message.get("tool_calls") else "◆"
        turns += f"▶{name}|{message['content']}{calls_of(message)}{end}"
    return f"{turns}▶assistant"


def moves_tools(messages: Messages) -> str:
    """As Mistral does: the tools and the system's words stand before the last user's message."""
    turns, last = "", last_user(messages)
    system = "".join(f"{message['content']}\n" for message in messages if message["role"] == "system")
    for place, message in enumerate(messages):
        if message["role"] == "user":
            turns += f"[TOOLS]look[/TOOLS][INST]{system}" if place == last else "[INST]"
            turns += f"{message['content']}[/INST]"
        elif message["role"] == "tool":
            turns += f"[RESULT]{message['content']}[/RESULT]"
        elif message["role"] == "assistant":
            turns += f"{message['content']}{calls_of(message)}■"
    return turns


def has_no_ends(messages: Messages) -> str:
    """As GLM does: a turn ends where the next begins. The model ends its answers by the beginning of the next turn."""
    begin = {"system": "◓", "user": "◐", "assistant": "◑", "tool": "◒"}
    return "".join(f"{begin[m['role']]}\n{m['content']}{calls_of(m)}" for m in messages) + "◑"


def goes_on_after_results(messages: Messages) -> str:
    """As Gemma 4 does: the result of a tool is a part of the model's turn, and ◎ both ends a call and begins it."""
    turns = ""
    for message in messages:
        if message["role"] == "tool":
            turns += f"◎{message['content']}◉"
        else:
            end = "" if message.get("tool_calls") else "■\n"
            turns += f"▶{message['role']}\n{message['content']}{calls_of(message)}{end}"
    return turns if messages[-1]["role"] == "tool" else f"{turns}▶assistant\n"


def moves_system(messages: Messages) -> str:
    """All system messages come first."""
    return opens_thoughts(sorted(messages, key=lambda message: message["role"] != "system"))


def call(arguments: str = '{"at" :"clock"}') -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "call-1", "function": function}]}


def shows_one_call(messages: Messages) -> str:
    """As gpt-oss does: of several calls in one answer the template shows the first."""
    first = [{**each, "tool_calls": (each.get("tool_calls") or [])[:1]} for each in messages]
    return drops_thoughts(first)


def result(words: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call-1", "content": words}


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


TWICE = {**call(), "tool_calls": [*call()["tool_calls"], *call()["tool_calls"]]}
CALLED: Messages = [{"role": "system", "content": "Be brief."}, user("hello"), call()]
ANSWERED: Messages = [*CALLED, result("noon"), {"role": "assistant", "content": "It is noon."}]


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def bridged(template: Template, old: Messages, new: Messages, last: str | None, *, is_cut: bool = False) -> str | None:
    """last: the token that ended the answer; None if it reached a limit."""
    token, is_cut = None if last is None else ord(last), is_cut or last is None
    renderings = [tokens(template(messages)) for messages in skeletons([*old, *new], len(old))]
    ends = end_of_turn([tokens(template(messages)) for messages in end_probes([])])
    has_calls = bool(old[-1].get("tool_calls"))
    between = bridge(renderings, token, ends, is_cut=is_cut, has_calls=has_calls)
    if between is None and not ends:
        answers = [tokens(template(messages[: len(old)])) for messages in skeletons([*old, *new], len(old))[:2]]
        between = bridge_without_end(renderings, answers, token)
    return None if between is None else "".join(map(chr, between))


@pytest.mark.parametrize(
    ("template", "old", "new", "last", "expected"),
    [
        (drops_thoughts, ANSWERED, user("why"), "■", "\n▶user\nwhy■\n▶assistant\n"),
        (drops_thoughts, CALLED, result("xii"), "■", "\n▶tool\nxii■\n▶assistant\n"),
        (opens_thoughts, ANSWERED, user("why"), "■", "\n▶user\nwhy■\n▶assistant\n<think>\n"),
        (writes_another_end, ANSWERED, user("why"), "◼", "▶user|why◆▶assistant"),
        (writes_another_end, CALLED, result("xii"), "◇", "▶functions.look|xii◆▶assistant"),
        (moves_tools, ANSWERED, user("why"), "■", "[TOOLS]look[/TOOLS][INST]Be brief.\nwhy[/INST]"),
        (moves_tools, CALLED, result("xii"), "■", "[RESULT]xii[/RESULT]"),
        (has_no_ends, ANSWERED, user("why"), "◐", "\nwhy◑"),
        (has_no_ends, CALLED, result("xii"), "◒", "\nxii◑"),
        # An end that the template writes nowhere: the next turn begins as always.
        (has_no_ends, ANSWERED, user("why"), "◼", "◐\nwhy◑"),
        (has_no_ends, CALLED, result("xii"), "◼", "◒\nxii◑"),
        (shows_one_call, [*CALLED[:2], TWICE], result("xii"), "■", "\n▶tool\nxii■\n▶assistant\n"),
        (goes_on_after_results, ANSWERED, user("why"), "■", "\n▶user\nwhy■\n▶assistant\n"),
        (goes_on_after_results, CALLED, result("xii"), "◎", "xii◉"),
        (moves_system, ANSWERED, user("why"), "■", "\n▶user\nwhy■\n▶assistant\n<think>\n"),
        # An end that the template writes in the header of the next turn alone.
        (drops_thoughts, ANSWERED, user("why"), "▶", "\n▶user\nwhy■\n▶assistant\n"),
    ],
)
def test_what_follows_an_answer_is_what_the_template_writes_behind_it(
    template: Template, old: Messages, new: dict[str, Any], last: str, expected: str
) -> None:
    assert bridged(template, old, [new], last) == expected


@pytest.mark.parametrize("template", [drops_thoughts, opens_thoughts, goes_on_after_results])
def test_an_answer_that_was_cut_gets_the_end_of_turn_of_the_template(template: Template) -> None:
    whole = bridged(template, ANSWERED, [user("why")], "■")
    assert bridged(template, ANSWERED, [user("why")], None) == f"■{whole}"


@pytest.mark.parametrize(
    ("template", "old", "new", "last"),
    [
        (drops_thoughts, ANSWERED, user("why"), "■"),
        (drops_thoughts, CALLED, result("xii"), "■"),
        (writes_another_end, CALLED, result("xii"), "◇"),
        (has_no_ends, ANSWERED, user("why"), "◐"),
        (has_no_ends, CALLED, result("xii"), "◒"),
        (goes_on_after_results, CALLED, result("xii"), "◎"),
    ],
)
def test_an_end_that_the_call_names_as_a_stop_token_stands_there_once(
    template: Template, old: Messages, new: dict[str, Any], last: str
) -> None:
    assert bridged(template, old, [new], last, is_cut=True) == bridged(template, old, [new], last)


def test_a_stop_token_that_is_no_end_of_turn_is_followed_by_one() -> None:
    assert bridged(drops_thoughts, ANSWERED, [user("why")], "n", is_cut=True) == "■\n▶user\nwhy■\n▶assistant\n"


def test_a_switch_in_an_earlier_message_counts() -> None:
    def switches(messages: Messages) -> str:
        """As Nemotron Nano v2 does: any user may turn thoughts off."""
        is_off = any("/no_think" in message["content"] for message in messages if message["role"] == "user")
        turns = "".join(f"▶{m['role']}\n{m['content'].replace('/no_think', '')}■\n" for m in messages)
        return f"{turns}▶assistant\n<think>{'</think>' if is_off else ''}"

    said = {"role": "assistant", "content": "hi"}
    for words, thoughts in (("hello", "<think>"), ("hello /no_think", "<think></think>")):
        asked = {"role": "user", "content": [{"type": "text", "text": words}]}
        spoken = skeletons([asked, said, user("why")], 2)
        following = bridge(
            [tokens(switches(messages)) for messages in spoken], ord("■"), (), is_cut=False, has_calls=False
        )
        assert "".join(map(chr, following or ())) == f"\n▶user\nwhy■\n▶assistant\n{thoughts}"


@pytest.mark.parametrize(("template", "end"), [(drops_thoughts, "■"), (has_no_ends, "")])
def test_an_answer_that_was_cut_behind_a_call_gets_no_part_of_another_call(template: Template, end: str) -> None:
    whole = bridged(template, CALLED, [result("xii")], end or "◒")
    assert bridged(template, CALLED, [result("xii")], None) == f"{end or '◒'}{whole}"


@pytest.mark.parametrize(
    ("template", "old", "new", "last"),
    [
        # The end that the template writes stands in the tool's message alone: behind it the result would be lost.
        (writes_another_end, CALLED, [result("xii")], "◼"),
        # The words would stand before the recorded tokens.
        (moves_system, ANSWERED, [{"role": "system", "content": "Stop."}, user("why")], "■"),
        (moves_system, ANSWERED, [user("why"), {"role": "system", "content": "Stop."}], "■"),
        # The template shows no results of tools.
        (lambda m: drops_thoughts([each for each in m if each["role"] != "tool"]), CALLED, [result("xii")], "■"),
    ],
)
def test_where_a_message_would_be_lost_there_is_no_bridge(
    template: Template, old: Messages, new: Messages, last: str
) -> None:
    assert bridged(template, old, new, last) is None


WORDS = st.text("xy0a \n", min_size=1, max_size=5)
EACH = pytest.mark.parametrize("template", [drops_thoughts, opens_thoughts, goes_on_after_results])


@EACH
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), new=st.lists(WORDS, min_size=1, max_size=2))
def test_the_bridge_is_the_end_of_the_whole_rendering(
    template: Template, turns: list[tuple[str, str]], new: list[str]
) -> None:
    old = [message for asked, said in turns for message in (user(asked), {"role": "assistant", "content": said})]
    following = [user(words) for words in new]
    between = bridged(template, old, following, "■")
    whole = template([*old, *following])
    assert between is not None
    assert whole.endswith(f"■{between}")
    assert whole.removesuffix(between).count("▶") == len(old)


def passage_of(template: Template, old: Messages, new: Messages) -> list[int]:
    renderings = [tokens(template(messages)) for messages in skeletons([*old, *new], len(old))]
    following = bridge(renderings, ord("■"), (), is_cut=False, has_calls=bool(old[-1].get("tool_calls")))
    assert following is not None
    return list(passage(renderings, following))


def followed(template: Template, known: list[int], old: Messages, new: Messages) -> str | None:
    first, *_ = skeletons([*old, *new], len(old))
    following = following_passage(known, tokens(template(first)))
    return None if following is None else "".join(map(chr, following))


@EACH
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), words=WORDS)
def test_one_rendering_has_the_same_bridge_once_the_passage_is_known(
    template: Template, turns: list[tuple[str, str]], words: str
) -> None:
    known = passage_of(template, ANSWERED, [user("why")])
    old = [message for asked, said in turns for message in (user(asked), {"role": "assistant", "content": said})]
    assert followed(template, known, old, [user(words)]) == bridged(template, old, [user(words)], "■")


def test_a_passage_that_a_message_repeats_is_not_followed() -> None:
    known = passage_of(drops_thoughts, ANSWERED, [user("why")])
    copy = "".join(map(chr, known))
    assert followed(drops_thoughts, known, ANSWERED, [user("why")]) == "\n▶user\nwhy■\n▶assistant\n"
    assert followed(drops_thoughts, known, ANSWERED, [user(copy)]) is None
    assert may_contain_passages([user(copy)])
    assert not may_contain_passages([user("why")])


def test_a_message_that_is_nested_too_deeply_may_contain_passages() -> None:
    nested: Any = "why"
    for _ in range(300):
        nested = [nested]
    assert may_contain_passages([{"role": "user", "content": nested}])


def test_a_template_that_goes_on_otherwise_is_not_followed() -> None:
    known = passage_of(drops_thoughts, ANSWERED, [user("why")])
    assert followed(writes_another_end, known, ANSWERED, [user("why")]) is None
