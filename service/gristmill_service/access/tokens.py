"""Reads and writes the file of callers: digests of static tokens, subjects of JSON web tokens, and users of a proxy.

A token is 256 random bits and cannot be guessed, so an unsalted SHA-256 digest is sufficient.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from gristmill.errors import InvalidArgumentError
from gristmill_service.access.caller import Caller
from gristmill_service.access.quotas import Limits
from gristmill_service.access.roles import Role
from gristmill_service.validation_messages import complaint, problems

_PREFIX = "gristmill_"
"""A prefix by which scanners for leaked secrets recognize a token."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    roles: Annotated[list[Role], Field(min_length=1)]
    runs: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = ["*"]
    rank: Annotated[int, Field(ge=0)] | None = None
    max_runs: Annotated[int, Field(ge=0)] | None = None
    max_groups: Annotated[int, Field(ge=0)] | None = None
    max_rows: Annotated[int, Field(ge=0)] | None = None
    max_row_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    max_requests: Annotated[int, Field(ge=1)] | None = None

    def caller(self, name: str) -> Caller:
        limits = Limits(self.max_groups, self.max_rows, self.max_row_bytes)
        return Caller(
            name, frozenset(self.roles), tuple(self.runs), self.rank, self.max_runs, limits, self.max_requests
        )


class TokenEntry(_Entry):
    """A static token. sha256: its digest in hexadecimal."""

    name: Annotated[str, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SubjectEntry(_Entry):
    """Callers with this subject in their JSON web token. A shell pattern."""

    subject: Annotated[str, Field(min_length=1)]


class UserEntry(_Entry):
    """Callers whom a proxy signed in under this name. A shell pattern."""

    user: Annotated[str, Field(min_length=1)]


class Callers(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: list[TokenEntry] = []
    subjects: list[SubjectEntry] = []
    proxy_users: list[UserEntry] = []

    def with_token(self, token: str) -> Caller | None:
        """Returns the caller with this token; None for an unknown token. Compares all digests in constant time."""
        match, digest = None, digest_of(token)
        for entry in self.tokens:
            if hmac.compare_digest(entry.sha256, digest):
                match = entry
        return None if match is None else match.caller(match.name)

    def with_subject(self, subject: str) -> Caller | None:
        """Returns the caller of the first entry that matches the subject; None if none matches."""
        matches = (entry for entry in self.subjects if fnmatchcase(subject, entry.subject))
        return next((entry.caller(subject) for entry in matches), None)

    def with_user(self, user: str) -> Caller | None:
        """Returns the caller of the first entry that matches the user of a proxy; None if none matches."""
        matches = (entry for entry in self.proxy_users if fnmatchcase(user, entry.user))
        return next((entry.caller(user) for entry in matches), None)


def read_callers(path: Path) -> Callers:
    """Reads the file. Raises InvalidArgumentError that names the file, the entry, and the expected value."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if content is None:
            # A program may be about to write an empty file, which must not revoke all tokens.
            raise InvalidArgumentError(f"{path} is empty; write 'tokens: []' to revoke all tokens")
        return Callers.model_validate(content)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot read the tokens: {error.strerror}; pass a YAML file") from None
    except yaml.MarkedYAMLError as error:
        # The message omits the text of the line, which may contain a token.
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise InvalidArgumentError(f"{path}: cannot read the tokens: {error.problem}{line}; correct the YAML") from None
    except ValidationError as error:
        # The message omits values: one may be a token that was entered instead of its digest.
        reason = problems(map(complaint, error.errors()))
        raise InvalidArgumentError(f"{path}: {reason}; use `gristmill token create`") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # YAML may raise these for an invalid date or number, or for a file that is not text. Their messages may quote
        # a value, so they are omitted.
        raise InvalidArgumentError(f"{path}: cannot read the tokens: {type(error).__name__}; pass YAML") from None


def create_token(path: Path, name: str, roles: Sequence[str], runs: Sequence[str], rank: int | None) -> str:
    """Adds an entry to the file, and returns the new token, which is not stored. Creates the file if needed. Waits for
    other processes that are adding entries.

    Raises InvalidArgumentError if the name is in use, a value is invalid, or the file cannot be written.
    """
    try:
        with _locked(path):
            return _add_token(path, name, roles, runs, rank)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot write the tokens: {error.strerror}; pass a writable file") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks a second file next to this file, because this file is replaced."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add_token(path: Path, name: str, roles: Sequence[str], runs: Sequence[str], rank: int | None) -> str:
    callers = read_callers(path) if path.exists() and path.stat().st_size else Callers()
    if any(entry.name == name for entry in callers.tokens):
        raise InvalidArgumentError(f"{path} has a token named {name!r}; choose another name, or remove its entry")
    token = _PREFIX + secrets.token_urlsafe(32)
    try:
        entry = TokenEntry.model_validate(
            {"name": name, "sha256": digest_of(token), "roles": list(roles), "runs": list(runs), "rank": rank}
        )
    except ValidationError as error:
        raise InvalidArgumentError(problems(map(complaint, error.errors()))) from None
    grown = callers.model_copy(update={"tokens": [*callers.tokens, entry]})
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(0o600)
    draft.write_text(
        yaml.safe_dump(grown.model_dump(mode="json", exclude_defaults=True), sort_keys=False), encoding="utf-8"
    )
    draft.replace(path)
    return token


def version_of(path: Path) -> tuple[int, ...] | None:
    """Returns values that change when the file changes; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    # The ctime also changes if the mode changes or the mtime is set back.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
