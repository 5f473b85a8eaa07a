"""Memory that batches are gathered in is used again, and only when nobody reads what stands in it."""

from __future__ import annotations

from threading import Thread

import numpy as np

from gristmill._wire.columns import Array
from gristmill_service.run.rows import gathered_memory
from gristmill_service.run.rows.gathered_memory import Block, GatheredMemory

MIB = 1 << 20


def address(block: Block) -> int:
    return int(np.frombuffer(block.view, np.uint8).__array_interface__["data"][0])


def written(memory: GatheredMemory, values: Array) -> Array:
    """These values in such memory, as a column views them."""
    block = memory.take(values.nbytes)
    block.memory.write(values.data)
    return np.frombuffer(block.view, values.dtype)


def test_it_reads_as_it_was_written_and_cannot_be_changed() -> None:
    block = GatheredMemory().take(12)
    for piece in (b"eight by", memoryview(b"tes+")):
        block.memory.write(piece)
    assert block.view.tobytes() == b"eight bytes+"
    assert not np.frombuffer(block.view, np.int32).flags.writeable


def test_the_next_batch_is_gathered_where_the_one_before_was() -> None:
    memory = GatheredMemory()
    before = address(memory.take(3 * MIB))
    assert address(memory.take(2 * MIB + 1)) == before
    assert written(memory, np.arange(600_000)).tolist() == [*range(600_000)]


def test_what_a_column_views_is_nobody_elses() -> None:
    memory = GatheredMemory()
    column = written(memory, np.arange(MIB, dtype=np.int32))
    part = column[10:20].view(np.uint32).reshape(2, 5)
    del column
    other = written(memory, np.zeros(MIB, np.int32))
    assert part.tolist() == [[*range(10, 15)], [*range(15, 20)]]
    del part
    assert address(memory.take(4 * MIB)) != other.__array_interface__["data"][0]


def test_a_small_column_does_not_hold_the_memory_of_a_large_one() -> None:
    memory = GatheredMemory()
    large = address(memory.take(20 * MIB))
    small = memory.take(2 * MIB)
    assert address(small) != large
    assert address(memory.take(20 * MIB)) == large


def test_little_is_kept_and_nothing_of_a_column_that_is_very_large() -> None:
    memory = GatheredMemory()
    del [*map(memory.take, [MIB] * 9)][:]
    assert len(memory._idle) == gathered_memory._MOST_IDLE
    memory = GatheredMemory()
    memory.take(gathered_memory._MOST_BYTES + 1)
    assert not memory._idle


def test_runs_gather_at_the_same_time() -> None:
    memory, wrong = GatheredMemory(), list[int]()

    def gather(number: int) -> None:
        for size in range(1, 200):
            values = np.full(size * 1_000, number)
            if not np.array_equal(written(memory, values), values):
                wrong.append(number)

    threads = [Thread(target=gather, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
