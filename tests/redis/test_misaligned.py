"""A failed batch whose rows are kept, in Redis: another replica has them, too."""

from __future__ import annotations

import pytest

from gristmill_service.storage.redis.run_store import RedisRunStore
from tests.redis.run_logs import Join
from tests.run.test_misaligned import check_that_it_outlives_its_process


@pytest.mark.parametrize("is_compacted", [True, False])
def test_another_replica_keeps_it(store: RedisRunStore, join: Join, url: str, is_compacted: bool) -> None:
    check_that_it_outlives_its_process(store, lambda: join(url, 1), is_compacted)
