"""Changes of what is valid: of bytes, of messages' fields, and of documents."""

from __future__ import annotations

from random import Random
from typing import Any

INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    2**15,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
)
VALUES: tuple[Any, ...] = (
    *INTEGERS,
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("inf"),
    float("nan"),
    "",
    "a",
    "\x00",
    "é中",
    "\ud800",
    "x" * 2000,
    "1e5",
    [],
    {},
    [[]],
    [1] * 300,
    {"a": {"b": [None]}},
)


def changed_bytes(random: Random, data: bytes) -> bytes:
    """The bytes with one to four changes: cut, doubled, filled with others, or numbers of theirs replaced."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0:
                del changed[at : at + random.randint(1, 16)]
            case 1:
                changed[at:at] = random.randbytes(random.randint(1, 16))
            case 2:
                changed[at : at + 1] = bytes([random.randrange(256)])
            case 3:
                size = random.choice((1, 2, 4, 8))
                value = random.choice(INTEGERS) % 256**size
                changed[at : at + size] = value.to_bytes(size, random.choice(("little", "big")))
            case 4:
                other = random.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + random.randint(1, 64)]
            case 5:
                del changed[at:]
    return bytes(changed)


def changed_message(random: Random, message: Any) -> None:
    """Changes a field of a protobuf message, or of one within it."""
    field = random.choice(message.DESCRIPTOR.fields)
    name, is_many = field.name, field.is_repeated
    if field.message_type is not None:
        target = getattr(message, name)
        if field.message_type.GetOptions().map_entry:
            _changed_map(random, field.message_type, target)
            return
        if is_many:
            if target and random.random() < 0.8:
                changed_message(random, random.choice(target))
            else:
                target.add()
        else:
            changed_message(random, target)
        return
    if random.random() < 0.15:
        message.ClearField(name)
        return
    value = _scalar(random, field)
    if not is_many:
        setattr(message, name, value)
        return
    values = getattr(message, name)
    match random.randrange(4):
        case 0:
            values.append(value)
        case 1 if values:
            values[random.randrange(len(values))] = value
        case 2 if values:
            del values[random.randrange(len(values)) :]
        case _:
            values.extend([value] * random.randint(1, 4))


def _changed_map(random: Random, entry: Any, values: Any) -> None:
    """Sets, or removes, an entry of a map of scalars."""
    if values and random.random() < 0.3:
        del values[random.choice(sorted(values))]
        return
    key, value = (_scalar(random, entry.fields_by_name[name]) for name in ("key", "value"))
    values[key] = value


def _scalar(random: Random, field: Any) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_STRING if field.type == field.TYPE_BYTES:
            return random.randbytes(random.choice((0, 1, 4, 7, 8, 12, 64)))
        case field.CPPTYPE_STRING:
            return random.choice(("", "a", "b", "é", "x" * 1001, "\x00", "f32", "int32", "token"))
        case field.CPPTYPE_BOOL:
            return random.random() < 0.5
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return random.choice((0.0, -1.0, 1e30, float("inf"), float("nan")))
        case field.CPPTYPE_ENUM:
            return random.randrange(-1, 5)
        case field.CPPTYPE_UINT32:
            return random.choice((0, 1, 2, 2**31, 2**32 - 1))
        case field.CPPTYPE_UINT64:
            return random.choice((0, 1, 2, 2**63, 2**64 - 1))
        case field.CPPTYPE_INT64:
            return random.choice((0, 1, -1, 2, 2**31, 2**63 - 1, -(2**63)))
        case _:
            return random.choice((0, 1, -1, 2, 3, 2**31 - 1, -(2**31)))


def changed_document(random: Random, document: Any) -> Any:
    """The document with one to three values replaced, left out, doubled or added, at any depth."""
    for _ in range(random.randint(1, 3)):
        document = _changed(random, document)
    return document


def _changed(random: Random, document: Any) -> Any:
    if isinstance(document, dict) and document and random.random() < 0.9:
        changed, name = dict(document), random.choice(list(document))
        match random.randrange(8):
            case 0:
                del changed[name]
            case 1:
                changed[random.choice(("x", "", f"{name}s", "lambda"))] = random.choice(VALUES)
            case _:
                changed[name] = _changed(random, changed[name])
        return changed
    if isinstance(document, list | tuple) and document and random.random() < 0.8:
        items, at = list(document), random.randrange(len(document))
        match random.randrange(6):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case _:
                items[at] = _changed(random, items[at])
        return items
    if isinstance(document, int | float) and random.random() < 0.5:
        return document + random.choice((-1, 1, 0.5, 1000))
    return random.choice(VALUES)
