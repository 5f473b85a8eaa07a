"""Random calls and answers in all languages: a call is refused, or the engine reads all its words. An answer says the
same whole and streamed, however the engine cuts it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._engines.events import DONE, Event
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.engines.vllm import VLLM
from gristmill_recorder.languages.gemini import GeminiForm
from gristmill_recorder.languages.language import Asking
from gristmill_recorder.languages.messages import MessagesForm
from gristmill_recorder.languages.responses import ResponsesForm
from gristmill_recorder.refusals import WrongCall
from tests.recorder.broken import chunk, completion

ASKING = Asking(VLLM, logprobs=True, images=True)
FORMS: dict[str, Callable[[Any], Any]] = {
    "messages": lambda document: MessagesForm(document, ASKING),
    "responses": lambda document: ResponsesForm(document, ASKING),
    "contents": lambda document: GeminiForm(document, ASKING, model="toy", stream=False),
}
LANGUAGES = pytest.mark.parametrize("language", FORMS)

# In a template WORD stands for words that the model must read, NULL for a field that may be null or missing.
WORD, NULL = "WORD", "NULL"
IMAGE = {"type": "image", "source": {"type": "url", "url": WORD}}
TEXT = {"type": "text", "text": WORD, "cache_control": NULL, "citations": NULL}
THING = {"type": "thing", "text": WORD}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": WORD}}
SEARCH = {"type": "search_result", "title": WORD, "source": WORD, "content": [TEXT]}
INPUT_TEXT, OUTPUT_TEXT = (
    {"type": "input_text", "text": WORD},
    {"type": "output_text", "text": WORD, "annotations": NULL},
)
INPUT_IMAGE, FILE = (
    {"type": "input_image", "image_url": WORD, "detail": NULL},
    {"type": "input_file", "file_data": WORD},
)
PICTURE = {"inline_data": {"mime_type": "image/png", "data": WORD}}
FILE_DATA = {"fileData": {"mimeType": "image/png", "fileUri": WORD}}
CODE, CODE_RESULT = {"executableCode": {"code": WORD}}, {"codeExecutionResult": {"output": WORD}}
LOOK, LOOKED = {"name": "look", "args": {"at": WORD}, "id": NULL}, {"name": "look", "response": {"seen": WORD}}


def one_of(*templates: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(templates)


def some(*templates: Any) -> st.SearchStrategy[Any]:
    return st.lists(one_of(*templates), min_size=1, max_size=3)


def messages() -> st.SearchStrategy[Any]:
    results = st.builds(
        lambda content: {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": NULL},
        some(TEXT, TEXT, IMAGE, {"type": "tool_reference", "tool_name": WORD}, DOCUMENT, SEARCH) | st.just(WORD),
    )
    given_ = st.lists(one_of(TEXT, TEXT, IMAGE, DOCUMENT, THING) | results, min_size=1, max_size=3) | st.just(WORD)
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": WORD}}
    thought, server = {"type": "thinking", "thinking": WORD}, {"type": "server_tool_use", "input": {"query": WORD}}
    answers = some(TEXT, call, thought, server, {"type": "compaction", "content": WORD}) | st.just(WORD)
    system = some(TEXT, TEXT, {"type": "tool_addition", "tool": {"name": WORD}}) | st.just(WORD)
    roles = {"user": given_, "assistant": answers, "system": system}
    said = [
        st.builds(lambda content, role=role: {"role": role, "content": content}, each) for role, each in roles.items()
    ]
    tools = st.just([{"name": WORD, "description": WORD, "input_schema": {"title": WORD}, "strict": NULL}])
    return st.fixed_dictionaries(
        {"messages": st.lists(st.one_of(said), min_size=1, max_size=5)},
        optional={"system": system, "tools": tools, "thinking": st.just(NULL), "mcp_servers": st.just([{"url": WORD}])},
    )


def responses() -> st.SearchStrategy[Any]:
    given_ = some(INPUT_TEXT, INPUT_TEXT, INPUT_IMAGE, FILE, THING) | st.just(WORD)
    answers = some(OUTPUT_TEXT, {"type": "refusal", "refusal": WORD}, {"type": "output_audio", "data": WORD}) | st.just(
        WORD
    )
    roles = {"user": given_, "developer": given_, "assistant": answers}
    said = [
        st.builds(lambda content, role=role: {"role": role, "content": content}, each) for role, each in roles.items()
    ]
    outputs = st.builds(lambda output: {"type": "function_call_output", "call_id": "a", "output": output}, given_)
    items = one_of(
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": WORD, "status": NULL},
        {"type": "custom_tool_call", "call_id": "a", "name": "look", "input": WORD},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": WORD}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": WORD}], "content": NULL},
        {"type": "reasoning", "summary": [], "encrypted_content": WORD},
        {"type": "web_search_call", "action": {"query": WORD}},
        {"type": "item_reference", "id": WORD},
    )
    tools = one_of(
        [{"type": "function", "name": WORD, "description": WORD, "parameters": {"title": WORD}, "strict": NULL}],
        [{"type": "custom", "name": WORD, "description": WORD, "format": {"type": "grammar", "definition": WORD}}],
        [{"type": "mcp", "server_label": WORD}],
    )
    return st.fixed_dictionaries(
        {"input": st.lists(st.one_of([*said, outputs, items]), min_size=1, max_size=5)},
        optional={"instructions": one_of(WORD, NULL), "tools": tools, "reasoning": st.just(NULL)},
    )


def contents() -> st.SearchStrategy[Any]:
    text, thought = {"text": WORD, "inlineData": NULL}, {"text": WORD, "thought": True, "thought_signature": "YWJj"}
    given_ = some(text, text, PICTURE, FILE_DATA, CODE_RESULT, {"functionResponse": LOOKED})
    answers = some(text, thought, {"functionCall": LOOK}, {"function_call": LOOK}, PICTURE, CODE)
    said = st.one_of(
        st.builds(lambda parts: {"role": "user", "parts": parts}, given_),
        st.builds(lambda parts: {"role": "model", "parts": parts}, answers),
    )
    declared = {"name": WORD, "description": WORD, "parameters": {"type": "OBJECT", "description": WORD}}
    system = one_of({"parts": [text]}, {"parts": text}, {"parts": [FILE_DATA]}, NULL)
    return st.fixed_dictionaries(
        {"contents": st.lists(said, min_size=1, max_size=5)},
        optional={
            "systemInstruction": system,
            "system_instruction": system,
            "tools": one_of([{"functionDeclarations": [declared]}], [{"function_declarations": [declared]}]),
            "generationConfig": one_of(NULL, {"responseSchema": {"title": WORD}}, {"speechConfig": {"voice": WORD}}),
        },
    )


REFUSED = (InvalidArgumentError, WrongCall)
CALLS = {"messages": messages(), "responses": responses(), "contents": contents()}


def filled(template: Any, number: Iterator[int], *, nulls: bool) -> Any:
    """Returns a template with words of its own in each place, and null in optional ones, or without these."""
    if template == WORD:
        return f"word{next(number)}."
    if isinstance(template, list):
        return [filled(each, number, nulls=nulls) for each in template]
    if not isinstance(template, dict):
        return None if template == NULL else template
    fields = {name: value for name, value in template.items() if nulls or value != NULL}
    return {name: filled(value, number, nulls=nulls) for name, value in fields.items()}


@LANGUAGES
@given(data=st.data())
def test_the_engine_reads_all_words_of_a_call_that_is_not_refused(language: str, data: st.DataObject) -> None:
    template = data.draw(CALLS[language])
    # Of one field in two spellings, one counts.
    assume(not {"systemInstruction", "system_instruction"} <= template.keys())
    number = count()
    call = filled(template, number, nulls=False)
    try:
        request = FORMS[language]({"model": "toy", **call}).request
    except REFUSED:
        with pytest.raises(REFUSED):
            FORMS[language]({"model": "toy", **filled(template, count(), nulls=True)})
        return
    sent = json.dumps(request)
    assert [word for word in (f"word{each}." for each in range(next(number))) if word not in sent] == []
    assert FORMS[language]({"model": "toy", **filled(template, count(), nulls=True)}).request == request


WORDS = st.text(min_size=1, max_size=6)
ANSWERS = st.fixed_dictionaries(
    {
        "reasoning": st.none() | WORDS,
        "content": st.none() | WORDS,
        "tool_calls": st.lists(
            st.dictionaries(WORDS, st.none() | st.integers() | st.just(10**20 + 1) | WORDS, max_size=3), max_size=3
        ),
    }
)


def calls_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"id-{index}", "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
        for index, arguments in enumerate(answer["tool_calls"])
    ]


def pieces(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def deltas(data: st.DataObject, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the parts of an answer, some of them empty, and each call with its name in the first one."""
    for name in ("reasoning", "content"):
        for piece in pieces(data, answer[name] or ""):
            yield {name: piece}
    for index, call in enumerate(calls_of(answer)):
        first, *others = pieces(data, call["function"]["arguments"])
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": first}}]}
        for piece in others:
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def streamed(form: Any, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chunks = [chunk(prompt_token_ids=[1]), *(chunk("", [104]) for _ in parts), chunk("", [1], "stop")]
    for each, part in zip(chunks[1:], parts, strict=False):
        each["choices"][0]["delta"] = part
    stream = form.stream()
    datas = [*(json.dumps(each).encode() for each in chunks), DONE]
    body = b"".join(stream.read(Event(b"", each)) for each in datas)
    assert stream.is_over
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]


