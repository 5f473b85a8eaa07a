"""Ctrl-C while a caller waits for its rows: they arrive all the same, and closing the client ends."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from gristmill import RolloutClient
from tests.on_loop import Service
from tests.rows import make_config, make_row
from tests.serving import StartService
from tests.strategies import Row

CONFIG = make_config(
    train_batch_size=4096,
    n_samples_per_prompt=2,
    policy_mini_batch_size=4096,
    max_buffered_batches=8,
    micro_batch={"size": 4},
    step_wise=False,
)


def rows_of(uid: str, length: int = 2) -> list[Row]:
    return [make_row(uid=uid, sample=sample, prompt=np.ones(length, np.int32), response=[3]) for sample in range(2)]


def test_rows_of_an_interrupted_call_arrive_with_the_next_flush(service: Service, run_name: str) -> None:
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
