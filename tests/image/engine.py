"""Container engines: buildah, podman or docker, whichever is there.

What a machine needs beside that it says by the environment: IMAGE_BASE, an image to build on in place of the
Dockerfile's; IMAGE, one that is built already; IMAGE_ENGINE_FLAGS, IMAGE_BUILD_FLAGS and IMAGE_RUN_FLAGS, flags more.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TAG = "localhost/gristmill:image-test"
DEBIAN_BASE = "localhost/gristmill-base:debian"
# What a container may do: nothing that the service does not need.
CONFINED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--shm-size", "256m")


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

    @classmethod
    def found(cls) -> Engine:
        """The one that is there; skips, and says so, where there is none that works."""
        runner = next((name for name in ("podman", "docker") if works(name)), None)
        if runner is None:
            pytest.skip("no container engine: install podman or docker (and start it) to test the image")
        return cls("buildah" if runner == "podman" and works("buildah") else runner, runner)

    def __call__(self, *arguments: str, timeout_s: float = 600) -> str:
        return run(self.runner, *flags("ENGINE"), *arguments, timeout_s=timeout_s)

    def build(self) -> str:
        """The image's name."""
        if given := os.environ.get("IMAGE"):
            return given
        options = ["--build-arg", f"BASE={self.base()}", "--build-arg", "VERSION=1.2.3", "--tag", TAG]
        # Only Docker's own form has a health check.
        form = [] if self.builder == "docker" else ["--format", "docker"]
        run(self.builder, *flags("ENGINE"), "build", *form, *options, *flags("BUILD"), str(ROOT), timeout_s=1800)
        return TAG

    def base(self) -> str:
        """What the Dockerfile builds on, or where no registry can be reached a stand-in made of Debian's packages."""
        if given := os.environ.get("IMAGE_BASE"):
            return given
        (wanted,) = re.findall(r"^ARG BASE=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        try:
            self("pull", wanted, timeout_s=300)
        except (EngineError, subprocess.TimeoutExpired) as error:
            if shutil.which("mmdebstrap") is None:
                pytest.skip(f"{wanted} cannot be pulled, and there is no mmdebstrap to make a stand-in with: {error}")
            return self._debian_base()
        return str(wanted)

    def _debian_base(self) -> str:
        with tempfile.TemporaryDirectory() as directory:
            archive = str(Path(directory, "base.tar"))
            packages = "python3,python3-venv,python3-pip,ca-certificates"
            link = 'ln -s python3 "$1/usr/bin/python"'
            hooks = ["--variant=minbase", f"--include={packages}", f"--customize-hook={link}"]
            run("mmdebstrap", *hooks, "bookworm", archive, timeout_s=1200)
            self("import", archive, DEBIAN_BASE)
        return DEBIAN_BASE

    def inspect(self, image: str) -> dict[str, Any]:
        (found,) = json.loads(self("image", "inspect", image))
        assert isinstance(found, dict)
        return found

    def start(self, image: str, name: str, *arguments: str, **environment: str) -> None:
        """A confined container that serves on this machine's loopback."""
        variables = [one for key, value in environment.items() for one in ("--env", f"{key}={value}")]
        confined = (*CONFINED, "--network", "host", *flags("RUN"))
        self("run", "--detach", "--name", name, *confined, *variables, *arguments, image)

    def state(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self("container", "inspect", name))
        state: dict[str, Any] = found["State"]
        return state


def works(name: str) -> bool:
    if shutil.which(name) is None:
        return False
    try:
        run(name, *flags("ENGINE"), "version" if name == "docker" else "images", timeout_s=60)
    except (EngineError, subprocess.TimeoutExpired):
        return False
    return True
