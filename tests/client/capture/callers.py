"""The HTTP clients by which agents call an engine, and what a call is and becomes."""

from __future__ import annotations

from typing import Any

import aiohttp
import httpx
import openai

from tests.recorder.engine import Words, answer_of, logprobs_for, prompt_of
from tests.recorder.recorders import TrainedRow

HI = [{"role": "user", "content": "say hi"}]


def by_openai(url: str, body: Any) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer: Any = client.chat.completions.create(**body)
        return "".join(one.model_dump_json() for one in answer) if body.get("stream") else answer.model_dump_json()


def by_httpx(url: str, body: Any) -> str:
    with httpx.Client() as client:
        return client.post(f"{url}/v1/chat/completions", json=body).text


async def by_async_openai(url: str, body: Any) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer: Any = await client.chat.completions.create(**body)
        if not body.get("stream"):
            return str(answer.model_dump_json())
        return "".join([chunk.model_dump_json() async for chunk in answer])


async def by_async_httpx(url: str, body: Any) -> str:
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        return (await answer.aread()).decode()


async def by_aiohttp(url: str, body: Any) -> str:
    async with (
        aiohttp.ClientSession(f"{url}/v1/") as session,
        session.post("chat/completions", json=body, raise_for_status=True) as answer,
    ):
        return await answer.text()


async def by_aiohttp_line_by_line(url: str, body: Any) -> str:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
        return "".join([line.decode() async for line in answer.content])


SYNC = [by_openai, by_httpx]
ASYNC = [by_async_openai, by_async_httpx, by_aiohttp, by_aiohttp_line_by_line]


def meaning(text: str) -> str:
    """Without the spaces that depend on who wrote the JSON, and without logprobs that are null, as vLLM has them."""
    return text.replace('": ', '":').replace(', "', ',"').replace(", {", ",{").replace(',"logprobs":null', "")


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def ask(client: Any, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="toy", messages=[user(text)], **more)


def steps(trajectory: Any) -> int:
    return int(repr(trajectory).partition(": ")[2].split()[0])


def expected(text: str = "hi") -> TrainedRow:
    answer = answer_of(Words(text=text))
    return TrainedRow([*prompt_of([user(f"say {text}")]), *answer], answer, logprobs_for(len(answer)), 1.0)
