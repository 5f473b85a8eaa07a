"""The packages of a release: what is in them, and what an index shows of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import gristmill

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://code.example/owner/gristmill"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that is built of it."""
    directory = tmp_path_factory.mktemp("dist")
    command = ["make", "--silent", "dist", f"DIST={directory}", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "GRISTMILL_REPOSITORY": REPOSITORY}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240)
    return directory


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    """What the wheel says of itself."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_nothing_but_pinned_packages_takes_part_in_the_build(built: Path) -> None:
    assert len(list(built.iterdir())) == 2
    pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "deploy/build-requirements.txt").read_text(), re.MULTILINE)
    command = [
        str(ROOT / ".venv-build/bin/python"),
        "-m",
        "pip",
        "list",
        "--format",
        "json",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    installed = {one["name"]: one["version"] for one in json.loads(done.stdout)}
    # What Python itself brings.
    assert {name: version for name, version in installed.items() if name not in ("pip", "setuptools")} == dict(pinned)


def test_a_package_with_another_hash_is_not_installed(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/build-requirements.txt").write_text(f"{wheel} --hash=sha256:{'0' * 64}\n")
    command = ["make", "--silent", "dist", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_an_index_takes_them(built: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_sdist_has_the_tests_and_what_they_read(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = set(listed.stdout.splitlines())
    assert {"tests/test_readme.py", "deploy/helm/gristmill/Chart.yaml", "Makefile", "README.md"} <= names
    left_out = (".ci/", ".github/")
    links = {"deploy/helm/examples/trainer/charts/gristmill"}
    assert {name for name in tracked - names - links if not name.startswith(left_out)} == set()


def test_the_readme_leads_to_the_files_of_its_version(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    version = f"v{gristmill.__version__}"
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"{REPOSITORY}/blob/{version}/docs/operations.md" in links
    assert f"{REPOSITORY}/raw/{version}/docs/page-light.png" in links
    assert [link for link in links if not re.match(r"\w+:|#", link)] == []


def test_an_index_shows_where_the_project_is(metadata: Message) -> None:
    shown = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert shown["Source"] == REPOSITORY
    assert set(shown) == {"Homepage", "Documentation", "Changelog", "Issues", "Source"}
