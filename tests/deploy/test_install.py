"""The image's steps without an engine: wheel and pinned requirements into a clean tree that nobody may write to;
another user serves from it, and a batch is trained."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill import RolloutClient, TrainerClient
from tests.rows import make_config

ROOT = Path(__file__).parents[2]
NOBODY = 65534
CONFIG = make_config(n_samples_per_prompt=2, micro_batch={"size": 2}, step_wise=False)
SERVE = "from gristmill_service.cli import main; main()"


def interpreter() -> str:
    """A Python of this version that another user may run, as that of an image is."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        asked = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
        try:
            if not subprocess.run([path, "-c", asked], user=NOBODY, group=NOBODY, capture_output=True).returncode:
                return path
        except (OSError, subprocess.SubprocessError):
            continue
    pytest.skip(f"no Python {sys.version_info[0]}.{sys.version_info[1]} that user {NOBODY} may run")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """The image's Python packages: installed, and then without a bit that allows to write."""
    if os.geteuid() != 0:
        pytest.skip("only root can start the service as another user")
    directory = Path(tempfile.mkdtemp(prefix="gristmill-image-"))
    directory.chmod(0o755)
    site, wheels = directory / "site", directory / "wheels"
    exact = ("--no-compile", "--only-binary", ":all:", "--require-hashes")
    pip("install", *exact, "--target", str(site), "-r", str(ROOT / "deploy/requirements.txt"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT))
    pip("install", "--no-compile", "--no-deps", "--target", str(site), *map(str, wheels.glob("gristmill-*.whl")))
    subprocess.run([ROOT / "deploy/slim.sh", site], check=True)
    for path in (site, *site.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    yield site
    shutil.rmtree(directory)


@pytest.mark.timeout(300)
def test_what_the_image_installs_serves_a_batch_as_another_user(tree: Path) -> None:
    python = interpreter()
    memory = Path(tempfile.mkdtemp(prefix="gristmill-memory-"))
    os.chown(memory, NOBODY, NOBODY)
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}
    flags = ("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--shared-memory-dir", str(memory))
    process = subprocess.Popen(
        [python, "-c", SERVE, "serve", *flags, "--journal-dir", str(memory / "journal")],
        env=environment, user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd="/",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is ready" in line, process.communicate(timeout=20)
        address = line.split("gRPC ")[1].split(",")[0]
        with RolloutClient(address, "run") as client, TrainerClient(address, "run", 0) as trainer:
            client.create_run(CONFIG)
            for sample in range(2):
                with client.trajectory("a", sample) as trajectory:
                    trajectory.step([1, 2], [3], reward=float(sample), is_last_step=True)
            shards = list(next(iter(trainer)).mini_batches())
        assert [shard.metadata["uids"] for shard in shards] == [["a", "a"]]
        assert os.stat(f"/proc/{process.pid}").st_uid == NOBODY
    finally:
        process.terminate()
        process.communicate(timeout=30)
        shutil.rmtree(memory)
    assert process.returncode == 0


@pytest.mark.skipif(shutil.which("strip") is None, reason="without strip, which removes debug symbols: binutils")
def test_the_image_is_small_without_its_base(tree: Path) -> None:
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6
    print(f"image without its base: {size:.1f} MB")
    # Python 3.11's is what the image has.
    assert size < 120 or sys.version_info[:2] != (3, 11)


def test_the_image_has_no_tests_of_its_dependencies(tree: Path) -> None:
    assert [path for path in tree.rglob("*") if path.name in ("tests", "test", "__pycache__", "f2py")] == []


def test_the_service_of_the_image_has_no_torch_and_no_compiler(tree: Path) -> None:
    names = {path.name.split("-")[0].lower() for path in tree.glob("*.dist-info")}
    assert "gristmill" in names
    assert not names & {"torch", "ray", "hatchling", "pip", "setuptools", "cython", "grpcio_tools"}
