"""Ctrl-C in the midst of submissions: what is under way is sent again, and closing ends."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from gristmill import RolloutClient
from gristmill._client.connection.sigint import DeferSigint
from tests.on_loop import Service
from tests.serving import StartService
from tests.strategies import Row

CONFIG = {
    "train_batch_size": 4096,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 4096,
    "max_buffered_batches": 8,
    "micro_batch": {"size": 4},
}


def rows_of(uid: str, length: int = 2) -> list[Row]:
    return [
        {
            "uid": uid,
            "sample": sample,
            "prompt_token_ids": np.ones(length, np.int32),
            "response_ids": [3],
            "loss_mask": [1],
            "reward": 1.0,
        }
        for sample in range(2)
    ]


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with DeferSigint():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_not_waited_with() -> None:
    def work() -> None:
        with DeferSigint():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it was waited with")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_before_the_block_has_begun_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal

    def install_then_interrupts(number: int, handler: Any) -> Any:
        found = install(number, handler)
        if handler is not signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(signal, "signal", install_then_interrupts)
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        pytest.fail("it was waited with")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_is_left_alone() -> None:
    found = []

    def look() -> None:
        with DeferSigint():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_rows_that_an_interrupt_met_on_their_way_arrive_with_the_next_flush(service: Service, run_name: str) -> None:
    """Interrupts at random moments, as from a terminal."""
    stopped = threading.Event()

    def interrupt() -> None:
        rng = np.random.default_rng(1)
        while not stopped.wait(rng.random() * 0.02):
            _thread.interrupt_main()

    interrupted, given = 0, 0
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        thread = threading.Thread(target=interrupt)
        thread.start()
        deadline = time.monotonic() + 30
        while interrupted < 40 and time.monotonic() < deadline:
            try:
                client.submit(rows_of(f"p{given}"))
                given += 1
            except KeyboardInterrupt:
                interrupted += 1
        while True:
            try:
                stopped.set()
                thread.join()
                break
            except KeyboardInterrupt:
                continue
        assert interrupted > 5
        client.flush()
        for uid in range(given + 1):
            client.submit(rows_of(f"p{uid}"))
        assert client.status().rows_accepted == 2 * (given + 1)


def test_two_interrupts_while_large_messages_are_under_way_leave_nothing_hanging(
    start_service: StartService, run_name: str
) -> None:
    process = start_service()
    with RolloutClient(process.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        rows = [row for uid in range(4) for row in rows_of(f"p{uid}", 500_000)]
        process.process.send_signal(signal.SIGSTOP)
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            for pause_s in (1.0, 0.2):
                time.sleep(pause_s)
                signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
            process.process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.submit(rows)
        # On a busy machine the second one may come late.
        while thread.is_alive():
            with suppress(KeyboardInterrupt):
                thread.join()
        client.flush()
        client.submit(rows)
        assert client.status().rows_accepted == 8
