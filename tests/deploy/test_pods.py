"""What the chart's pods are given: images, placing, volumes, certificates, and the test that `helm test` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.deploy.charts import BUNDLED, CHART, REDIS, ROOT, helm, only, pod, render, validate
from tests.deploy.cluster import cluster
from tests.on_loop import Service

CHECK = CHART / "files/check_replicas.py"
TLS = ("--set", "access.tokensSecret=tokens,access.tlsSecret=tls,access.certificate.issuer=internal")


def test_a_digest_says_which_image_is_run() -> None:
    digest = f"sha256:{'0' * 64}"
    resources = render(*REDIS, "--set", f"image.repository=a/b,image.digest={digest}")
    (container,) = pod(only(resources, "StatefulSet", "gristmill"))["containers"]
    assert container["image"] == f"a/b@{digest}"


def test_pods_are_placed_as_configured() -> None:
    spread = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    flags = ("--set", "priorityClassName=high", "--set-json", f"topologySpreadConstraints=[{json.dumps(spread)}]")
    resources = render(*REDIS, *flags)
    spec = pod(only(resources, "StatefulSet", "gristmill"))
    (placed,) = spec["topologySpreadConstraints"]
    assert placed["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "service"
    assert {name: placed[name] for name in spread} == spread
    assert spec["priorityClassName"] == pod(only(resources, "StatefulSet", "-redis"))["priorityClassName"] == "high"


EXTRA: dict[str, list[dict[str, Any]]] = {
    "extraVolumes": [{"name": "mine", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "mine", "mountPath": "/m"}],
}


def test_the_service_mounts_volumes_of_ones_own() -> None:
    flags = [one for name, value in EXTRA.items() for one in ("--set-json", f"{name}={json.dumps(value)}")]
    spec = pod(only(render(*REDIS, *flags), "StatefulSet", "gristmill"))
    assert spec["volumes"] == EXTRA["extraVolumes"]
    assert spec["containers"][0]["volumeMounts"] == EXTRA["extraVolumeMounts"]


def test_the_sidecar_mounts_volumes_of_ones_own() -> None:
    flags = [one for name, value in EXTRA.items() for one in ("--set-json", f"gristmill.{name}={json.dumps(value)}")]
    spec = pod(only(render(*flags, chart=ROOT / "deploy/helm/examples/trainer"), "Job"))
    assert EXTRA["extraVolumes"][0] in spec["volumes"]
    assert EXTRA["extraVolumeMounts"][0] in spec["initContainers"][0]["volumeMounts"]


def test_cert_manager_makes_a_certificate_for_every_name_that_is_called() -> None:
    resources = render(*BUNDLED, *TLS, "--set", "access.certificate.dnsNames[0]=mill.example")
    spec = only(resources, "Certificate")["spec"]
    assert spec["secretName"] == "tls"
    names = {"gristmill.gristmill.svc", "*.gristmill-replicas.gristmill.svc", "mill.example"}
    assert set(spec["dnsNames"]) == names
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert spec["issuerRef"]["name"] == "internal"


def checksums(secrets: dict[str, dict[str, str]], *flags: str) -> dict[str, str | None]:
    """Each workload's checksum of secrets in a cluster that has these."""
    with cluster(secrets) as url:
        server = ("--dry-run=server", "--kube-apiserver", url, "--disable-openapi-validation")
        done = helm("template", "gristmill", str(CHART), "-n", "gristmill", *server, *flags)
    assert done.returncode == 0, done.stderr
    workloads = [one for one in validate.resources(done.stdout) if one["kind"] == "StatefulSet"]
    return {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"].get("annotations", {}).get("checksum/secrets")
        for one in workloads
    }


def test_an_upgrade_starts_new_pods_where_a_secret_that_they_read_once_changed() -> None:
    before, after = ({"secret": {"password": word}} for word in ("b25l", "dHdv"))
    one, same, other = (checksums(secrets, *REDIS) for secrets in (before, before, after))
    assert one == same
    assert None not in one.values()
    assert all(one[name] != other[name] for name in ("gristmill", "gristmill-redis"))
    # Certificates are read again by themselves.
    renewed = checksums({**before, "tls": {"tls.crt": "b25l"}}, *REDIS, "--set", "access.tlsSecret=tls")
    assert renewed == one


def check(hosts: str, *ports: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHECK.read_text(), hosts, *map(str, ports)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def port(address: str) -> str:
    return address.rpartition(":")[2]


def test_helms_test_passes_where_replicas_take_calls(service: Service) -> None:
    done = check("127.0.0.1,localhost", port(service.grpc_address), port(service.http_url))
    assert (done.returncode, done.stdout) == (0, "127.0.0.1: answers calls\nlocalhost: answers calls\n")


def test_helms_test_fails_and_says_why_where_one_does_not(service: Service) -> None:
    done = check("127.0.0.1", 1, port(service.http_url))
    assert (done.returncode, done.stderr) == (1, "")
    assert "127.0.0.1: gRPC: UNAVAILABLE" in done.stdout


def test_the_test_asks_every_replica_by_the_names_of_the_certificate() -> None:
    resources = render(*BUNDLED, *TLS)
    made = only(resources, "Pod", "-test")
    (container,) = made["spec"]["containers"]
    hosts = "gristmill-0.gristmill-replicas.gristmill.svc,gristmill-1.gristmill-replicas.gristmill.svc"
    assert container["args"] == [hosts, "50051", "8080"]
    assert container["command"] == ["python", "-c", CHECK.read_text()]
    assert {"name": "GRISTMILL_CA_FILE", "value": "/etc/gristmill/tls/ca.crt"} in container["env"]
    policy = only(resources, "NetworkPolicy", "gristmill")["spec"]["ingress"]
    let_in = [peer["podSelector"]["matchLabels"] for rule in policy for peer in rule["from"] if "podSelector" in peer]
    labels = made["metadata"]["labels"].items()
    assert any(set(wanted.items()) <= set(labels) for wanted in let_in)
