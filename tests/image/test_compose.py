"""The compose file, unchanged, by podman-compose or `docker compose`: two services on a Valkey; one is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import yaml

from tests.image.engine import ROOT, Engine, flags, run
from tests.image.test_image import pytestmark as _pytestmark
from tests.image.test_image import train, wait_for

pytestmark = _pytestmark
FILE = ROOT / "deploy/compose/compose.yaml"
ADDRESSES = ("127.0.0.1:50051", "127.0.0.1:50052")


@pytest.fixture(scope="module")
def compose() -> Iterator[list[str]]:
    """The command, with the project up."""
    engine = Engine.installed()
    program = shutil.which("docker" if engine.runner == "docker" else "podman-compose")
    if program is None:
        pytest.skip("no podman-compose: pip install podman-compose")
    services = yaml.safe_load(FILE.read_text())["services"]
    engine.get_valkey(services["redis"]["image"])
    image = engine.build()
    engine("tag", image, "localhost/gristmill:local" if engine.runner == "podman" else "gristmill:local")
    if engine.runner == "docker":
        command = [program, "compose"]
    else:
        engine.concede(image)
        command = [program, "--in-pod", "false", *(f"--podman-args={one}" for one in flags("ENGINE"))]
        command += [f"--podman-run-args={one}" for one in (*flags("RUN"), *engine.concessions)]
    os.environ.setdefault("GRISTMILL_REDIS_PASSWORD", "of-a-test")
    os.environ["GRISTMILL_INSECURE"] = "true"
    command += ["--file", str(FILE)]
    try:
        run(*command, "up", "--detach", "--no-build", timeout_s=900)
        yield command
    finally:
        run(*command, "down", "--volumes", timeout_s=300)


def test_both_services_train_a_run_and_one_goes_on_alone(compose: list[str]) -> None:
    for address in ADDRESSES:
        wait_for(address)
    assert train(ADDRESSES[0], "run", "a") == [["a"]]
    run(*compose, "kill", "gristmill-1")
    assert train(ADDRESSES[1], "run", "b") == [["b"]]
