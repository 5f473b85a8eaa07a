"""The rendered manifests, and the check that judges them."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from gristmill_service.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "manifests").glob("*.yaml"))
_spec = importlib.util.spec_from_file_location("validate", DEPLOY / "validate.py")
validate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(validate)


def manifest(name):
    return (DEPLOY / "manifests" / f"{name}.yaml").read_text(encoding="utf-8")


def only(name, kind):
    (found,) = [resource for resource in validate.resources(manifest(name)) if resource["kind"] == kind]
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_example_is_valid_and_of_the_restricted_profile(path):
    assert validate.errors(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        ("service", "serviceName:", "serviceNam:", "serviceNam"),
        ("service", "endpoints:", "endpoint:", "endpoint"),
        ("service", "expr:", "expression:", "expression"),
        ("service", "runAsNonRoot: true", "runAsNonRoot: false", "runAsNonRoot is not true"),
        ("service", "drop: [ALL]", "drop: [KILL]", "capabilities are not dropped"),
        ("service", "allowPrivilegeEscalation: false", "privileged: true", "allowPrivilegeEscalation is not false"),
        ("sidecar", "restartPolicy: Always", "restartPolice: Always", "restartPolice"),
        ("sidecar", "emptyDir: {}", "hostPath: {path: /}", "hostPath is not permitted"),
    ],
)
def test_what_is_wrong_is_told(name, before, after, told):
    assert before in manifest(name)
    assert told in "\n".join(validate.errors(manifest(name).replace(before, after)))


def test_a_name_that_is_given_twice_is_refused():
    with pytest.raises(yaml.YAMLError, match="kind given twice"):
        validate.resources("kind: A\nkind: B\n")


def test_trainers_reach_replicas_that_are_not_ready():
    services = [found for found in validate.resources(manifest("service")) if found["kind"] == "Service"]
    (headless,) = [found["spec"] for found in services if found["spec"].get("clusterIP") == "None"]
    assert headless["publishNotReadyAddresses"] is True


def test_the_sidecar_starts_before_the_trainer_and_its_memory_counts_its_tmpfs():
    pod = only("sidecar", "Job")["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    assert (sidecar["restartPolicy"], "startupProbe" in sidecar) == ("Always", True)
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "gristmill-shared")["emptyDir"]
    assert (shared, sidecar["resources"]["limits"]["memory"]) == (
        {"medium": "Memory", "sizeLimit": "16384Mi"},
        "20480Mi",
    )
    users = {container["securityContext"]["runAsUser"] for container in [sidecar, *pod["containers"]]}
    assert len(users) == 1


def test_every_variable_that_manifests_set_is_a_setting_and_all_together_are_valid():
    for path in MANIFESTS:
        for resource in validate.resources(path.read_text(encoding="utf-8")):
            pod = resource.get("spec", {}).get("template", {}).get("spec", {})
            for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
                given = {one["name"]: one.get("value", "secret") for one in container.get("env", [])}
                if container["name"] == "gristmill":
                    given.pop("POD_IP", None)
                    Settings(**{name.removeprefix("GRISTMILL_").lower(): value for name, value in given.items()})


def test_values_take_settings_that_exist():
    schema = json.loads((DEPLOY / "helm/gristmill/values.schema.json").read_text(encoding="utf-8"))
    assert set(schema["properties"]["settings"]["properties"]) < set(Settings.model_fields)


def test_the_images_requirements_satisfy_the_package():
    pins = {}
    for line in (DEPLOY / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name.lower().replace("_", "-")] = version
    assert all(pins.values())
    assert "torch" not in pins
    for wanted in map(Requirement, requires("gristmill")):
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("service", "otel")):
            assert wanted.specifier.contains(pins[wanted.name.lower().replace("_", "-")]), wanted


def test_the_documentation_tells_every_value():
    values = yaml.safe_load((DEPLOY / "helm/gristmill/values.yaml").read_text(encoding="utf-8"))
    told = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert [name for name in values if f"`{name}" not in told] == []
