"""The manifests that the chart's examples render to, and the check that judges them."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gristmill_service.settings import Settings
from tests.deploy.charts import CHART, DEPLOY, EXAMPLES, ROOT, only, pod, validate

NAMES = [*EXAMPLES, "sidecar"]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each manifest's text by its name, as `make manifests` writes it."""
    directory = tmp_path_factory.mktemp("manifests")
    done = subprocess.run(
        [DEPLOY / "render.sh", directory], capture_output=True, text=True, timeout=60, check=False, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def test_every_example_is_rendered(manifests: dict[str, str]) -> None:
    assert sorted(manifests) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_valid_and_of_the_restricted_profile(manifests: dict[str, str], name: str) -> None:
    assert validate.resources(manifests[name])
    assert validate.errors(manifests[name]) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("service", "serviceName:", "serviceNam:", "serviceNam"),
        ("service", "endpoints:", "endpoint:", "endpoint"),
        ("service", "expr:", "expression:", "expression"),
        ("service", "runAsNonRoot: true", "runAsNonRoot: false", "runAsNonRoot is not true"),
        ("service", "drop: [ALL]", "drop: [KILL]", "capabilities are not dropped"),
        ("service", "allowPrivilegeEscalation: false", "privileged: true", "allowPrivilegeEscalation is not false"),
        ("sidecar", "restartPolicy: Always", "restartPolice: Always", "restartPolice"),
        ("sidecar", "emptyDir: {}", "hostPath: {path: /}", "hostPath is not permitted"),
        ("service", "rotationPolicy: Always", "rotationPolicy: Sometimes", "Sometimes"),
        ("service", "port: 8080, targetPort", "port: 50051, targetPort", "port 50051 given twice"),
        ("service", "minReplicas: 3", "minReplicas: 9", "minReplicas 9 is more than maxReplicas 8"),
        ("service", "memory: 4096Mi", "memory: 4096MiB", "'4096MiB' is no quantity"),
        ("service", "secretName: gristmill-tokens", "secretName: My_Tokens", "'My_Tokens' is no name"),
        ("service", "{name: tokens, mountPath", "{name: token, mountPath", "there is no volume token"),
        ("service", "mountPath: /etc/gristmill/tls", "mountPath: /etc/gristmill/tokens", "given twice"),
        ("service", "managed-by: Helm", 'managed-by: "a b"', "is no label's value"),
    ],
)
def test_what_is_wrong_is_reported(manifests: dict[str, str], name: str, before: str, after: str, message: str) -> None:
    assert before in manifests[name]
    assert message in "\n".join(validate.errors(manifests[name].replace(before, after)))


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="kind given twice"):
        validate.resources("kind: A\nkind: B\n")