def of_message(events: list[dict[str, Any]]) -> list[Any]:
    """The blocks of a streamed message, as one that is not streamed has them."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input": ""})
        elif event["type"] == "content_block_delta":
            (_, (name, text)) = event["delta"].items()
            name = "input" if name == "partial_json" else name
            blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + text
    return blocks


def said(language: str, document: Any) -> list[Any]:
    """What an answer says: kinds with texts, and names with arguments."""
    if language == "messages":
        blocks = of_message(document) if isinstance(document, list) else document["content"]
        arguments = [each["input"] for each in blocks if each["type"] == "tool_use"]
        texts = [each.get("thinking") or each.get("text") for each in blocks if each["type"] != "tool_use"]
        return [*texts, *(json.loads(each) if isinstance(each, str) else each for each in arguments)]
    if language == "responses":
        items = (document[-1]["response"] if isinstance(document, list) else document)["output"]
        texts = [each["content"][0]["text"] for each in items if each["type"] != "function_call"]
        return [*texts, *(json.loads(each["arguments"]) for each in items if each["type"] == "function_call")]
    answers = document if isinstance(document, list) else [document]
    parts = [part for answer in answers for part in answer["candidates"][0]["content"]["parts"]]
    by_kind = [
        "".join(part.get("text", "") for part in parts if bool(part.get("thought")) is is_thought)
        for is_thought in (True, False)
    ]
    return [*filter(None, by_kind), *(part["functionCall"]["args"] for part in parts if "functionCall" in part)]


@LANGUAGES
@given(data=st.data())
def test_an_answer_says_the_same_whole_and_streamed(language: str, data: st.DataObject) -> None:
    answer: dict[str, Any] = data.draw(ANSWERS)
    form = FORMS[language]({"contents": []} if language == "contents" else {})
    message = {"role": "assistant", **answer, "tool_calls": calls_of(answer)}
    expected = [*filter(None, (answer["reasoning"], answer["content"])), *answer["tool_calls"]]
    if language == "responses" and not answer["content"] and not answer["tool_calls"]:
        # Agents send back only items, so that there is one.
        expected.append("")
    assert said(language, json.loads(orjson.dumps(form.whole(completion(message=message))))) == expected
    assert said(language, streamed(form, [*deltas(data, answer)])) == expected
