"""Checks whether replicas answer calls over gRPC and HTTP: `check_replicas.py HOST,HOST GRPC_PORT HTTP_PORT`.

`helm test` runs it in a pod with the service's image. GRISTMILL_CA_FILE: the authority of the replicas' certificates,
if they use TLS. The calls need no token. Prints one line per replica; exit status 1 if a replica does not answer.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 10.0


def problem_of(host: str, grpc_port: int, http_port: int, ca_file: str | None) -> str:
    """Returns why the replica does not answer calls; empty if it does."""
    credentials = None if ca_file is None else grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
    place = f"{host}:{grpc_port}"
    channel = grpc.insecure_channel(place) if credentials is None else grpc.secure_channel(place, credentials)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"gRPC: {error.code().name}: {error.details()}"
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return f"gRPC: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"
    url = f"{'http' if ca_file is None else 'https'}://{host}:{http_port}/readyz"
    context = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"{url}: {error.code}: {error.read(400).decode(errors='replace')}"
    except OSError as error:
        return f"{url}: {error}"


def main(hosts: str, grpc_port: str, http_port: str) -> int:
    problems = {
        host: problem_of(host, int(grpc_port), int(http_port), os.environ.get("GRISTMILL_CA_FILE"))
        for host in hosts.split(",")
    }
    for host, problem in problems.items():
        print(f"{host}: {problem or 'answers calls'}")
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
