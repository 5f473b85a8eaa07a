"""A store that several runs fill: who finds it full waits for whatever any of them gives back."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gristmill.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.runs import Runs
from tests.run.harness import CONFIG, Bench, BuildBatch, Shelf, group_rows, table
from tests.run.test_served_bytes import PATIENCE_S, await_batch


class Bed:
    """A shelf for one batch, which another run has taken, and a batch that waits for the place."""

    def __init__(self) -> None:
        self.shelf, self.wanted = Shelf(places=1), True
        self.store = PatientStore(self.shelf)
        self.store.publish("other", 0, b"plan", [], lambda: True)
        self._pool = ThreadPoolExecutor(1)
        self.waiting: Future[int] = self._pool.submit(self.store.publish, "mine", 0, b"plan", [], lambda: self.wanted)
        assert self.shelf.tried.wait(PATIENCE_S)


def test_a_batch_that_another_run_gives_back_is_room() -> None:
    bed = Bed()
    bed.store.free("other", 0)
    assert bed.waiting.result(PATIENCE_S) == len(b"plan")
    assert list(bed.shelf.batches) == [("mine", 0)]


def test_another_run_that_is_deleted_is_room() -> None:
    bed = Bed()
    bed.store.delete_run("other")
    assert bed.waiting.result(PATIENCE_S) == len(b"plan")


def test_who_is_not_wanted_any_more_gives_up() -> None:
    bed = Bed()
    bed.wanted = False
    bed.store.wake()
    with pytest.raises(ResourceExhaustedError):
        bed.waiting.result(PATIENCE_S)


def test_a_wake_that_gives_no_room_keeps_it_waiting() -> None:
    bed = Bed()
    for _ in range(3):
        bed.shelf.tried.clear()
        bed.store.wake()
        assert bed.shelf.tried.wait(PATIENCE_S)
    bed.store.free("other", 0)
    assert bed.waiting.result(PATIENCE_S)


def test_what_is_given_back_between_the_attempt_and_the_wait_is_not_missed() -> None:
    class Late(Shelf):
        """Room comes after the attempt has failed, before anyone can wait for it."""

        def publish(self, run: str, batch: int, plan: bytes, shards: object) -> int:
            try:
                return super().publish(run, batch, plan, shards)  # type: ignore[no-untyped-call, no-any-return]
            except ResourceExhaustedError:
                store.free("other", 0)
                raise

    store = PatientStore(Late(places=1))
    store.publish("other", 0, b"plan", [], lambda: True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.publish, "mine", 0, b"plan", [], lambda: True).result(PATIENCE_S)


def test_with_nothing_held_it_fails_at_once_also_after_all_was_removed() -> None:
    shelf = Shelf(places=1)
    store = PatientStore(shelf)
    store.publish("other", 0, b"plan", [], lambda: True)
    store.free("other", 0)
    shelf.places = 0
    with pytest.raises(ResourceExhaustedError, match="full"):
        store.publish("mine", 0, b"plan", [], lambda: True)


def test_a_batch_that_cannot_be_removed_is_not_waited_for() -> None:
    class Stuck(Shelf):
        def free(self, run: str, batch: int) -> None:
            raise PermissionError("stuck")

    store = PatientStore(Stuck(places=1))
    store.publish("other", 0, b"plan", [], lambda: True)
    with pytest.raises(PermissionError):
        store.free("other", 0)
    with pytest.raises(ResourceExhaustedError):
        store.publish("mine", 0, b"plan", [], lambda: True)


@pytest.mark.parametrize("ending", ["trained on", "deleted"])
def test_a_run_whose_batch_waits_for_another_runs_room_goes_on_when_that_comes(ending: str) -> None:
    shelf = Shelf(places=1)
    runs = Runs(shelf, build_batch=BuildBatch())
    for name in ("one", "other"):
        runs.create(name, CONFIG | {"train_batch_size": 1})
        runs.get(name).submit(table(*group_rows("a")))
        if name == "one":
            await_batch(runs.get("one"), 0)
    assert shelf.tried.wait(PATIENCE_S)
    assert runs.get("other").batch(0).state is BatchState.PENDING
    if ending == "deleted":
        runs.delete("one")
    else:
        runs.get("one").acknowledge("policy", 0, Position(0), 0, commit=True)
    await_batch(runs.get("other"), 0)
    assert runs.get("other").status().failed_batches == {}
    runs.close(PATIENCE_S)


def test_a_run_deleted_while_its_batch_waits_for_room_is_in_no_ones_way() -> None:
    shelf = Shelf(places=1)
    runs = Runs(shelf, build_batch=BuildBatch())
    for name in ("one", "other", "third"):
        runs.create(name, CONFIG | {"train_batch_size": 1})
    runs.get("one").submit(table(*group_rows("a")))
    await_batch(runs.get("one"), 0)
    runs.get("other").submit(table(*group_rows("a")))
    assert shelf.tried.wait(PATIENCE_S)
    runs.get("third").submit(table(*group_rows("a")))
    shelf.tried.clear()
    runs.delete("other")
    runs.delete("one")
    await_batch(runs.get("third"), 0)
    assert list(shelf.batches) == [("third", 0)]
    runs.close(PATIENCE_S)


def test_a_run_that_is_deleted_while_the_service_shuts_down_leaves_nothing() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.run.close(NotFoundError("deleted"))
    bench.run.close(UnavailableError("shutting down"))
    bench.make_batches()
    assert bench.store.batches == {}
    with pytest.raises(NotFoundError):
        bench.run.status()
