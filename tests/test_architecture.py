"""The tree shows a call's way from the top down: who imports what."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "service" / "gristmill_service"
ROOMS = (
    "cli",
    "service",
    "api",
    "monitoring",
    "run",
    "storage",
    "pipeline",
    "access",
    "config",
    "estimators",
    "settings",
)
"""As docs/architecture.md has them: each may import those after it."""


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, also for its types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the whole module"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def files(room: str) -> list[Path]:
    alone = SERVICE / f"{room}.py"
    return [alone] if alone.exists() else sorted((SERVICE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_none_above_it(room: str) -> None:
    above = ROOMS[: ROOMS.index(room)]
    wrong = [
        f"{path.relative_to(SERVICE)} imports {module}"
        for path in files(room)
        for module in imports(path)
        if module.startswith("gristmill_service.") and module.split(".")[1] in above
    ]
    assert files(room)
    assert wrong == []


@pytest.mark.parametrize("room", ["run/machine", "pipeline", "estimators"])
def test_what_is_pure_does_no_io_and_asks_no_clock(room: str) -> None:
    forbidden = {"grpc", "redis", "fastapi", "socket", "subprocess", "threading", "time"}
    wrong = [
        f"{path.relative_to(SERVICE)} imports {module}"
        for path in files(room)
        for module in imports(path)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    ]
    assert wrong == []


TOKENLESS = (
    *("table", "figures", "plan_document", "stages"),
    *("credit/advantage", "credit/baselines", "credit/denominators", "credit/length_penalty", "credit/whitening"),
    *("scheduling/balance", "scheduling/packing", "scheduling/plan", "scheduling/schedule"),
)
"""Of a batch's plan, what is made of numbers alone. `planning` names what is not: credit per token, weights of tokens
and `prefix_tree`."""


@pytest.mark.parametrize("part", TOKENLESS)
def test_a_plan_is_made_of_numbers_without_tokens(part: str) -> None:
    tokens = "gristmill._wire.columns.Ragged", "gristmill._wire.steps.Steps"
    assert [one for one in imports(SERVICE / "pipeline" / f"{part}.py") if one in tokens] == []


@pytest.mark.parametrize("room", ["api", "run"])
def test_what_runs_on_the_event_loop_has_no_threads_of_its_own_and_never_sleeps(room: str) -> None:
    wrong = [
        f"{path.relative_to(SERVICE)} imports {module}"
        for path in files(room)
        for module in imports(path)
        if module in ("threading", "queue", "time.sleep", "requests", "redis", "sqlite3")
    ]
    wrong += [f"{path.relative_to(SERVICE)} sleeps" for path in files(room) if "time.sleep(" in path.read_text()]
    assert wrong == []


@pytest.mark.parametrize("package", ["clients/python/gristmill", "recorder/gristmill_recorder", "clients/demo"])
def test_clients_import_nothing_of_the_service(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for module in imports(path)
        if module.startswith("gristmill_service")
    ]
    assert wrong == []


LAYERS = ("_wire", "_torch", "_engines", "_client", "_capture", "torch", "_converters", "adapters")
"""The client package from the bottom up: each may import those before it."""


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_the_client_imports_none_above_it(layer: str) -> None:
    package = ROOT / "clients" / "python" / "gristmill"
    alone = package / f"{layer}.py"
    paths = [alone] if alone.exists() else sorted((package / layer).rglob("*.py"))
    above = LAYERS[LAYERS.index(layer) + 1 :]
    upward = [
        f"{path.relative_to(package)} imports {module}"
        for path in paths
        for module in imports(path)
        if module.startswith("gristmill.") and module.split(".")[1] in above
    ]
    assert paths
    assert upward == []


def test_the_service_never_imports_torch() -> None:
    wrong = [
        f"{path.relative_to(SERVICE)} imports {module}"
        for path in sorted(SERVICE.rglob("*.py"))
        for module in imports(path)
        if module.split(".")[0] == "torch" or module.startswith(("gristmill.torch", "gristmill._torch"))
    ]
    assert wrong == []


ADAPTERS = ROOT / "clients" / "python" / "gristmill" / "adapters"


def test_adapters_use_what_every_user_can() -> None:
    wrong = [
        f"{path.relative_to(ADAPTERS)} imports {module}"
        for path in sorted(ADAPTERS.rglob("*.py"))
        for module in imports(path)
        if module.startswith("gristmill._")
    ]
    assert wrong == []


@pytest.mark.parametrize("trainer", ["prime_rl", "skyrl", "slime", "trl", "verl"])
def test_an_adapter_has_private_modules_and_public_names(trainer: str) -> None:
    package = import_module(f"gristmill.adapters.{trainer}")
    assert {"Gristmill", "run_settings"} <= set(package.__all__)
    assert all(path.stem.startswith("_") for path in (ADAPTERS / trainer).glob("*.py"))
    parameters = list(inspect.signature(package.run_settings).parameters)
    assert parameters == ["config", "gristmill", "dp_size", "pad_token_id"]
