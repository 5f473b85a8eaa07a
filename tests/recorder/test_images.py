"""`--columns images`: a row has the images of its prompt, in every language; without the column they are refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from google.genai import types

from gristmill import TrainerClient
from tests.on_loop import Service
from tests.recorder import test_gemini as gemini
from tests.recorder.engine import IMAGE, Engine, tokens_of
from tests.recorder.recorders import Recorder, StartRecorder, create_run, end, post, start
from tests.recorder.test_chat import ask, said
from tests.recorder.test_document import snippet

COLUMN = {"name": "images", "dtype": "uint8", "scope": "items", "required": False}
# Bytes whose base64 is another in URLs.
DATA = base64.b64encode(b"\xff\xfe\xfd").decode()
PNG = f"data:image/png;base64,{DATA}"
CAT, DOG = "http://images/cat.png", "http://images/dog.png"


@pytest.fixture(scope="module")
def seeing(engine: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("seeing")
    flags = ("--journal", str(directory / "journal"), "--columns", "images", "--splice", "on")
    running = start(directory / "log", engine.url, service.grpc_address, *flags)
    yield running
    end(running)


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    create_run(service.grpc_address, run_name, columns=[COLUMN])
    return run_name


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def images_of_rows(address: str, run: str) -> list[tuple[int, list[str]]]:
    """How many images the tokens of each row have, and the URLs of its column."""
    with TrainerClient(address, run, 0, timeout_s=20) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        edges, padding = shard["images_offsets"].tolist(), shard["is_padding"].tolist()
        lines = [bytes(shard["images"][edges[row] : edges[row + 1]].tolist()) for row in range(len(edges) - 1)]
        prompts = [bytes(token for token in row if token < 256) for row in shard["sequences"].tolist()]
        shard.ack()
    urls = [[json.loads(line)["url"] for line in each.splitlines()] for each in lines]
    counts = [prompt.count(IMAGE.encode()) for prompt in prompts]
    return [row for row, is_padding in zip(zip(counts, urls, strict=True), padding, strict=True) if not is_padding]


def test_a_conversation_is_one_row_with_each_image_once_and_in_order(
    seeing: Recorder, service: Service, run: str
) -> None:
    not_spliced = seeing.metric('splices_total{result="images"}')
    messages: list[Any] = []
    with seeing.openai(run) as client:
        for content in (
            [text("say a"), image(PNG), image(CAT)],
            "say b",
            [image(DOG), text("say c")],
            [text("say d"), image(PNG)],
        ):
            messages.append(user(content))
            messages.append(said(ask(client, messages).choices[0].message))
    assert seeing.finish(run)["steps"] == 4
    assert images_of_rows(service.grpc_address, run) == [(4, [PNG, CAT, DOG, PNG])]
    assert seeing.metric('splices_total{result="images"}') == not_spliced + 4


def test_a_trainer_reads_the_images_as_documented(seeing: Recorder, service: Service, run: str) -> None:
    with seeing.openai(run) as client:
        ask(client, [user([text("say a"), image(PNG), image(PNG)])])
    seeing.finish(run)
    code: dict[str, Any] = {}
    exec(snippet("images"), code)
    with TrainerClient(service.grpc_address, run, 0, timeout_s=20) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert code["images_of"](shard, 0) == [base64.b64decode(DATA)] * 2
        shard.ack()


def test_branches_have_the_images_of_their_own_prompts(seeing: Recorder, service: Service, run: str) -> None:
    first = user([text("say a"), image(CAT)])
    with seeing.openai(run) as client:
        answer = said(ask(client, [first]).choices[0].message)
        for new in ([text("say b"), image(DOG)], [text("say c"), image(PNG)], "say d"):
            ask(client, [first, answer, user(new)], n=2)
        ask(client, [user("say e")])
    assert seeing.finish(run)["steps"] == 8
    rows = images_of_rows(service.grpc_address, run)
    assert sorted(rows) == sorted([(2, [CAT, DOG])] * 2 + [(2, [CAT, PNG])] * 2 + [(1, [CAT])] * 2 + [(0, [])])


def test_conversations_without_images_are_spliced_as_before(seeing: Recorder, run: str) -> None:
    spliced = seeing.metric('splices_total{result="spliced"}')
    with seeing.openai(run) as client:
        ask(client, [user([text("say a"), image(CAT)])])
        thought = ask(client, [user("think a; b")]).choices[0].message
        ask(client, [user("think a; b"), {"role": "assistant", "content": thought.content}, user("say c")])
    assert seeing.metric('splices_total{result="spliced"}') == spliced + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"image_url": CAT}, image(PNG)]}]}),
        (
            "v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": CAT}},
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
                        ],
                    }
                ],
            },
        ),
        (
            "v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": CAT, "detail": "auto"},
                            {"type": "input_image", "image_url": PNG},
                        ],
                    }
                ]
            },
        ),
        (
            "v1beta/models/toy:generateContent",
            {
                "contents": [
                    {
                        "role": "user",
                        "parts": [
                            {"fileData": {"mimeType": "image/png", "fileUri": CAT}},
                            {"inlineData": {"mimeType": "image/png", "data": DATA}},
                        ],
                    }
                ]
            },
        ),
    ],
)
class TestEachLanguage:
    def test_the_user_shows_images(self, seeing: Recorder, service: Service, run: str, path: str, body: Any) -> None:
        assert post(f"{seeing.base(run)}/{path}", {"model": "toy", **body})[0] == 200
        seeing.finish(run)
        assert images_of_rows(service.grpc_address, run) == [(2, [CAT, PNG])]

    def test_without_the_column_images_are_refused_with_the_remedy(
        self, recorder: Recorder, run: str, path: str, body: Any
    ) -> None:
        status, answer = post(f"{recorder.base(run)}/{path}", {"model": "toy", **body})
        assert (status, answer["error"]["code"]) == (400, "gristmill_WrongCall")
        assert "gristmill record --columns images" in answer["error"]["message"]


SHOWN = [
    {"role": "tool", "tool_call_id": "1", "content": "here"},
    {"role": "user", "content": [image(PNG)]},
    {"role": "user", "content": [text("say b"), image(CAT)]},
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    user("say a"),
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [
                                    text("here"),
                                    {
                                        "type": "image",
                                        "source": {"type": "base64", "media_type": "image/png", "data": DATA},
                                    },
                                ],
                            },
                            text("say b"),
                            {"type": "image", "source": {"type": "url", "url": CAT}},
                        ],
                    },
                ],
            },
        ),
        (
            "v1/responses",
            {
                "input": [
                    user("say a"),
                    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "1",
                        "output": [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": PNG}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "say b"},
                            {"type": "input_image", "image_url": CAT},
                        ],
                    },
                ]
            },
        ),
        (
            "v1beta/models/toy:generateContent",
            {
                "contents": [
                    {"role": "user", "parts": [{"text": "say a"}]},
                    {"role": "model", "parts": [{"functionCall": {"id": "1", "name": "look", "args": {}}}]},
                    {
                        "role": "user",
                        "parts": [
                            {
                                "functionResponse": {
                                    "id": "1",
                                    "name": "look",
                                    "response": {"result": "here"},
                                    "parts": [{"inlineData": {"mimeType": "image/png", "data": DATA}}],
                                }
                            },
                            {"text": "say b"},
                            {"fileData": {"mimeType": "image/png", "fileUri": CAT}},
                        ],
                    },
                ]
            },
        ),
    ],
)
def test_images_of_a_tool_follow_its_result_as_the_users(
    seeing: Recorder, engine: Engine, service: Service, run: str, path: str, body: Any
) -> None:
    assert post(f"{seeing.base(run)}/{path}", {"model": "toy", **body})[0] == 200
    assert engine.requests[-1]["messages"][2:] == SHOWN
    seeing.finish(run)
    assert images_of_rows(service.grpc_address, run) == [(2, [PNG, CAT])]


def test_bytes_that_googles_library_sends_are_images(seeing: Recorder, service: Service, run: str) -> None:
    data = base64.b64decode(DATA)
    shown = types.Part.from_bytes(data=data, mime_type="image/png")
    called = types.Part(function_call=types.FunctionCall(id="1", name="look", args={}))
    parts = [types.FunctionResponsePart.from_bytes(data=data, mime_type="image/png")]
    result = types.FunctionResponse(id="1", name="look", response={"result": "say b"}, parts=parts)
    with gemini.agent(seeing, run) as client:
        contents = [
            types.Content(role="user", parts=[types.Part(text="say a"), shown]),
            types.Content(role="model", parts=[called]),
            types.Content(role="user", parts=[types.Part(function_response=result)]),
        ]
        gemini.call(client, contents)
    seeing.finish(run)
    assert images_of_rows(service.grpc_address, run) == [(2, [PNG, PNG])]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("v1/chat/completions", {"messages": [user([{"type": "input_audio", "input_audio": {}}])]}, "only tokens"),
        ("v1/chat/completions", {"messages": [user([{"type": "image_url", "uuid": "1"}])]}, "no URL"),
        ("v1/chat/completions", {"messages": [user([{"type": "image_pil", "image_pil": 1}])]}, "only tokens"),
        ("v1/chat/completions", {"messages": [user([{"video_url": CAT}])]}, "only tokens"),
        ("v1/messages", {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "only tokens"),
        ("v1/messages", {"messages": [user([{"type": "image", "source": {"type": "file"}}])]}, "type file"),
        ("v1/responses", {"input": [user([{"type": "input_image", "file_id": "1"}])]}, "no URL"),
        ("v1/responses", {"input": [user([{"type": "input_file", "file_id": "1"}])]}, "only tokens"),
        ("v1/responses", {"input": [{"role": "system", "content": [{"type": "input_image"}]}]}, "only tokens"),
        (
            "v1beta/models/toy:generateContent",
            {"contents": {"role": "user", "parts": [{"inlineData": {"mimeType": "audio/wav", "data": ""}}]}},
            "only tokens",
        ),
        ("inference/v1/generate", {"token_ids": tokens_of("say a"), "features": {"mm_hashes": {}}}, "images"),
        ("generate", {"input_ids": tokens_of("say a"), "image_data": [CAT]}, "images"),
    ],
)
def test_other_media_and_images_that_no_row_would_have_are_refused(
    seeing: Recorder, run: str, path: str, body: Any, problem: str
) -> None:
    status, answer = post(f"{seeing.base(run)}/{path}", {"model": "toy", **body})
    assert (status, answer["error"]["code"]) == (400, "gristmill_WrongCall")
    assert problem in answer["error"]["message"]


def test_an_image_survives_a_restart(start_recorder: StartRecorder, engine: Engine, service: Service, run: str) -> None:
    first = start_recorder(engine.url, service.grpc_address, "--columns", "images")
    with first.openai(run) as client:
        ask(client, [user([text("say a"), image(PNG)])])
    first.kill()
    second = start_recorder(engine.url, service.grpc_address, "--columns", "images")
    second.finish(run)
    assert images_of_rows(service.grpc_address, run) == [(1, [PNG])]
