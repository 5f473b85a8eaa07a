from __future__ import annotations

import grpc
import pytest

from gristmill import errors
from gristmill_service.api.errors import INTERNAL_MESSAGE, STATUSES, refusal


def all_errors() -> list[type[errors.GristmillError]]:
    kinds, todo = [], [errors.GristmillError]
    while todo:
        one = todo.pop()
        kinds.append(one)
        todo += one.__subclasses__()
    return kinds


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_has_a_status(kind: type[errors.GristmillError]) -> None:
    answer = refusal(kind("what, where, the value, the remedy"))
    assert answer.code == kind.code
    assert answer.grpc_status is grpc.StatusCode[kind.code]
    assert 400 <= answer.http_status < 600


def test_statuses_distinguish_codes() -> None:
    assert len({status for _, status in STATUSES.values()}) == len(STATUSES)


def test_an_error_that_is_not_ours_is_reported_without_its_words() -> None:
    answer = refusal(KeyError("/secret/path"))
    assert (answer.code, answer.message) == ("INTERNAL", INTERNAL_MESSAGE)


def test_a_limit_says_when_to_retry() -> None:
    answer = refusal(errors.ResourceExhaustedError("no room", retry_after_s=1.25))
    assert ("grpc-retry-pushback-ms", "1250") in answer.trailers
    assert answer.headers == {"Retry-After": "2"}
    assert answer.http_status == 429


def test_a_shutdown_says_when_to_retry() -> None:
    assert dict(refusal(errors.UnavailableError("closing")).trailers)["grpc-retry-pushback-ms"] == "500"


def test_a_failed_batch_says_which() -> None:
    answer = refusal(errors.BatchFailedError("no plan aligns", batch=7))
    assert dict(answer.trailers) == {"gristmill-error": "BatchFailedError", "gristmill-batch": "7"}
    assert answer.body["error"]["batch"] == 7  # type: ignore[index]


def test_a_long_message_fits_the_trailers_of_grpc() -> None:
    answer = refusal(errors.InvalidArgumentError("×" * 100_000))
    assert len(answer.grpc_message.encode()) < 2100
    assert len(answer.message) == 100_000
