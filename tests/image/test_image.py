"""The image, built and run by a container engine as a cluster runs it: `make image-test`, which takes minutes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gristmill import RolloutClient, TrainerClient
from gristmill.errors import DeadlineExceededError, NotFoundError, UnavailableError
from tests.image.engine import Engine
from tests.redis.servers import RedisServer, free_port
from tests.rows import make_config

pytestmark = [
    pytest.mark.skipif("IMAGE_TEST" not in os.environ, reason="`make image-test` builds and runs the image"),
    pytest.mark.timeout(1800),
]
CONFIG = make_config(dp_size=1, step_wise=False)
USER = 10001
Start = Callable[..., str]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.installed()


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    return engine.build()


@pytest.fixture(scope="module")
def confined(engine: Engine, image: str) -> Engine:
    """The engine, which runs the image on this machine."""
    engine.concede(image)
    return engine


@pytest.fixture
def start(confined: Engine, image: str) -> Iterator[Start]:
    """Starts a container with these variables and mounts; returns its name, which is its gRPC address' too."""
    names: list[str] = []

    def started(*arguments: str, **environment: str) -> str:
        names.append(f"gristmill-test-{uuid.uuid4().hex[:8]}")
        confined.start(image, names[-1], *arguments, GRISTMILL_HTTP_ADDRESS=f"127.0.0.1:{free_port()}", **environment)
        return names[-1]

    yield started
    for name in names:
        confined("rm", "--force", name)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A directory that the image's user may write to, as a volume is."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to the image's user")
    made = tmp_path / "journal"
    made.mkdir()
    os.chown(made, USER, USER)
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)
    return made


def train(address: str, run: str, uid: str) -> list[list[str]]:
    """The prompts of the batch that is trained next, after a rollout of this one."""
    with RolloutClient(address, run, timeout_s=120) as client, TrainerClient(address, run, 0, timeout_s=120) as trainer:
        client.create_run(CONFIG)
        submit(client, uid)
        uids = []
        for shard in next(iter(trainer)).mini_batches():
            uids.append(shard.metadata["uids"])
            shard.ack()
        return uids


def submit(client: RolloutClient, uid: str) -> None:
    client.begin_groups([uid])
    with client.trajectory(uid, 0) as trajectory:
        trajectory.step([1, 2], [3], reward=1.0, is_last_step=True)
    client.flush()


def test_it_says_what_it_is_and_runs_as_nobody_in_particular(engine: Engine, image: str) -> None:
    config = engine.inspect(image)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["gristmill"]
    assert {"title", "version", "licenses", "source", "url", "documentation", "created", "revision", "base.name"} <= {
        name.removeprefix("org.opencontainers.image.") for name in config["Labels"]
    }


def test_it_is_small_without_its_base(engine: Engine, image: str) -> None:
    base = engine.inspect(image)["Config"]["Labels"]["org.opencontainers.image.base.name"]
    size = (engine.inspect(image)["Size"] - engine.inspect(base)["Size"]) / 1e6
    print(f"\nimage without its base: {size:.1f} MB")
    assert size <= 120


def test_it_serves_confined_and_ends_in_order(engine: Engine, start: Start) -> None:
    address = f"127.0.0.1:{free_port()}"
    name = start(GRISTMILL_GRPC_ADDRESS=address)
    assert train(address, "run", "a") == [["a"]]
    content = engine("exec", name, "cat", "/proc/1/status")
    status = dict(line.split(":\t", 1) for line in content.splitlines() if ":\t" in line)
    assert status["Uid"].split() == [str(USER)] * 4
    assert (int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, "1")
    with pytest.raises(Exception, match="Read-only file system"):
        engine("exec", name, "python", "-c", "open('/opt/gristmill/made', 'w')")
    engine("stop", "--time", "60", name)
    assert engine.state(name)["ExitCode"] == 0


def test_its_journal_outlives_kill_9(engine: Engine, start: Start, journal: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = {"GRISTMILL_GRPC_ADDRESS": address, "GRISTMILL_JOURNAL_DIR": "/var/lib/gristmill/journal"}
    mount = ("--volume", f"{journal}:/var/lib/gristmill")
    name = start(*mount, **settings)
    assert train(address, "run", "a") == [["a"]]
    with RolloutClient(address, "run") as client:
        submit(client, "b")
    engine("kill", "--signal", "KILL", name)
    engine("rm", "--force", name)
    start(*mount, **settings)
    wait_for(address)
    with RolloutClient(address, "run", timeout_s=120) as client:
        assert {group.uid for group in client.groups()} == {"a", "b"}
    with TrainerClient(address, "run", 0, timeout_s=120) as trainer:
        assert [shard.metadata["uids"] for shard in next(iter(trainer)).mini_batches()] == [["b"]]


def test_another_takes_over_where_one_on_redis_was_killed(engine: Engine, start: Start, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        names = [
            start(GRISTMILL_STORE="redis", GRISTMILL_REDIS_URL=redis.url, GRISTMILL_GRPC_ADDRESS=address)
            for address in addresses
        ]
        assert train(addresses[0], "run", "a") == [["a"]]
        engine("kill", "--signal", "KILL", names[0])
        wait_for(addresses[1])
        assert train(addresses[1], "run", "b") == [["b"]]
        engine("stop", "--time", "60", names[1])
        assert engine.state(names[1])["ExitCode"] == 0


def wait_for(address: str) -> None:
    """Until a service answers there."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with RolloutClient(address, "run", timeout_s=5) as client:
                client.status()
                return
        except NotFoundError:
            # It answers, and knows of no run.
            return
        except (DeadlineExceededError, UnavailableError):
            if time.monotonic() > deadline:
                raise
