"""Checks rendered manifests against the strict schemas of Kubernetes 1.29 and the newest available version, against
further rules of the API server, and against the restricted profile of pod security: `validate.py FILE...`. Prints one
line per problem; exit status 1 if there are any.
"""

from __future__ import annotations

import json
import re
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

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"\+?[0-9]+(\.[0-9]+)?([mkMGTPE]|[KMGTPE]i|[eE][0-9]+)?")


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, like the strict validation of the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise yaml.YAMLError(f"{', '.join(twice)} given twice {node.start_mark}")
        return super().construct_mapping(node, deep)


def resources(text: str) -> list[dict[str, Any]]:
    return [resource for resource in yaml.load_all(text, _Loader) if resource]


def schema_errors(resource: dict[str, Any]) -> Iterator[str]:
    """Yields violations of the schemas, including unknown fields."""
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


def server_errors(resource: dict[str, Any]) -> Iterator[str]:
    """Yields violations of API server rules that are not in its schemas: names, quantities, ports, bounds."""
    metadata, spec = resource["metadata"], resource.get("spec", {})
    if len(metadata["name"]) > 253 or not _SUBDOMAIN.fullmatch(metadata["name"]):
        yield f"{metadata['name']!r} is no name"
    for path, value in _walk(resource):
        *_, above, name = ("", "", *path)
        if above in ("labels", "matchLabels") and not _LABEL_VALUE.fullmatch(str(value)):
            yield f"{'.'.join(path)}: {value!r} is no label's value"
        elif (above in ("requests", "limits") or name == "sizeLimit") and not _QUANTITY.fullmatch(str(value)):
            yield f"{'.'.join(path)}: {value!r} is no quantity"
        elif name in ("secretName", "claimName") and not _SUBDOMAIN.fullmatch(str(value)):
            yield f"{'.'.join(path)}: {value!r} is no name"
    if resource["kind"] == "Service":
        yield from _twice("port", [port["port"] for port in spec["ports"]])
        yield from _twice("name of a port", [port.get("name", "") for port in spec["ports"]])
    elif resource["kind"] == "HorizontalPodAutoscaler" and spec.get("minReplicas", 1) > spec["maxReplicas"]:
        yield f"minReplicas {spec['minReplicas']} is more than maxReplicas {spec['maxReplicas']}"
    for container in _containers(resource):
        yield from _twice("mountPath", [mount["mountPath"] for mount in container.get("volumeMounts", [])])
        volumes = {volume["name"] for volume in _pod(resource).get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"container {container['name']}: there is no volume {mount['name']}"


def _walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each scalar value with the path of keys that leads to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(inner, (*path, str(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, path)
    else:
        yield path, value


def _twice(kind: str, values: list[Any]) -> Iterator[str]:
    yield from (f"{kind} {value} given twice" for value in sorted({one for one in values if values.count(one) > 1}))


def _pod(resource: dict[str, Any]) -> dict[str, Any]:
    """Returns the pod that a resource is or creates; empty if it creates none."""
    spec: dict[str, Any] = resource.get("spec", {})
    if resource["kind"] != "Pod":
        spec = spec.get("template", {}).get("spec", {})
    return spec


def _containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    pod = _pod(resource)
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


def restricted_errors(resource: dict[str, Any]) -> Iterator[str]:
    """Yields violations of the restricted profile of pod security, and writable root file systems."""
    pod = _pod(resource)
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is set"
    for volume in pod.get("volumes", []):
        if kinds := set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']}: {', '.join(kinds)} is not permitted"
    around = pod.get("securityContext", {})
    for container in _containers(resource):
        context = container.get("securityContext", {})
        both = {**around, **context}
        wrong = {
            "runAsNonRoot is not true": both.get("runAsNonRoot") is not True,
            "runAsUser is 0": both.get("runAsUser") == 0,
            "privileged": context.get("privileged", False),
            "allowPrivilegeEscalation is not false": context.get("allowPrivilegeEscalation") is not False,
            "capabilities are not dropped": context.get("capabilities", {}).get("drop") != ["ALL"],
            "capabilities are added": bool(set(context.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}),
            "no seccomp profile": both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
            "its root may be written": context.get("readOnlyRootFilesystem") is not True,
            "a hostPort": any("hostPort" in port for port in container.get("ports", [])),
        }
        yield from (f"container {container['name']}: {what}" for what, is_so in wrong.items() if is_so)


def errors(text: str) -> list[str]:
    return [
        f"{resource['kind']} {resource['metadata']['name']}: {error}"
        for resource in resources(text)
        for check in (schema_errors, server_errors, restricted_errors)
        for error in check(resource)
    ]


def main(files: list[str]) -> int:
    problems = [f"{file}: {error}" for file in files for error in errors(Path(file).read_text(encoding="utf-8"))]
    print(
        "\n".join(
            [*problems, f"{len(files)} files, {len(problems)} errors against Kubernetes {' and '.join(VERSIONS)}"]
        )
    )
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
