"""`gristmill doctor` checks a service's environment. Heavy modules are imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.errors import InvalidArgumentError
from gristmill_service.cli.options import JsonOption, flags_of
from gristmill_service.cli.terminal import NEEDS_PERSON, early_ends
from gristmill_service.settings import Settings, load_settings, split_address

if TYPE_CHECKING:
    from gristmill_service.cli.checks import Check

_AddressOption = Annotated[
    str | None,
    typer.Option(
        envvar="GRISTMILL_ADDRESS",
        help="The address of the service, or of all its replicas: HOST:PORT or unix:/PATH, separated by commas "
        "[default: the address in --grpc-address]",
    ),
]
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("doctor")(doctor)


def doctor(*, address: str | None, as_json: bool, **flags: object) -> None:
    """Check a service's environment, one check per line; each failed check names a remedy.

    Accepts the flags, environment and settings file of `gristmill serve`, and checks: these settings; whether each
    replica answers over gRPC and HTTP, also at --probe-address if it is set, accepts the credentials in the
    environment, and has this machine's version and time; the size and free space of shared memory and journal on this
    machine; and the settings of Redis.

    Exit status 0: all checks passed. 1: a check failed.

    Example: gristmill doctor --address host1:50051,host2:50051 --store redis --redis-url redis://redis:6379
    """
    with early_ends():
        checks = []
        for check in _checks(address, flags):
            checks.append(check)
            if not as_json:
                print(check, flush=True)
        if as_json:
            results = [
                {"what": one.subject, "ok": one.is_well, "found": one.state, "remedy": one.remedy} for one in checks
            ]
            print(json.dumps({"checks": results}))
    raise typer.Exit(0 if all(check.is_well for check in checks) else NEEDS_PERSON)


doctor.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("address", Parameter.KEYWORD_ONLY, default=None, annotation=_AddressOption),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
        *flags_of(Settings).parameters.values(),
    ]
)


def _checks(address: str | None, flags: dict[str, object]) -> Iterator[Check]:
    from gristmill_service.cli.checks import Check, check_machine, check_redis, check_replicas

    try:
        settings = load_settings(flags)
        yield Check("settings", "are valid")
    except InvalidArgumentError as error:
        yield Check(
            "settings",
            str(error),
            "correct the settings, and run the command again: the other checks used the defaults",
        )
        settings = Settings.model_construct()
    yield from check_machine(settings)
    yield from check_redis(settings)
    probe_port = None if settings.probe_address is None else split_address(settings.probe_address)[1]
    http_port = split_address(settings.http_address)[1]
    yield from check_replicas(address or _reached(settings.grpc_address), http_port, probe_port)


def _reached(listens: str) -> str:
    """Returns the address at which this machine reaches a service that listens on `listens`."""
    if listens.startswith("unix:"):
        return listens
    host, port = split_address(listens)
    host = _EVERYWHERE.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
