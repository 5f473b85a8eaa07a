"""Container engines: buildah, podman or docker, whichever is there.

Where a runtime is not permitted to set limits for containers, as on a machine that is a container itself, they run with
those of this process (`Engine.concessions`), which is said aloud. What a machine needs in addition it says by the
environment: IMAGE_BASE, an image to build on in place of the
Dockerfile's; IMAGE, one that is built already; IMAGE_ENGINE_FLAGS, IMAGE_BUILD_FLAGS and IMAGE_RUN_FLAGS, flags more.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TAG = "localhost/gristmill:image-test"
DEBIAN_BASE = "localhost/gristmill-base:debian"
# What a container may do: nothing that the service does not need.
CONFINED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--shm-size", "256m")

_MOST_PROCESSES = 1 << 15


class EngineError(Exception):
    """A command of an engine failed."""


def flags(name: str) -> list[str]:
    return shlex.split(os.environ.get(f"IMAGE_{name}_FLAGS", ""))


def run(*command: str, timeout_s: float = 600) -> str:
    """What it prints. Raises EngineError with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise EngineError(f"{shlex.join(command)}: {done.stderr[-4000:]}")
    return done.stdout


class Engine:
    """Builds and runs images. builder and runner may be two programs with one store, as buildah and podman."""

    def __init__(self, builder: str, runner: str) -> None:
        self.builder, self.runner = builder, runner
        self.concessions: Sequence[str] = ()

    @classmethod
    def installed(cls) -> Engine:
        """Returns the engine that is installed; skips the test where none works."""
        runner = next((name for name in ("podman", "docker") if works(name)), None)
        if runner is None:
            pytest.skip("no container engine: install podman or docker (and start it) to test the image")
        return cls("buildah" if runner == "podman" and works("buildah") else runner, runner)

    def __call__(self, *arguments: str, timeout_s: float = 600) -> str:
        return run(self.runner, *flags("ENGINE"), *arguments, timeout_s=timeout_s)

    def build(self) -> str:
        """The image's name."""
        if prebuilt := os.environ.get("IMAGE"):
            return prebuilt
        options = ["--build-arg", f"BASE={self.base()}", "--build-arg", "VERSION=1.2.3", "--tag", TAG]
        # Only Docker's own form has a health check.
        form = [] if self.builder == "docker" else ["--format", "docker"]
        command = [self.builder, *flags("ENGINE"), "build", *form, *options, *flags("BUILD")]
        try:
            run(*command, str(ROOT), timeout_s=1800)
        except EngineError as error:
            if self.builder != "buildah" or not is_of_the_machine(error):
                raise
            print(f"\nbuilt by chroot, as its runtime does not run here: {last_line(error)}")
            run(*command, "--isolation", "chroot", str(ROOT), timeout_s=1800)
        return TAG

    def concede(self, image: str) -> None:
        """Finds out what has to be conceded so that the image runs confined here: skips, in the engine's own words,
        where nothing helps."""
        messages = []
        for concessions in _concessions():
            try:
                self("run", "--rm", *CONFINED, *flags("RUN"), *concessions, "--entrypoint", "true", image)
            except EngineError as error:
                if not is_of_the_machine(error):
                    raise
                messages.append(last_line(error))
                continue
            self.concessions = concessions
            if messages:
                print(f"\ncontainers run with {shlex.join(concessions)}: {messages[0]}")
            return
        pytest.skip(f"{self.runner} cannot run a container on this machine: {'; '.join(messages)}")

    def base(self) -> str:
        """What the Dockerfile builds on, or where no registry can be reached a stand-in made of Debian's packages."""
        if prebuilt := os.environ.get("IMAGE_BASE"):
            return prebuilt
        (wanted,) = re.findall(r"^ARG BASE=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        try:
            self("pull", wanted, timeout_s=300)
        except (EngineError, subprocess.TimeoutExpired) as error:
            packages = "python3,python3-venv,python3-pip,ca-certificates"
            self._stand_in(DEBIAN_BASE, "bookworm", packages, 'ln -s python3 "$1/usr/bin/python"', why=error)
            return DEBIAN_BASE
        return str(wanted)

    def get_valkey(self, image: str) -> None:
        """Valkey's own image, or where it cannot be had Debian's package of it under the image's name."""
        try:
            self("image", "inspect", image)
        except EngineError:
            try:
                self("pull", image, timeout_s=300)
            except (EngineError, subprocess.TimeoutExpired) as error:
                # With the user and the directory that the image has.
                hook = 'install -d -o 999 -g 999 "$1/data"'
                self._stand_in(image, "trixie", "valkey-server,valkey-tools", hook, "--change=WORKDIR /data", why=error)

    def _stand_in(self, name: str, suite: str, packages: str, hook: str, *changes: str, why: Exception) -> None:
        """Makes an image of Debian's packages in place of one that cannot be pulled, and says so."""
        if shutil.which("mmdebstrap") is None:
            pytest.skip(f"no registry, and no mmdebstrap to make a stand-in for {name} with: {why}")
        print(f"\n{name} is made of Debian's packages: no registry can be reached")
        with tempfile.TemporaryDirectory() as directory:
            archive = str(Path(directory, "image.tar"))
            options = ["--variant=minbase", f"--include={packages}", f"--customize-hook={hook}"]
            run("mmdebstrap", *options, suite, archive, timeout_s=1200)
            self("import", *changes, archive, name)

    def inspect(self, image: str) -> dict[str, Any]:
        (details,) = json.loads(self("image", "inspect", image))
        assert isinstance(details, dict)
        return details

    def start(self, image: str, name: str, *arguments: str, **environment: str) -> None:
        """A confined container that serves on this machine's loopback."""
        variables = [one for key, value in environment.items() for one in ("--env", f"{key}={value}")]
        confined = (*CONFINED, "--network", "host", *flags("RUN"), *self.concessions)
        self("run", "--detach", "--name", name, *confined, *variables, *arguments, image)

    def state(self, name: str) -> dict[str, Any]:
        (details,) = json.loads(self("container", "inspect", name))
        state: dict[str, Any] = details["State"]
        return state


def _concessions() -> Iterator[Sequence[str]]:
    """From none on. Neither takes anything from how the image is confined."""
    files = "{}:{}".format(*resource.getrlimit(resource.RLIMIT_NOFILE))
    # Under podman a runtime may be permitted fewer processes than this one.
    processes = min(_MOST_PROCESSES, *(limit for limit in resource.getrlimit(resource.RLIMIT_NPROC) if limit > 0))
    limits = [f"--ulimit=nofile={files}", f"--ulimit=nproc={processes}:{processes}"]
    yield ()
    yield limits
    yield [*limits, "--cgroups=disabled"]


def is_of_the_machine(error: EngineError) -> bool:
    """Whether it is the machine that does not let the runtime do something, whatever is in the image."""
    return re.search(r"setrlimit|RLIM|cgroup|[Oo]peration not permitted", str(error)) is not None


def last_line(error: EngineError) -> str:
    return str(error).strip().splitlines()[-1]


def works(name: str) -> bool:
    if shutil.which(name) is None:
        return False
    try:
        run(name, *flags("ENGINE"), "version" if name == "docker" else "images", timeout_s=60)
    except (EngineError, subprocess.TimeoutExpired):
        return False
    return True
