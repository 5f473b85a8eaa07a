"""What a release rests on: one version, notes, workflows that are well formed, protos that stay compatible."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import gristmill

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "dependabot": [GITHUB / "dependabot.yml"],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
    "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")],
    "compose-spec": [ROOT / "deploy/compose/compose.yaml"],
}
# An sdist is without what belongs to the repository alone.
needs_repository = pytest.mark.skipif(not GITHUB.exists(), reason="in an sdist")


def output(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_chart_has_the_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/gristmill/Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"], output("make", "--silent", "version").strip()} == {
        gristmill.__version__
    }, "run `make chart-version`"


def test_no_other_file_repeats_it() -> None:
    places = [ROOT / "Dockerfile", ROOT / "pyproject.toml", *ROOT.glob("deploy/**/*.yaml")]
    files = {str(path.relative_to(ROOT)) for path in places if re.search(_version(), path.read_text())}
    assert files == {"deploy/helm/gristmill/Chart.yaml"}


def _version() -> str:
    return rf"(?<![\d.]){re.escape(gristmill.__version__)}(?![\d.])"


def test_a_released_chart_runs_the_released_image_and_names_its_runbook(tmp_path: Path) -> None:
    digest, repository = f"sha256:{'a' * 64}", "https://code.example/owner/gristmill"
    release = {
        "GRISTMILL_REPOSITORY": repository,
        "GRISTMILL_IMAGE": "registry.example/owner/gristmill",
        "GRISTMILL_IMAGE_DIGEST": digest,
    }
    output(ROOT / "deploy/package-chart.sh", tmp_path, **release)
    with tarfile.open(tmp_path / f"gristmill-{gristmill.__version__}.tgz") as package:
        files = {name: package.extractfile(f"gristmill/{name}") for name in ("values.yaml", "Chart.yaml")}
        values, chart = (yaml.safe_load(file.read()) for file in files.values() if file is not None)
    assert values["image"]["repository"] == release["GRISTMILL_IMAGE"]
    assert values["image"]["digest"] == digest
    assert chart["sources"] == [repository]


def test_the_notes_of_a_release_are_its_part_of_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    script = shutil.copy(ROOT / "deploy/release-notes.sh", tmp_path / "deploy")
    text = "# Changelog\n\n## Unreleased\n\n- Later\n\n## 0.2.0 (2030-01-02)\n\n- Now\n\n## 0.2.01\n\n- Other\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    assert output(script, "0.2.0").strip() == "- Now"
    assert subprocess.run([script, "0.3.0"], capture_output=True, check=False).returncode == 1


@needs_repository
@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_other_programs_read_is_as_they_expect(schema: str) -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    output(program, "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema])


def steps() -> list[tuple[str, dict[str, Any]]]:
    """Each step of each workflow, with the workflow's name."""
    pairs = []
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            pairs += [(path.name, step) for step in [*job.get("steps", []), *([job] if "uses" in job else [])]]
    return pairs


def jobs() -> dict[str, dict[str, Any]]:
    """Each job by its workflow and name."""
    documents = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    return {f"{stem}.{name}": job for stem, document in documents.items() for name, job in document["jobs"].items()}


@needs_repository
def test_every_action_is_pinned_by_its_commit_and_says_its_version() -> None:
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: *(.+)", path.read_text())]
    pinned = [one for one in used if re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)]
    assert [one for one in used if one not in pinned] == ["./.github/workflows/ci.yml"]
    # Each action has one version.
    assert len({one.partition("@")[0] for one in pinned}) == len(set(pinned))


@needs_repository
def test_every_image_that_a_release_uses_is_pinned_by_its_digest() -> None:
    images = re.findall(r"docker\.io/\S+", (GITHUB / "workflows/release.yml").read_text())
    assert len(images) == 3
    assert [image for image in images if not re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image)] == []


@needs_repository
def test_no_step_that_runs_packages_of_others_can_write_or_sign() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
    for name, job in jobs().items():
        runs = "\n".join(step.get("run", "") for step in job.get("steps", []))
        if re.search(r"\bmake (?!--silent version)|\bpip\b", runs):
            assert "permissions" not in job, name
            assert "secrets." not in str(job), name


@needs_repository
def test_no_checkout_leaves_a_token_behind() -> None:
    checkouts = [step for _, step in steps() if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@needs_repository
def test_packages_image_and_chart_have_provenance_and_image_and_chart_are_signed() -> None:
    attested = {
        name: step["with"]
        for name, job in jobs().items()
        for step in job.get("steps", [])
        if step.get("uses", "").startswith("actions/attest-build-provenance@")
    }
    assert attested["release.provenance"] == {"subject-path": "dist/*"}
    signed = {name for name, job in jobs().items() if "cosign sign --yes" in str(job)}
    assert signed == {"release.image", "release.chart"}
    for name in signed:
        assert attested[name]["push-to-registry"] is True
        assert {"subject-name", "subject-digest"} <= set(attested[name])


@needs_repository
def test_the_image_has_an_sbom_and_so_has_the_page_of_the_release() -> None:
    (built,) = [step["with"] for _, step in steps() if step.get("uses", "").startswith("docker/build-push-action@")]
    assert built["sbom"].startswith("generator=")
    assert built["provenance"] == "mode=max"
    uploaded = {
        step["with"]["name"]: step["with"]["path"]
        for name, job in jobs().items()
        for step in job.get("steps", [])
        if name.startswith("release.") and step.get("uses", "").startswith("actions/upload-artifact@")
    }
    shown = str(jobs()["release.release"]["steps"])
    assert set(uploaded) == {"dist", "chart", "sbom"}
    assert "artifacts/{dist,chart,sbom}/*" in shown
    assert uploaded["sbom"] == "gristmill-image.spdx.json"


@needs_repository
def test_every_target_and_script_that_a_workflow_runs_exists() -> None:
    runs = "\n".join(step["run"] for _, step in steps() if "run" in step)
    targets = sorted(set(re.findall(r"\bmake (?:--silent )?([a-z-]+)", runs)))
    assert {"audit", "soak"} <= set(targets)
    assert targets
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert [script for script in re.findall(r"deploy/[\w.-]+\.sh", runs) if not os.access(ROOT / script, os.X_OK)] == []


def test_a_field_that_changes_its_number_is_refused(tmp_path: Path) -> None:
    buf = Path(sys.executable).with_name("buf")
    changed = shutil.copytree(ROOT / "protos", tmp_path / "protos")
    against = ("--against", str(ROOT / "protos/released.binpb"))
    output(buf, "breaking", str(changed), *against)
    proto = changed / "gristmill/v1/run.proto"
    text = proto.read_text()
    match = re.search(r"^  string run = 1;", text, re.MULTILINE)
    assert match is not None
    proto.write_text(text.replace(match[0], "  string run = 99;", 1))
    done = subprocess.run([buf, "breaking", changed, *against], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "run.proto" in done.stdout
