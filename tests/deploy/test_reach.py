"""Who can reach which port of the chart's pods: said aloud, agreed to where it is everyone, and kept to."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gristmill_service.settings import Settings
from tests.deploy.charts import BUNDLED, JOURNAL, OPEN, REDIS, ROOT, notes, only, pod, refusal, render
from tests.on_loop import Service

TOKENS, TLS = ("--set", "access.tokensSecret=tokens"), ("--set", "access.tlsSecret=tls")
NO_POLICY = ("--set", "networkPolicy.enabled=false")
SIDECAR = ("--set", "mode=sidecar")
NETWORK = ("--set", "mode=sidecar,sidecar.listen=network", *OPEN)
TRAINER = ROOT / "deploy/helm/examples/trainer"


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            BUNDLED,
            ["everyone who can reach the ports could read, change and delete every run", "access.insecure: true"],
        ),
        ((*BUNDLED, *TLS), ["access.tokensSecret is empty", "access.insecure: true"]),
        ((*BUNDLED, *TOKENS), ["tokens and rows would be sent unencrypted", "set access.tlsSecret"]),
        ((*REDIS, *TOKENS, *TLS), ["access.insecure has no effect"]),
        (("--set", "store=journal,replicas=1"), ["access.insecure: true"]),
        (("--set", "mode=sidecar,sidecar.listen=network"), ["access.insecure: true", "sidecar.listen: socket"]),
        ((*SIDECAR, *OPEN), ["access.insecure is for sidecar.listen: network"]),
    ],
)
def test_what_would_be_open_is_refused_until_somebody_agrees(flags: tuple[str, ...], messages: list[str]) -> None:
    refused = refusal(*flags)
    assert all(message in refused for message in messages), refused


WITHOUT_TOKENS = "no call needs a token: they can read, change and delete every run"
CLIENTS = "Pods that networkPolicy.clients selects can reach gRPC and HTTP (ports 50051 and 8080), where "
SCRAPERS = "pods that networkPolicy.prometheus selects can reach probes and metrics (port 8081), and no other port."
EVERYONE = (
    "Without a network policy, every pod of the cluster, and everyone whom its network lets in, can reach probes and "
    "metrics (port 8081){redis}, and gRPC and HTTP (ports 50051 and 8080), where "
)
TRAINERS_POD = "Only containers of the trainer's pod can make calls; "
EVERY_POD = "without a network policy, every pod of the cluster can reach probes and metrics (port 8081)."


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (REDIS, f"{CLIENTS}{WITHOUT_TOKENS}; {SCRAPERS}"),
        ((*REDIS, *TLS), f"{CLIENTS}{WITHOUT_TOKENS}; {SCRAPERS}"),
        ((*REDIS, *TOKENS), f"{CLIENTS}every call needs a token, which is sent unencrypted; {SCRAPERS}"),
        ((*BUNDLED, *TOKENS, *TLS), f"{CLIENTS}every call needs a token; {SCRAPERS}"),
        ((*JOURNAL, *NO_POLICY), f"{EVERYONE.format(redis='')}{WITHOUT_TOKENS}."),
        (
            (*BUNDLED, *TOKENS, *TLS, *NO_POLICY),
            EVERYONE.format(redis=", the bundled Redis (port 6379), which needs its password")
            + "every call needs a token.",
        ),
        (
            (*REDIS, "--set", "networkPolicy.clients=null,networkPolicy.prometheus=null"),
            "Only pods of this release can reach gRPC and HTTP (ports 50051 and 8080), where "
            f"{WITHOUT_TOKENS}; no other pod can reach any port.",
        ),
        (SIDECAR, f"{TRAINERS_POD}{SCRAPERS}"),
        ((*SIDECAR, *NO_POLICY), f"{TRAINERS_POD}{EVERY_POD}"),
        (NETWORK, f"{CLIENTS}{WITHOUT_TOKENS}; {SCRAPERS}"),
    ],
)
def test_the_notes_say_in_one_line_who_reaches_what(flags: tuple[str, ...], line: str) -> None:
    printed = notes(*flags)
    assert printed.strip().splitlines()[-1] == line
    # Clients send a token in plain text only with this setting.
    assert ("GRISTMILL_TLS=0" in printed) == ("sent unencrypted" in line)


def test_the_notes_of_the_trainers_example_say_it_too() -> None:
    assert notes(chart=TRAINER).strip() == f"{TRAINERS_POD}{SCRAPERS}"


def admitted(resources: list[dict[str, Any]]) -> dict[str, set[int]]:
    """The ports that the network policy opens to clients, to Prometheus, and to the release's own pods."""
    ports: dict[str, set[int]] = {}
    for rule in only(resources, "NetworkPolicy", "gristmill")["spec"]["ingress"]:
        for peer in rule["from"]:
            (labels,) = [labels for selector in peer.values() for labels in selector.values()]
            (who,) = {
                name
                for name, label in {
                    "clients": "gristmill.io/client",
                    "prometheus": "kubernetes.io/metadata.name",
                    "release": "app.kubernetes.io/component",
                }.items()
                if label in labels
            }
            ports.setdefault(who, set()).update(port["port"] for port in rule["ports"])
    return ports


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (REDIS, {"clients": {50051, 8080}, "release": {50051, 8080}, "prometheus": {8081}}),
        (SIDECAR, {"prometheus": {8081}}),
        (NETWORK, {"clients": {50051, 8080}, "prometheus": {8081}}),
    ],
)
def test_prometheus_reaches_the_port_of_probes_and_metrics_alone(
    flags: tuple[str, ...], expected: dict[str, set[int]]
) -> None:
    resources = render(*flags, "--set", "monitoring.monitor=true")
    assert admitted(resources) == expected
    kind, endpoints = ("ServiceMonitor", "endpoints") if flags == REDIS else ("PodMonitor", "podMetricsEndpoints")
    (scraped,) = only(resources, kind)["spec"][endpoints]
    assert (scraped["port"], scraped["path"]) == ("probes", "/metrics")
    if flags == REDIS:
        ports = {port["name"]: port for port in only(resources, "Service", "gristmill")["spec"]["ports"]}
        assert (ports["probes"]["port"], ports["probes"]["targetPort"]) == (8081, "probes")


