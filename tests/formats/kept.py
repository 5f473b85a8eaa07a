"""What a service keeps, as text that lies in a repository, and back: the files of a journal, and the keys of Redis."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A segment of rows is a large file with holes; what is not zero is a small part of it.
_BLOCK = 1 << 12
# Those of the process, not of its runs.
_OF_THE_PROCESS = {"lock", "reserve"}


def files_of(directory: Path) -> dict[str, Any]:
    """Each file's size and its pieces that are not zero, by its place in the directory."""
    return {
        str(path.relative_to(directory)): {"size": path.stat().st_size, "pieces": dict(_pieces(path))}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in _OF_THE_PROCESS
    }


def _pieces(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            if stripped := block.rstrip(b"\0"):
                yield str(file.tell() - len(block)), _text(stripped)


def put_files(files: dict[str, Any], directory: Path) -> None:
    """Writes them, for their owner alone, as a service does."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("wb") as file:
            path.chmod(0o600)
            file.truncate(content["size"])
            for offset, piece in content["pieces"].items():
                file.seek(int(offset))
                file.write(b64decode(piece))


def keys_of(client: Any) -> dict[str, Any]:
    """Each key's kind and value, of a client that decodes nothing; none that goes by itself, as a lease."""
    return {_text(key): _value(client, key) for key in sorted(client.keys()) if client.ttl(key) == -1}


def _value(client: Any, key: bytes) -> dict[str, Any]:
    kind = client.type(key).decode()
    if kind == "string":
        return {"string": _text(client.get(key) or b"")}
    if kind == "set":
        return {"set": sorted(map(_text, client.smembers(key)))}
    if kind == "hash":
        return {"hash": {_text(name): _text(value) for name, value in client.hgetall(key).items()}}
    assert kind == "stream", kind
    entries = client.execute_command("XRANGE", key, "-", "+")
    entries = [[number.decode(), list(map(_text, _flat(fields)))] for number, fields in entries]
    return {"stream": entries, "last": client.xinfo_stream(key)["last-generated-id"].decode()}


def _flat(fields: Any) -> list[bytes]:
    return [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else list(fields)


def put_keys(keys: dict[str, Any], client: Any) -> None:
    """Writes them."""
    for name, content in keys.items():
        key = b64decode(name)
        if "string" in content:
            client.set(key, b64decode(content["string"]))
        elif "set" in content:
            client.sadd(key, *map(b64decode, content["set"]))
        elif "hash" in content:
            client.hset(key, mapping={b64decode(field): b64decode(value) for field, value in content["hash"].items()})
        else:
            for number, fields in content["stream"]:
                client.execute_command("XADD", key, number, *map(b64decode, fields))
            if not content["stream"]:
                client.execute_command("XADD", key, content["last"], "-", "-")
                client.xdel(key, content["last"])
            client.execute_command("XSETID", key, content["last"])


def _text(value: bytes) -> str:
    return b64encode(value).decode()
