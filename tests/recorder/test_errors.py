"""What goes wrong: the engine's errors are the agent's, what cannot be recorded is refused with the remedy, and a call
that is cut on either side leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from aiohttp.http_exceptions import BadStatusLine
from aiohttp.log import server_logger
from aiohttp.test_utils import make_mocked_request

from gristmill import RolloutClient, TrainerClient
from gristmill_recorder.engines.connection import request_headers
from gristmill_recorder.server import _InOneLine
from tests.on_loop import Service
from tests.recorder.engine import FAILURE, Engine, serving
from tests.recorder.recorders import Recorder, StartRecorder, create_run, post, trained


def body(script: str, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": script}], **more}


def chat(recorder: Recorder, run: str, document: Any, uid: str = "a") -> tuple[int, dict[str, Any]]:
    return post(f"{recorder.base(run, uid)}/v1/chat/completions", document)


def calling(recorder: Recorder, run: str, script: str, **more: Any) -> http.client.HTTPConnection:
    """A connection on which a call is under way."""
    where = urlsplit(recorder.base(run))
    connection = http.client.HTTPConnection(where.netloc)
    connection.request("POST", f"{where.path}/v1/chat/completions", json.dumps(body(script, **more)))
    return connection


def refusal(answer: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["message"]


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_error_passes_with_status_body_and_headers(
    recorder: Recorder, run: str, status: int, stream: bool
) -> None:
    with recorder.openai(run) as client, pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**body(f"fail {status}", stream=stream))
    answer = raised.value.response
    assert (answer.status_code, answer.json(), answer.headers["x-engine"]) == (status, FAILURE, "busy")
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_a_library_tries_again_by_itself_and_the_last_answer_counts_once(
    recorder: Recorder, engine: Engine, service: Service, run: str
) -> None:
    asked = len(engine.requests)
    with recorder.openai(run, max_retries=2) as client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**body("fail 503"))
    assert len(engine.requests) - asked == 3
    with recorder.openai(run) as client:
        client.chat.completions.create(**body("say at last"))
    assert recorder.finish(run)["steps"] == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"echo": True}, "echo is set"),
        ({"use_beam_search": True}, "use_beam_search is set"),
        ({"include_reasoning": False}, "would omit token ids"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "records only tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": ""}]}]}, "records only tokens"),
    ],
)
def test_what_would_not_be_recorded_as_it_was_sampled_is_refused_before_the_engine_is_asked(
    recorder: Recorder, engine: Engine, run: str, more: dict[str, Any], problem: str
) -> None:
    asked = len(engine.requests)
    status, message = refusal(chat(recorder, run, body("say hi", **more)))
    assert status == 400
    assert problem in message
    assert len(engine.requests) == asked


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_token_ids_is_refused_with_the_remedy(recorder: Recorder, run: str, stream: bool) -> None:
    status, message = refusal(chat(recorder, run, body("tokenless hello", stream=stream)))
    assert status == 502
    assert "token ids" in message
    assert "check --engine" in message
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_sglang_gives_its_token_ids_in_an_extension(
    start_recorder: StartRecorder, sglang: Engine, service: Service, run: str
) -> None:
    recorder = start_recorder(sglang.url, service.grpc_address, "--engine", "sglang")
    with recorder.openai(run) as client:
        whole = client.chat.completions.create(**body("reload hi", n=2))
        chunks: list[Any] = list(client.chat.completions.create(**body("say ho", n=2, stream=True)))
    assert not any("sglext" in answer.model_dump(warnings=False) for answer in (whole, *chunks))
    assert "token_ids" not in whole.model_dump_json(warnings=False)
    assert recorder.finish(run)["steps"] == 4
    rows = trained(service.grpc_address, run)
    assert [bytes(row.trained[:-1]) for row in rows] == [b"hi", b"hi #1", b"ho", b"ho #1"]
    # They come with the end of a stream, so that a refusal does too.
    with recorder.openai(run, "b") as client, pytest.raises(openai.APIError, match="token ids"):
        list(client.chat.completions.create(**body("tokenless hi", stream=True)))


def test_a_stream_that_the_engine_cuts_is_cut_for_the_agent_and_not_recorded(recorder: Recorder, run: str) -> None:
    before, connection = recorder.metric('cut_calls_total{side="engine"}'), calling(recorder, run, "cut 5", stream=True)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        connection.getresponse().read()
    connection.close()
    assert recorder.metric('cut_calls_total{side="engine"}') == before + 1
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


def test_an_agent_that_hangs_up_stops_the_engine_and_is_not_recorded(
    recorder: Recorder, engine: Engine, run: str
) -> None:
    cancelled, asked = engine.cancelled, len(engine.requests)
    connection = calling(recorder, run, "wait 60 late")
    while len(engine.requests) == asked:
        time.sleep(0.01)
    connection.close()
    while engine.cancelled == cancelled or recorder.metric("calls_under_way"):
        time.sleep(0.01)
    assert post(f"{recorder.base(run)}/finish", {})[0] == 409


@pytest.mark.parametrize("is_first", [False, True])
def test_a_trajectory_does_not_end_while_calls_are_under_way(
    recorder: Recorder, engine: Engine, run: str, is_first: bool
) -> None:
    with recorder.openai(run) as client, ThreadPoolExecutor(1) as agent:
        if not is_first:
            client.chat.completions.create(**body("say hi"))
        late = agent.submit(lambda: client.chat.completions.create(**body(f"hold {run} late")))
        while not recorder.metric("calls_under_way"):
            time.sleep(0.01)
        status, message = refusal(post(f"{recorder.base(run)}/finish", {"reward": 1.0}))
        assert (status, "1 calls are in progress" in message) == (409, True)
        engine.let_go.add(run)
        late.result()
    assert recorder.finish(run)["steps"] == 2 - is_first


def test_a_reason_that_is_no_text_and_a_name_that_is_not_utf8_are_refused(recorder: Recorder, run: str) -> None:
    status, message = refusal(post(f"{recorder.base(run)}/abort", {"reason": {"a": 1}}))
    assert (status, message) == (400, "reason is a dict; send a text")
    where = urlsplit(recorder.url)
    with closing(http.client.HTTPConnection(where.netloc)) as connection:
        names: dict[str, Any] = {"x-gristmill-run": run, "x-gristmill-uid": b"\xff", "x-gristmill-sample": "0"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body("say hi")), names)
        answer = connection.getresponse()
        assert (answer.status, b"is not UTF-8" in answer.read()) == (400, True)


def test_a_uid_may_contain_a_line_break(recorder: Recorder, run: str) -> None:
    assert chat(recorder, run, body("say hi"), uid="two\nlines")[0] == 200
    assert recorder.finish(run, uid="two\nlines") == {"steps": 1, "outcome": "accepted"}


def test_an_end_may_be_repeated_and_calls_after_it_are_refused(recorder: Recorder, service: Service, run: str) -> None:
    with recorder.openai(run) as client:
        client.chat.completions.create(**body("say hi"))
        ended = {"steps": 1, "outcome": "accepted"}
        assert recorder.finish(run, 0.5) == recorder.finish(run, 0.5) == ended
        status, message = refusal(post(f"{recorder.base(run)}/finish", {"reward": 0.75}))
        assert (status, "reward is 0.75, but it has ended with reward 0.5" in message) == (409, True)
        with pytest.raises(openai.APIStatusError, match="sample it again with the next attempt") as raised:
            client.chat.completions.create(**body("say more"))
    assert raised.value.status_code == 410


def test_a_trajectory_that_the_service_has_no_use_for_tells_its_agent_to_stop(
    recorder: Recorder, service: Service, run: str
) -> None:
    with recorder.openai(run) as client, RolloutClient(service.grpc_address, run) as rollouts:
        rollouts.begin_groups(["a"])
        client.chat.completions.create(**body("say one"))
        rollouts.abort_group("a", reason="enough")
        while (answer := chat(recorder, run, body("say three")))[0] == 200:
            pass
    assert answer[0] == 410
    assert "it is closed: dropped" in answer[1]["error"]["message"]
    assert post(f"{recorder.base(run)}/finish", {"reward": 1.0})[1]["outcome"].startswith("dropped")


def test_an_agent_may_give_up(recorder: Recorder, service: Service, run_name: str) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=2)
    for sample in range(2):
        with recorder.openai(run_name, sample=sample) as client:
            client.chat.completions.create(**body("say hi"))
    assert post(f"{recorder.base(run_name)}/abort", {"reason": "lost"}) == (200, {"outcome": "aborted"})
    assert recorder.finish(run_name, sample=1)["outcome"] == "accepted"
    assert len(trained(service.grpc_address, run_name)) == 1
    assert chat(recorder, run_name, body("say more"))[0] == 410


def test_an_abort_before_the_first_answer_waits_for_its_group_to_begin_also_through_a_kill(
    start_recorder: StartRecorder, engine: Engine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=2, max_buffered_batches=1)
    recorder = start_recorder(engine.url, service.grpc_address)
    with RolloutClient(service.grpc_address, run_name) as rollouts:
        rollouts.begin_groups(["full"])
        assert chat(recorder, run_name, body("fail 500"))[0] == 500
        for reason in ("lost", "lost again"):
            assert post(f"{recorder.base(run_name)}/abort", {"reason": reason}) == (200, {"outcome": "aborted"})
        assert refusal(chat(recorder, run_name, body("say more")))[0] == 410
        assert post(f"{recorder.base(run_name)}/finish", {})[1]["outcome"] == "aborted: lost again"
        recorder.kill()
        recorder = start_recorder(engine.url, service.grpc_address)
        rollouts.abort_group("full")
    with recorder.openai(run_name, sample=1) as client:
        client.chat.completions.create(**body("say hi"))
    assert recorder.finish(run_name, sample=1)["outcome"] == "accepted"
    assert [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run_name)] == [b"hi"]
    assert recorder.metric('closed_trajectories_total{outcome="aborted"}') == 1
    assert recorder.metric("open_trajectories") == 0


def test_a_run_that_cannot_take_steps_is_refused_before_the_engine_is_asked(
    recorder: Recorder, engine: Engine, service: Service, run_name: str
) -> None:
    asked = len(engine.requests)
    assert refusal(chat(recorder, run_name, body("say hi")))[0] == 400
    create_run(service.grpc_address, run_name, step_wise=False, merge="none")
    assert "step_wise: true" in refusal(chat(recorder, run_name, body("say hi")))[1]
    # The recorder itself asks the engine at its start.
    assert "say hi" not in str(engine.requests[asked:])


def test_a_sample_that_no_group_of_the_run_has_is_refused_before_the_engine_is_asked(
    recorder: Recorder, engine: Engine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=2, surplus=1)
    asked = len(engine.requests)
    first, second = (f"{recorder.base(run_name, sample=sample)}/v1/chat/completions" for sample in (2, 3))
    assert post(first, body("say hi"))[0] == 200
    status, message = refusal(post(second, body("say no")))
    assert (status, message.partition(";")[0]) == (
        400,
        f"sample 3 is not in 0..2, the samples of a group of run {run_name!r}",
    )
    assert "say no" not in str(engine.requests[asked:])


@pytest.mark.parametrize(
    ("path", "document", "status", "problem"),
    [
        ("/v1/chat/completions", {}, 400, "the call names no trajectory"),
        ("/runs/r/uid/a/v1/chat/completions", {}, 400, "names no sample"),
        ("/runs/r/uid/a/sample/x/v1/chat/completions", {}, 400, "sample is 'x'"),
        ("/runs/r/uid/a/sample/0/v1/images/generations", {}, 404, "records POST v1/chat/completions"),
        ("/runs/r/uid/a/sample/0/finish", {"reward": "high"}, 400, "reward is 'high'"),
        ("/runs/r/uid/a/sample/0/finish", {"reward": 1e39}, 400, "reward is 1e+39"),
        ("/runs/r/uid/a/sample/0/finish", {"score": 1}, 400, "unknown field score"),
        ("/runs/r/uid/a/sample/0/finish", [1], 400, "send a JSON object"),
    ],
)
def test_a_wrong_call_is_refused_with_what_is_expected(
    recorder: Recorder, path: str, document: Any, status: int, problem: str
) -> None:
    answer = refusal(post(f"{recorder.url}{path}", document))
    assert (answer[0], problem in answer[1]) == (status, True), answer


@pytest.mark.parametrize("path", ["models/../../metrics", "models/%2e%2e/%2e%2e/metrics", "models/..%2f..%2fmetrics"])
def test_no_path_leads_above_the_models(recorder: Recorder, run: str, path: str) -> None:
    where = urlsplit(recorder.base(run))
    connection = http.client.HTTPConnection(where.netloc)
    connection.request("GET", f"{where.path}/v1/{path}")
    assert connection.getresponse().status == 404
    connection.close()


def test_what_is_no_http_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server_logger.addFilter(in_one_line := _InOneLine())
    try:
        server_logger.error("Error handling request", exc_info=BadStatusLine("GET /a b HTTP/1.1"))
    finally:
        server_logger.removeFilter(in_one_line)
    (line,) = caplog.records
    assert (line.levelname, line.exc_info) == ("INFO", None)
    assert "GET /a b" in line.getMessage()


def test_headers_that_connection_names_stay_on_their_connection() -> None:
    call = make_mocked_request("GET", "/", {"Connection": "x-mine, close", "X-Mine": "1", "Authorization": "key"})
    assert dict(request_headers(call)) == {"Authorization": "key"}


def test_a_version_of_thousands_of_digits_is_refused(recorder: Recorder, run: str) -> None:
    headers = {"x-gristmill-policy-version": "9" * 5000}
    path = f"{recorder.url}/runs/{run}/uid/a/sample/0/v1/chat/completions"
    answer = refusal(post(path, {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}, headers))
    assert (answer[0], "set it to a number from 0 to 2147483647" in answer[1]) == (400, True), answer


def test_limits_refuse_and_say_which(start_recorder: StartRecorder, service: Service, run: str) -> None:
    limits = {"calls": 2, "body-bytes": 2000, "in-flight-bytes": 4000, "row-bytes": 300}
    flags = [word for name, limit in limits.items() for word in (f"--max-{name}", str(limit))]
    with serving(Engine()) as engine:
        recorder = start_recorder(engine.url, service.grpc_address, *flags, "--silence-timeout-s", "4")
        assert refusal(chat(recorder, run, body("say " + "x" * 3000)))[0] == 413
        assert "--max-body-bytes" in refusal(chat(recorder, run, body("say hi", n=20)))[1]
        with ThreadPoolExecutor(2) as agents:
            slow = agents.submit(chat, recorder, run, body("wait 60 " + "late" * 400))
            while not recorder.metric("in_flight_bytes"):
                time.sleep(0.01)
            status, message = refusal(chat(recorder, run, body("say " + "hi" * 300), uid="b"))
            assert (status, "--max-in-flight-bytes" in message) == (503, True)
            also_slow = agents.submit(chat, recorder, run, body("wait 60 late"), uid="b")
            while recorder.metric("calls_under_way") < 2:
                time.sleep(0.01)
            status, message = refusal(chat(recorder, run, body("say hi"), uid="c"))
            assert (status, "--max-calls" in message) == (503, True)
            for call in (slow, also_slow):
                status, message = refusal(call.result())
                assert (status, "--silence-timeout-s" in message) == (504, True)
    assert recorder.metric("in_flight_bytes") == 0
    status, message = refusal(chat(recorder, run, body("say hi")))
    assert (status, f"the engine at {engine.url} cannot be reached" in message) == (502, True)
    with serving(Engine(port=int(engine.url.rpartition(":")[2]))):
        for number in range(3):
            assert chat(recorder, run, body("say hi"), uid=f"uid-{number}")[0] == 200
        status, message = refusal(chat(recorder, run, body("say hi")))
        assert (status, "--max-row-bytes" in message) == (503, True)


def test_an_agent_that_falls_silent_is_aborted_and_its_group_goes_on(
    start_recorder: StartRecorder, engine: Engine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=2)
    recorder = start_recorder(engine.url, service.grpc_address, "--idle-abort-s", "3")
    for sample in range(2):
        with recorder.openai(run_name, sample=sample) as client:
            client.chat.completions.create(**body("say hi"))
    recorder.finish(run_name, sample=1)
    assert len(trained(service.grpc_address, run_name)) == 1
    assert recorder.metric('closed_trajectories_total{outcome="aborted"}') == 1


@pytest.mark.parametrize("is_idle", [False, True])
def test_the_end_of_an_attempt_leaves_a_higher_one_untouched(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str, is_idle: bool
) -> None:
    recorder = start_recorder(engine.url, service.grpc_address, "--idle-abort-s", "1" if is_idle else "60")
    first, second = recorder.base(run), recorder.base(run, more="/attempt/1")
    assert post(f"{first}/v1/chat/completions", body("say old"))[0] == 200
    if not is_idle:
        assert post(f"{second}/v1/chat/completions", body("say new"))[0] == 200
        assert post(f"{first}/abort", {})[0] == 200
    while not recorder.metric('closed_trajectories_total{outcome="superseded"}'):
        assert post(f"{second}/v1/chat/completions", body("say new"))[0] == 200
        time.sleep(0.1)
    assert post(f"{second}/v1/chat/completions", body("say last"))[0] == 200
    assert post(f"{second}/finish", {"reward": 1.0})[1]["outcome"] == "accepted"
    assert bytes(trained(service.grpc_address, run)[-1].trained[:-1]) == b"last"
    assert post(f"{first}/v1/chat/completions", body("say old"))[0] == 410


def test_idle_trajectories_are_aborted_after_one_of_a_run_that_was_deleted(
    start_recorder: StartRecorder, engine: Engine, service: Service, run_name: str
) -> None:
    deleted, other = f"{run_name}-deleted", f"{run_name}-other"
    for name in (deleted, other):
        create_run(service.grpc_address, name)
    first = start_recorder(engine.url, service.grpc_address)
    assert chat(first, deleted, body("say hi"))[0] == 200
    first.kill()
    with RolloutClient(service.grpc_address, deleted, timeout_s=20) as rollouts:
        rollouts.delete_run()
    second = start_recorder(engine.url, service.grpc_address, "--idle-abort-s", "1")
    assert chat(second, other, body("say hi"))[0] == 200
    while second.metric("open_trajectories"):
        time.sleep(0.02)
    assert second.metric('closed_trajectories_total{outcome="refused"}') == 1
    assert second.metric('closed_trajectories_total{outcome="aborted"}') == 1


def test_the_connections_of_runs_that_do_not_exist_are_freed(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str
) -> None:
    recorder = start_recorder(engine.url, service.grpc_address, "--idle-abort-s", "1")
    assert chat(recorder, run, body("say hi"))[0] == 200
    files = Path(f"/proc/{recorder.process.pid}/fd")
    before = len([*files.iterdir()])
    for number in range(60):
        assert chat(recorder, f"{run}-{number}", body("say hi"))[0] == 400
    while len([*files.iterdir()]) > before + 30:
        time.sleep(0.05)
    assert chat(recorder, run, body("say hi"), uid="b")[0] == 200
    assert chat(recorder, f"{run}-0", body("say hi"))[0] == 400


def test_a_run_that_is_deleted_is_refused_and_another_of_its_name_has_its_own_versions(
    recorder: Recorder, service: Service, run: str
) -> None:
    def version() -> float:
        return recorder.metric(f'policy_version{{run="{run}"}}')

    with TrainerClient(service.grpc_address, run, 0, timeout_s=20) as trainer:
        trainer.announce_policy_version(57)
    assert chat(recorder, run, body("say hi"))[0] == 200
    assert version() == 57
    with RolloutClient(service.grpc_address, run, timeout_s=20) as rollouts:
        rollouts.delete_run()
    # The service reports the deletion to the call that waits for the next version.
    while f"run '{run}': no longer known" not in recorder.log.read_text():
        time.sleep(0.02)
    status, message = refusal(chat(recorder, run, body("say hi"), uid="b"))
    assert (status, "does not exist" in message) == (400, True)
    create_run(service.grpc_address, run)
    assert chat(recorder, run, body("say hi"), uid="b")[0] == 200
    assert version() == 0


def test_a_misspelled_run_is_refused_with_one_remedy_and_its_finish_names_what_to_check(recorder: Recorder) -> None:
    status, message = refusal(chat(recorder, "misspelled", body("say hi")))
    assert (status, message.count("create")) == (400, 1), message
    status, message = refusal(post(f"{recorder.base('misspelled')}/finish", {"reward": 1.0}))
    assert (status, "check the run, uid and sample" in message) == (409, True)


def test_a_body_that_is_not_compressed_as_it_says_is_refused_in_one_line_of_the_log(
    recorder: Recorder, run: str
) -> None:
    before = len(recorder.log.read_text())
    answer = refusal(post(f"{recorder.base(run)}/v1/chat/completions", body("say hi"), {"content-encoding": "gzip"}))
    assert (answer[0], "content-encoding" in answer[1]) == (400, True), answer
    # What is left of the body is read after the answer.
    while "HTTP request malformed" not in (logged := recorder.log.read_text()[before:]):
        time.sleep(0.02)
    assert "Traceback" not in logged
