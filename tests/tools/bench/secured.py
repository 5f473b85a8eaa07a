"""Measures what TLS and tokens cost: a turn, and long rows, compared with a service without them."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import trustme

from gristmill import RolloutClient
from gristmill._client.connection.credentials import Credentials
from gristmill.converters import from_skyrl
from gristmill_service.access.tokens import create_token
from tests.tools.bench.figures import Figure, seconds
from tests.tools.bench.processes import served
from tests.tools.bench.submissions import config
from tests.tools.bench.submit import LONG, generator_output, turn_rows

TURNS, ROUNDS, LONG_ROWS = 1_000, 9, 128


def figures() -> Iterator[Figure]:
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        flags, shown = _secured(directory)
        plain = opened.enter_context(served(["--store", "memory"])).grpc_address
        secured = opened.enter_context(served(["--store", "memory", *flags])).grpc_address
        secured = secured.replace("127.0.0.1", "localhost")
        open_to: dict[str, Callable[[str], RolloutClient]] = {
            "secured": lambda run: RolloutClient(secured, run, credentials=shown),
            "plain": lambda run: RolloutClient(plain, run),
        }
        ours, bound = _turns(open_to)
        yield Figure("tls.turn_ratio", ours / bound, "x without TLS", 1.15, bound * 1e3, "ms")
        ours, bound = _long(open_to)
        yield Figure("tls.long_ratio", ours / bound, "x without TLS", 1.5, bound, "s")


def _turns(open_to: dict[str, Callable[[str], RolloutClient]]) -> tuple[float, float]:
    """The median seconds of a turn, each side's after the other's."""
    times: dict[str, list[float]] = {side: [] for side in open_to}
    with ExitStack() as opened:
        clients = {side: opened.enter_context(open_(f"turns-{side}")) for side, open_ in open_to.items()}
        for client in clients.values():
            client.create_run(_settings())
        for row in turn_rows(TURNS):
            for side, client in clients.items():
                times[side].append(seconds(lambda client=client, row=row: client.submit([row])))  # type: ignore[misc]
    return statistics.median(times["secured"][50:]), statistics.median(times["plain"][50:])


def _long(open_to: dict[str, Callable[[str], RolloutClient]]) -> tuple[float, float]:
    """The median seconds of long rows as one submission."""
    output = generator_output(LONG_ROWS, LONG)
    times: dict[str, list[float]] = {side: [] for side in open_to}
    for number in range(ROUNDS):
        for side, open_ in open_to.items():
            with open_(f"long-{number}") as client:
                client.create_run(_settings())
                client.status()
                times[side].append(seconds(lambda client=client: client.submit(from_skyrl(output))))  # type: ignore[misc]
                client.delete_run()
    return statistics.median(times["secured"][1:]), statistics.median(times["plain"][1:])


def _secured(directory: Path) -> tuple[list[str], Credentials]:
    """The flags of a service with TLS and tokens, and what its caller shows."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    paths = {name: directory / name for name in ("ca.pem", "tls.crt", "tls.key", "tokens.yaml")}
    paths["ca.pem"].write_bytes(authority.cert_pem.bytes())
    paths["tls.crt"].write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    paths["tls.key"].write_bytes(issued.private_key_pem.bytes())
    token = create_token(paths["tokens.yaml"], "bench", ["admin"], ["*"], None)
    flags = ["--tls-cert-file", str(paths["tls.crt"]), "--tls-key-file", str(paths["tls.key"])]
    return [*flags, "--tokens-file", str(paths["tokens.yaml"])], Credentials(token=token, ca_file=str(paths["ca.pem"]))


def _settings() -> dict[str, object]:
    settings: dict[str, object] = config().model_dump(mode="json", exclude_defaults=True)
    return settings
