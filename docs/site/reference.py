"""Generates the reference: pages from docstrings, commands, the HTTP API and protos."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import typer.main
from typer.testing import CliRunner

from gristmill import __all__ as clients
from gristmill_service.cli.commands import app
from gristmill_service.logs import configure_logs
from gristmill_service.service import Service
from gristmill_service.settings import Settings

Schema = dict[str, Any]

_MODULES = {
    "gristmill.torch": "Shards as tensors. Requires PyTorch.",
    "gristmill.converters": "Rollouts of other frameworks as rows, for `submit`: [how](../docs/converters.md).",
    "gristmill.completions": "Answers of engines as steps.",
    "gristmill.environments.verifiers": "Environments of verifiers: [how](../docs/environments.md).",
    "gristmill.adapters.trl": "[TRL](../docs/trainers/trl.md) on a run.",
    "gristmill.adapters.skyrl": "[SkyRL](../docs/trainers/skyrl.md) on a run.",
    "gristmill.adapters.verl": "[verl](../docs/trainers/verl.md) on a run.",
    "gristmill.adapters.slime": "[slime](../docs/trainers/slime.md) on a run.",
    "gristmill.adapters.prime_rl": "[prime-rl](../docs/trainers/prime_rl.md) on a run.",
}


def pages(root: Path) -> dict[str, str]:
    """Returns the pages in Markdown, by file name."""
    return {
        "python.md": "\n".join(_python()),
        "commands.md": "\n".join(_commands()),
        "http.md": "\n".join(_http(asyncio.run(_openapi()))),
        "grpc.md": "\n".join(_grpc(sorted((root / "protos").rglob("*.proto")))),
    }


def _python() -> Iterator[str]:
    yield "# Python\n\nThe contents of `gristmill` and its public modules, which are typed.\n"
    errors = [name for name in clients if name.endswith("Error")]
    yield "## Clients\n\n`from gristmill import ...`\n"
    for name in clients:
        if name not in errors:
            yield f"::: gristmill.{name}\n    options: {{inherited_members: true}}\n"
    yield "## Errors\n\nAll derive from `GristmillError`.\n"
    for name in errors:
        yield f"::: gristmill.{name}\n"
    for name, about in _MODULES.items():
        yield f"## {name}\n\n{about}\n\n::: {name}\n    options: {{show_root_heading: false, members: true}}\n"


def _commands() -> Iterator[str]:
    yield "# Commands\n\nThe `--help` of each command. `gristmill --install-completion` enables shell completion.\n"
    yield from _helps(typer.main.get_command(app), [])


def _helps(command: Any, path: list[str]) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    for name in sorted(inner):
        yield from _helps(inner[name], [*path, name])
    if not inner:
        help_text = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "110"}, prog_name="gristmill").output
        yield f"## gristmill {' '.join(path)}\n\n```text\n{help_text.strip()}\n```\n"


async def _openapi() -> Schema:
    configure_logs("warning", "human")
    settings: dict[str, Any] = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "store": "memory"}
    service = Service(Settings(**settings))
    await service.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            spec: Schema = (await client.get(f"{service.http_url}/openapi.json")).raise_for_status().json()
    finally:
        await service.stop()
    return spec


def _http(spec: Schema) -> Iterator[str]:
    yield f"# HTTP\n\n{spec['info']['description']}\n"
    yield "A running service has the same at `/docs`, and as data at `/openapi.json`.\n"
    schemas, tag = spec["components"]["schemas"], ""
    calls = [
        (call.get("tags", ["other"])[0], path, method, call)
        for path, methods in spec["paths"].items()
        for method, call in methods.items()
    ]
    for calls_tag, path, method, call in sorted(calls, key=lambda one: one[0]):
        if calls_tag != tag:
            tag = calls_tag
            yield f"## {tag.capitalize()}\n"
        yield f"### {method.upper()} `{path}`\n\n{call.get('description', '')}\n"
        yield from _table("parameter", [(one["name"], one["schema"], one) for one in call.get("parameters", [])], call)
        body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        yield from _table("field", _fields(body, schemas), _named(body, schemas))
        for status, answer in call["responses"].items():
            schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
            if status.startswith("2") and (fields := _fields(schema, schemas)):
                yield "Answers with\n"
                yield from _table("field", fields, {})


def _named(schema: Schema, schemas: Schema) -> Schema:
    named: Schema = schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    return named


def _fields(schema: Schema, schemas: Schema) -> list[tuple[str, Schema, Schema]]:
    return [(name, field, field) for name, field in _named(schema, schemas).get("properties", {}).items()]


def _table(first: str, lines: list[tuple[str, Schema, Schema]], within: Schema) -> Iterator[str]:
    if not lines:
        return
    yield f"| {first} | type | |\n| --- | --- | --- |"
    for name, schema, about in lines:
        description = " ".join(about.get("description", "").split()).replace("|", "\\|")
        is_required = about.get("required") is True or name in within.get("required", ())
        yield f"| `{name}` | {_type(schema)} | {'required. ' if is_required else ''}{description} |"
    yield ""


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _grpc(protos: list[Path]) -> Iterator[str]:
    yield "# gRPC\n\nThe contract, from `protos/`. Stubs for Python come with the client, as `gristmill.v1`.\n"
    for proto in protos:
        text = proto.read_text(encoding="utf-8")
        yield f"## {proto.name}\n"
        if calls := re.findall(r"((?:^  //.*\n)+)  rpc (\w+)\((?:stream )?\w+\)", text, re.MULTILINE):
            yield "| call | |\n| --- | --- |"
            for comment, name in calls:
                yield f"| `{name}` | {' '.join(line.strip(' /') for line in comment.splitlines())} |"
            yield ""
        yield f"```proto\n{text}```\n"
