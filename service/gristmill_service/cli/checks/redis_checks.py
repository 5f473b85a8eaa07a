"""The settings of Redis that docs/operations.md asks for."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.errors import GristmillError
from gristmill_service.cli.checks.check import Check
from gristmill_service.settings import Settings


def check_redis(settings: Settings) -> Iterator[Check]:
    """Nothing where the settings name no Redis. A setting that it does not let us see is not judged."""
    if settings.run_store != "redis":
        return
    from gristmill_service.storage.backends import redis_address
    from gristmill_service.storage.redis.servers.connection import connect
    from gristmill_service.storage.redis.servers.durability import Durability
    from gristmill_service.storage.redis.servers.server_check import check_replication, check_server, has_bound

    address = redis_address(settings)
    what = f"Redis at {address}"
    try:
        client = connect(address)
        try:
            findings = check_server(client, Durability(settings.redis_min_replicas, settings.redis_wait_aof))
            findings += check_replication(client)
            unbounded = [name for name, bounded in has_bound(client).items() if not bounded]
        finally:
            client.close()
    except GristmillError as error:
        yield Check(what, "cannot be used", str(error))
        return
    for finding in findings:
        where, _, text = finding.partition(": ")
        found, _, remedy = text.rpartition("; ")
        yield Check(where, found or text, remedy if found else "see docs/operations.md, 'Redis'")
    for name in unbounded:
        yield Check(f"Redis at {name}", "maxmemory is not set, so that it grows until the machine has none", "set it")
    if not findings and not unbounded:
        yield Check(what, "answers, and is set as docs/operations.md asks")
