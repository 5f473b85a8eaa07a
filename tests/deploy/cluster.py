"""As much of a Kubernetes API server as Helm's `lookup` asks: which kinds there are, and what secrets hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAMESPACE = "gristmill"
_KINDS = {
    "v1": {"secrets": "Secret", "services": "Service", "pods": "Pod"},
    "apps/v1": {"statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}


@contextmanager
def cluster(secrets: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The URL of a server whose namespace has these secrets, by name, with their values in base64; and nothing else."""
    answers = {**_discovery(), **{_path(name): _secret(name, data) for name, data in secrets.items()}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or missing).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _path(secret: str) -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/secrets/{secret}"


def _secret(name: str, data: Mapping[str, str]) -> dict[str, Any]:
    return {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}


def _discovery() -> dict[str, Any]:
    groups = [version.rpartition("/")[0] for version in _KINDS if "/" in version]
    versions = {group: {"groupVersion": f"{group}/v1", "version": "v1"} for group in groups}
    described = [{"name": name, "versions": [one], "preferredVersion": one} for name, one in versions.items()]
    resources = {
        f"/apis/{version}" if "/" in version else f"/api/{version}": {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]} for name, kind in kinds.items()
            ],
        }
        for version, kinds in _KINDS.items()
    }
    return {
        "/version": {"major": "1", "minor": "29", "gitVersion": "v1.29.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": described},
        **resources,
    }