def test_trainers_reach_replicas_that_are_not_ready(manifests: dict[str, str]) -> None:
    headless = only(validate.resources(manifests["service"]), "Service", "-replicas")["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)


def test_the_sidecar_starts_before_the_trainer_and_its_memory_counts_its_tmpfs(manifests: dict[str, str]) -> None:
    trainer = pod(only(validate.resources(manifests["sidecar"]), "Job"))
    (sidecar,) = trainer["initContainers"]
    assert (sidecar["restartPolicy"], "startupProbe" in sidecar) == ("Always", True)
    shared = next(volume for volume in trainer["volumes"] if volume["name"] == "gristmill-shared")["emptyDir"]
    assert (shared, sidecar["resources"]["limits"]["memory"]) == (
        {"medium": "Memory", "sizeLimit": "16384Mi"},
        "20480Mi",
    )
    users = {container["securityContext"]["runAsUser"] for container in [sidecar, *trainer["containers"]]}
    assert len(users) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_that_a_manifest_sets_is_a_setting_and_all_together_are_valid(
    manifests: dict[str, str], name: str
) -> None:
    pods = [pod(resource) for resource in validate.resources(manifests[name])]
    containers = [one for spec in pods for one in (*spec.get("initContainers", []), *spec.get("containers", []))]
    (ours,) = [container for container in containers if container["name"] == "gristmill"]
    variables = {
        one["name"]: one.get("value", "secret") for one in ours["env"] if one["name"] not in ("POD_IP", "POD_NAME")
    }
    assert "GRISTMILL_GRPC_ADDRESS" in variables
    Settings(**{name.removeprefix("GRISTMILL_").lower(): value for name, value in variables.items()})


def test_values_take_settings_that_exist() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    described = Settings.model_json_schema()["properties"]
    for name, property_ in schema["properties"]["settings"]["properties"].items():
        assert name in described
        for bound in ("enum", "minimum", "maximum"):
            assert property_.get(bound) == described[name].get(bound), name


def pins() -> dict[str, Requirement]:
    """The packages that the image installs, by name."""
    text = (DEPLOY / "requirements.txt").read_text(encoding="utf-8")
    requirements = map(Requirement, re.findall(r"^([\w.-]+==[^\\]+?) \\$", text, re.MULTILINE))
    return {canonicalize_name(pin.name): pin for pin in requirements}


@pytest.mark.parametrize("file", ["requirements.txt", *(f"{of}-requirements.txt" for of in ("build", "audit", "helm"))])
def test_whatever_the_image_and_a_release_install_has_hashes(file: str) -> None:
    lines = (DEPLOY / file).read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("    --hash=sha256:")]
    assert pinned
    assert all(line.endswith(" \\") and "==" in line for line in pinned)


def test_the_images_requirements_are_exact_and_satisfy_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert "torch" not in pins()
    for wanted in map(Requirement, [*project["dependencies"], *extras["service"], *extras["otel"], *extras["jwt"]]):
        (exact,) = pins()[canonicalize_name(wanted.name)].specifier
        assert exact.operator == "=="
        assert wanted.specifier.contains(exact.version), wanted


@pytest.mark.parametrize("version", ["3.11.0", "3.11.9", "3.12.0", "3.13.0"])
def test_the_images_requirements_are_complete(version: str) -> None:
    environment = {"extra": "", "python_full_version": version, "python_version": version.rpartition(".")[0]}
    for name, pin in pins().items():
        if pin.marker is None or pin.marker.evaluate(environment):
            # One for another Python than this is not installed here.
            with suppress(PackageNotFoundError):
                for wanted in map(Requirement, requires(name) or []):
                    if wanted.marker is None or wanted.marker.evaluate(environment):
                        assert canonicalize_name(wanted.name) in pins(), f"{name} needs {wanted}"


def test_the_trainers_job_of_the_documentation_is_valid() -> None:
    [text] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL | re.MULTILINE)
    job = only(validate.resources(text), "Job")
    assert [*validate.schema_errors(job), *validate.server_errors(job)] == []
    (container,) = pod(job)["containers"]
    assert {one["name"] for one in container["env"]} == {"GRISTMILL_ADDRESS", "GRISTMILL_TOKEN", "GRISTMILL_TLS"}


def test_the_documentation_names_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert [name for name in values if f"`{name}" not in guide] == []


def compose_services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text(encoding="utf-8"))["services"]
    return services


def test_the_compose_file_is_open_only_when_somebody_agrees_and_only_to_this_machine() -> None:
    services = compose_services()
    for name in ("gristmill-1", "gristmill-2"):
        assert services[name]["environment"]["GRISTMILL_INSECURE"].startswith("${GRISTMILL_INSECURE:?set it to true")
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_process_of_the_compose_file_is_confined() -> None:
    services = compose_services()
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    # gristmill's own image names its user; Valkey's drops to one only where its command is valkey-server itself.
    assert services["redis"]["user"] == "999:999"
    assert Path(DEPLOY.parent / "Dockerfile").read_text(encoding="utf-8").count("\nUSER 10001:10001\n") == 1