def container(*flags: str) -> dict[str, Any]:
    """The container of gristmill: of a service, or of the example's sidecar."""
    if "mode=sidecar" in ",".join(flags):
        flags = tuple(flag if flag == "--set" else f"gristmill.{flag.replace(',', ',gristmill.')}" for flag in flags)
        (sidecar,) = pod(only(render(*flags, chart=TRAINER), "Job"))["initContainers"]
        return dict(sidecar)
    (service,) = pod(only(render(*flags), "StatefulSet", "gristmill"))["containers"]
    return dict(service)


def settings_of(container: dict[str, Any]) -> dict[str, str]:
    """The settings in a container's environment."""
    variables = {one["name"].removeprefix("GRISTMILL_").lower(): one.get("value", "secret") for one in container["env"]}
    return {name: value for name, value in variables.items() if name not in ("pod_ip", "pod_name")}


@pytest.mark.parametrize(
    ("flags", "addresses", "ports"),
    [
        (SIDECAR, ["unix:/run/gristmill/grpc.sock", "127.0.0.1:8080", "0.0.0.0:8081"], {"probes"}),
        (NETWORK, ["0.0.0.0:50051", "0.0.0.0:8080", "0.0.0.0:8081"], {"grpc", "http", "probes"}),
        (JOURNAL, ["0.0.0.0:50051", "0.0.0.0:8080", "0.0.0.0:8081"], {"grpc", "http", "probes"}),
        ((*BUNDLED, *TOKENS, *TLS), ["0.0.0.0:50051", "0.0.0.0:8080", "0.0.0.0:8081"], {"grpc", "http", "probes"}),
    ],
)
def test_a_container_listens_where_it_is_meant_to(
    flags: tuple[str, ...], addresses: list[str], ports: set[str]
) -> None:
    ours = container(*flags)
    variables = settings_of(ours)
    assert [variables[f"{name}_address"] for name in ("grpc", "http", "probe")] == addresses
    assert {port["name"] for port in ours["ports"]} == ports
    assert ("insecure" in variables) == (flags in (NETWORK, JOURNAL))
    probes = [probe["httpGet"] for name, probe in ours.items() if name.endswith("Probe")]
    assert {probe["port"] for probe in probes} == {"probes"}
    assert {probe.get("scheme") for probe in probes} == {"HTTPS" if TLS[1] in flags else None}
    # It refuses to start otherwise.
    assert Settings.model_validate(variables).probe_address == "0.0.0.0:8081"


def test_only_probes_and_metrics_of_a_sidecar_answer_beyond_its_loopback_address(tmp_path: Path) -> None:
    rendered = settings_of(container(*SIDECAR))
    free = {name: f"{rendered[name].rpartition(':')[0]}:0" for name in ("http_address", "probe_address")}
    directories = {"journal_dir": tmp_path / "journal", "shared_memory_dir": tmp_path}
    here = {**rendered, **free, **directories, "grpc_address": f"unix:{tmp_path}/grpc.sock"}
    service = Service(Settings.model_validate(here))
    service.start()
    try:
        http, probes = (urlsplit(url).port for url in (service.http_url, str(service.probe_url)))
        assert httpx.get(f"http://127.0.0.1:{http}/v1/runs", trust_env=False).status_code == 200
        # Another address of this machine is to it as that of another pod.
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.2:{http}/v1/runs", trust_env=False)
        paths = ("readyz", "metrics", "v1/runs")
        answers = [httpx.get(f"http://127.0.0.2:{probes}/{path}", trust_env=False).status_code for path in paths]
        assert answers == [200, 200, 404]
    finally:
        service.stop()
