"""Checks rendered manifests strictly, against Kubernetes 1.29 and the newest schemas at hand, and for the restricted
profile of pod security: `validate.py FILE...`. Says what is wrong, a line each; exit status 1 if anything is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

VERSIONS = ("1.29", kubernetes_validate.latest_version())
CUSTOM = Path(__file__).with_name("schemas.json")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


class _Loader(yaml.SafeLoader):
    """Refuses a name that is given twice, as the API server does under strict validation."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise yaml.YAMLError(f"{', '.join(twice)} given twice {node.start_mark}")
        return super().construct_mapping(node, deep)


def resources(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.load_all(text, _Loader) if found]


def schema_errors(resource: dict[str, Any]) -> Iterator[str]:
    """Yields what the schemas refuse, unknown fields too."""
    custom = json.loads(CUSTOM.read_text(encoding="utf-8"))
    if resource["kind"] in custom["kinds"]:
        schema = {**custom["kinds"][resource["kind"]], "$defs": custom["$defs"]}
        for error in jsonschema.Draft202012Validator(schema).iter_errors(resource):
            yield f"{error.json_path}: {error.message}"
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {error.json_path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"Kubernetes {version}: {error.message}"


def restricted_errors(resource: dict[str, Any]) -> Iterator[str]:
    """Yields what the restricted profile of pod security refuses, and a root that may be written, which we refuse."""
    pod = resource["spec"] if resource["kind"] == "Pod" else resource.get("spec", {}).get("template", {}).get("spec")
    if pod is None:
        return
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is set"
    for volume in pod.get("volumes", []):
        if kinds := set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']}: {', '.join(kinds)} is not permitted"
    around = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        both = {**around, **own}
        wrong = {
            "runAsNonRoot is not true": both.get("runAsNonRoot") is not True,
            "runAsUser is 0": both.get("runAsUser") == 0,
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation is not false": own.get("allowPrivilegeEscalation") is not False,
            "capabilities are not dropped": own.get("capabilities", {}).get("drop") != ["ALL"],
            "capabilities are added": bool(set(own.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}),
            "no seccomp profile": both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
            "its root may be written": own.get("readOnlyRootFilesystem") is not True,
            "a hostPort": any("hostPort" in port for port in container.get("ports", [])),
        }
        yield from (f"container {container['name']}: {what}" for what, is_so in wrong.items() if is_so)


def errors(text: str) -> list[str]:
    return [
        f"{resource['kind']} {resource['metadata']['name']}: {error}"
        for resource in resources(text)
        for check in (schema_errors, restricted_errors)
        for error in check(resource)
    ]


def main(files: list[str]) -> int:
    found = [f"{file}: {error}" for file in files for error in errors(Path(file).read_text(encoding="utf-8"))]
    print("\n".join([*found, f"{len(files)} files, {len(found)} errors against Kubernetes {' and '.join(VERSIONS)}"]))
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
