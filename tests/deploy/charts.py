"""The chart as Helm renders it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/gristmill"
EXAMPLES = sorted(path.stem for path in (DEPLOY / "helm/examples").glob("*.yaml"))
BUNDLED = ("--set", "redis.bundled.enabled=true,redis.passwordSecret=secret")
OPEN = ("--set", "access.insecure=true")
REDIS = (*BUNDLED, *OPEN)
JOURNAL = ("--set", "store=journal,replicas=1", *OPEN)

_spec = importlib.util.spec_from_file_location("validate", DEPLOY / "validate.py")
assert _spec is not None
assert _spec.loader is not None
validate: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(validate)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One run of the helm that `make dev` installs, or of the one on the PATH."""
    installed = ROOT / ".venv/bin/helm"
    binary = str(installed) if installed.exists() else shutil.which("helm")
    assert binary is not None, "helm is not installed: run `make dev`"
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(*flags: str, chart: Path = CHART) -> list[dict[str, Any]]:
    """The resources that `helm install` with these flags would make."""
    done = helm("template", "gristmill", str(chart), "-n", "gristmill", "--kube-version", "1.29", *flags)
    assert done.returncode == 0, done.stderr
    manifests: list[dict[str, Any]] = validate.resources(done.stdout)
    return manifests


def refusal(*flags: str) -> str:
    """The message with which Helm refuses these flags."""
    done = helm("template", "gristmill", str(CHART), "--kube-version", "1.29", *flags)
    assert done.returncode != 0, "these values were rendered"
    return done.stderr


def notes(*flags: str, chart: Path = CHART) -> str:
    """What `helm install` with these flags prints."""
    done = helm("install", "gristmill", str(chart), "-n", "gristmill", "--dry-run=client", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def only(resources: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The one resource of a kind whose name ends so."""
    (manifest,) = [
        resource for resource in resources if resource["kind"] == kind and resource["metadata"]["name"].endswith(name)
    ]
    return manifest


def pod(resource: dict[str, Any]) -> dict[str, Any]:
    """The pod that a workload makes; empty for another resource."""
    spec: dict[str, Any] = resource.get("spec", {}).get("template", {}).get("spec", {})
    return spec
