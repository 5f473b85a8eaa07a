"""The chart's values: each does what it says, or is refused before anything is made in a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.charts import BUNDLED, CHART, JOURNAL, OPEN, REDIS, ROOT, only, pod, refusal, render

EGRESS = ("--set-json", 'networkPolicy.egress=[{"ports":[{"port":6379}]}]')
OWN_REDIS = ("--set", "redis.url=redis://a:6379/0", *EGRESS, *OPEN)


def test_an_empty_password_keeps_the_bundled_redis_from_starting(tmp_path: Path) -> None:
    server = tmp_path / "valkey-server"
    server.write_text("#!/bin/sh\necho started\n")
    server.chmod(0o755)
    (redis,) = pod(only(render(*REDIS), "StatefulSet", "-redis"))["containers"]

    def started(password: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": password}
        command = [*redis["command"], *redis["args"]]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert started("word").stdout == "started\n"
    refused = started("")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the secret's key password is empty" in refused.stderr


def test_a_new_version_of_the_chart_does_not_restart_the_bundled_redis(tmp_path: Path) -> None:
    newer = shutil.copytree(CHART, tmp_path / "gristmill")
    text = (newer / "Chart.yaml").read_text()
    assert "version: 0.1.0" in text
    (newer / "Chart.yaml").write_text(text.replace("0.1.0", "0.2.0"))
    before, after = (only(render(*REDIS, chart=chart), "StatefulSet", "-redis") for chart in (CHART, newer))
    assert before["metadata"]["labels"] != after["metadata"]["labels"]
    assert before["spec"]["template"] == after["spec"]["template"]


def test_the_service_gets_environment_variables_of_ones_own() -> None:
    resources = render(*REDIS, "--set", "extraEnv[0].name=OTEL_EXPORTER_OTLP_ENDPOINT,extraEnv[0].value=http://a:4317")
    (container,) = pod(only(resources, "StatefulSet", "gristmill"))["containers"]
    assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://a:4317"} in container["env"]


def test_the_sidecar_gets_environment_variables_of_ones_own() -> None:
    flags = ("--set", "gristmill.extraEnv[0].name=A,gristmill.extraEnv[0].value=b")
    trainer = only(render(*flags, chart=ROOT / "deploy/helm/examples/trainer"), "Job")
    (sidecar,) = pod(trainer)["initContainers"]
    assert {"name": "A", "value": "b"} in sidecar["env"]


def test_alerts_lead_to_the_runbook_where_it_is_served() -> None:
    url = "https://docs.example/runbook"
    rule = only(render(*REDIS, "--set", f"monitoring.rules=true,monitoring.runbookUrl={url}"), "PrometheusRule")
    annotations = [one["annotations"] for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert annotations
    assert all(one["runbook_url"].startswith(f"{url}#") and "runbook" not in one for one in annotations)


def test_without_its_url_no_alert_claims_to_have_one() -> None:
    rule = only(render(*REDIS, "--set", "monitoring.rules=true"), "PrometheusRule")
    annotations = [one["annotations"] for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert annotations
    assert all(one["runbook"].startswith("docs/runbook.md#") and "runbook_url" not in one for one in annotations)


def test_a_released_charts_alerts_lead_to_the_runbook_of_its_version(tmp_path: Path) -> None:
    released = shutil.copytree(CHART, tmp_path / "gristmill")
    with (released / "Chart.yaml").open("a") as chart:
        chart.write("sources: [https://code.example/gristmill]\n")
    rule = only(render(*REDIS, "--set", "monitoring.rules=true", chart=released), "PrometheusRule")
    urls = [
        one["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for one in group["rules"][:1]
        if "alert" in one
    ]
    assert urls
    assert all(url.startswith("https://code.example/gristmill/blob/v0.1.0/docs/runbook.md#") for url in urls)


@pytest.mark.parametrize(("mode", "recorded"), [("service", ["gristmill_queue_fill"]), ("sidecar", [])])
def test_the_fill_is_recorded_only_where_something_scales_by_it(mode: str, recorded: list[str]) -> None:
    store = REDIS if mode == "service" else ()
    rule = only(render(*store, "--set", f"mode={mode},monitoring.rules=true"), "PrometheusRule")
    assert [one["record"] for group in rule["spec"]["groups"] for one in group["rules"] if "record" in one] == recorded


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*REDIS, "--set", "ports.grpc=8080"), "are 8080, 8080, 8081; set three different ports"),
        ((*REDIS, "--set", "ports.probes=50051"), "set three different ports"),
        (("--set", "mode=sidecar,ports.http=8081"), "set three different ports"),
        # As values of an earlier version are with `helm upgrade --reuse-values`.
        ((*REDIS, "--set", "ports.probes=null"), "'probes'"),
        ((*REDIS, "--set", "autoscaling.minReplicas=9"), "autoscaling.minReplicas is more than"),
        ((*REDIS, "--set", "terminationGracePeriodSeconds=30"), "terminationGracePeriodSeconds is 30"),
        ((*REDIS, "--set", "settings.shutdown_grace_s=120"), "settings.shutdown_grace_s is 120"),
        ((*REDIS, *OWN_REDIS), "redis.url and redis.bundled.enabled are both set"),
        ((*OPEN, "--set", "redis.url=redis://a:6379/0"), "networkPolicy.egress is empty"),
        ((*JOURNAL, "--set", "autoscaling.enabled=true"), "autoscaling.enabled: false"),
        ((*JOURNAL, *REDIS), "store: journal uses no Redis"),
        ((*JOURNAL, "--set", "replicas=2"), "store: journal is for one pod"),
        ((*REDIS, "--set", "settings.log_format=jsn"), "log_format"),
        ((*REDIS, "--set", "disruptionBudget.maxUnavailable=150%"), "maxUnavailable"),
        ((*REDIS, "--set", "monitoring.runbookUrl=docs/runbook.md"), "runbookUrl"),
        ((*REDIS, "--set", "redis.bundled.storage=24GB"), "storage"),
        ((*REDIS, "--set", "autoscaling.target=70%"), "target"),
        (("--set", "redis.bundled.enabled=true,redis.passwordSecret=My_Secret"), "passwordSecret"),
        ((*REDIS, "--set-json", 'podLabels={"app.kubernetes.io/name":"mine"}'), "invalid propertyName 'app"),
        ((*REDIS, "--set-json", 'podLabels={"team":"a b"}'), "podLabels"),
        ((*JOURNAL, "--set", "redis.url=redis://a:6379/0"), "store: journal uses no Redis"),
        ((*JOURNAL, "--set", "settings.lease_s=3"), "settings.lease_s is for store: redis"),
        ((*REDIS, "--set", "settings.journal_fsync=always"), "settings.journal_fsync is for store: journal"),
        ((*REDIS, "--set", "settings.lease_s=0.1"), "lease_s"),
        ((*REDIS, "--set", "settings.max_row_bytes=lots"), "max_row_bytes"),
        ((*REDIS, "--set", "redis.caSecret=ca"), "the bundled Redis does not support TLS"),
        ((*OWN_REDIS, "--set", "redis.caSecret=ca"), "use rediss://"),
        ((*REDIS, "--set", "settings.jwks=/keys"), "settings.jwks needs access.tokensSecret"),
        (
            (*REDIS, "--set", "settings.proxy_user_header=X-User"),
            "settings.proxy_user_header needs access.tokensSecret",
        ),
        ((*REDIS, "--set", "settings.jwks=https://a,access.tokensSecret=a"), "cannot reach settings.jwks"),
        ((*REDIS, "--set", "settings.tls_client_ca_file=/ca.crt"), "tls_client_ca_file"),
        ((*REDIS, "--set", "access.certificate.issuer=ca"), "access.certificate.issuer needs access.tlsSecret"),
        ((*REDIS, "--set", "access.tlsSecret=a..b"), "tlsSecret"),
        ((*REDIS, "--set", "image.digest=latest"), "digest"),
        ((*REDIS, "--set", "image.repository=Me/Mine"), "repository"),
        ((*REDIS, "--set", "resources.cpu=two"), "cpu"),
        ((*REDIS, "--set", "monitoring.interval=15"), "interval"),
        ((*REDIS, "--set-json", 'tolerations=[{"operator":"Equals"}]'), "operator"),
        ((*REDIS, "--set-json", 'extraEnv=[{"name":"1A"}]'), "extraEnv"),
        ((*REDIS, "--set-json", 'extraEnv=[{"name":"GRISTMILL_STORE","value":"memory"}]'), "extraEnv"),
        ((*REDIS, "--set-json", 'extraVolumeMounts=[{"name":"a","mountPath":"/a"}]'), "there is no volume a"),
        ((*REDIS, "--set-json", 'extraVolumes=[{"name":"journal","emptyDir":{}}]'), "a volume of the chart itself"),
        ((*REDIS, "--set-json", 'topologySpreadConstraints=[{"maxSkew":0}]'), "topologySpreadConstraints"),
        ((*BUNDLED, "--set", "mode=sidecar"), "redis is for mode: service"),
        (("--set", "mode=sidecar,autoscaling.enabled=true"), "autoscaling is for mode: service"),
        (("--set", "mode=sidecar,access.tlsSecret=tls"), "access is for mode: service"),
    ],
)
def test_values_that_would_not_do_what_they_say_are_refused(flags: tuple[str, ...], message: str) -> None:
    assert message in refusal(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        OWN_REDIS,
        ("--set", "redis.url=redis://a:6379/0,networkPolicy.enabled=false", *OPEN),
        REDIS,
        (*REDIS, "--set", "redis.bundled.storage=1.5Ti", "--set-json", 'podLabels={"team":"a"}'),
        (*JOURNAL, "--set", "journal.size=500G"),
    ],
)
def test_values_that_do_are_rendered(flags: tuple[str, ...]) -> None:
    assert only(render(*flags), "StatefulSet", "gristmill")


ACCESS = ("--set", "access.tokensSecret=tokens,access.tlsSecret=tls")


def test_with_certificates_and_tokens_nothing_is_left_open() -> None:
    resources = render(*BUNDLED, *ACCESS, "--set", "access.scrapeTokenSecret=scraper,monitoring.monitor=true")
    spec = pod(only(resources, "StatefulSet", "gristmill"))
    (container,) = spec["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert "GRISTMILL_INSECURE" not in variables
    host = "$(POD_NAME).gristmill-replicas.gristmill.svc"
    assert variables["GRISTMILL_ADVERTISE_HTTP_URL"] == f"https://{host}:8080"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"]}
    assert (secrets, set(mounts)) == ({"tokens": "tokens", "tls": "tls"}, {"tokens", "tls"})
    for name in ("GRISTMILL_TOKENS_FILE", "GRISTMILL_TLS_CERT_FILE", "GRISTMILL_TLS_KEY_FILE"):
        assert str(variables[name]).startswith(tuple(mounts.values()))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    (scraped,) = only(resources, "ServiceMonitor")["spec"]["endpoints"]
    assert (scraped["scheme"], scraped["authorization"]) == (
        "https",
        {"credentials": {"name": "scraper", "key": "token"}},
    )


def test_without_them_the_service_is_configured_so_that_its_network_is_trusted() -> None:
    (container,) = pod(only(render(*REDIS), "StatefulSet", "gristmill"))["containers"]
    assert {"name": "GRISTMILL_INSECURE", "value": "true"} in container["env"]
    # While it waits for its store, gRPC does not listen.
    assert (
        container["livenessProbe"]["httpGet"]
        == container["startupProbe"]["httpGet"]
        == {"path": "/healthz", "port": "probes"}
    )


def test_a_scraper_without_a_token_is_refused_before_its_target_is_down() -> None:
    assert "access.scrapeTokenSecret" in refusal(*BUNDLED, *ACCESS, "--set", "monitoring.monitor=true")


@pytest.mark.parametrize("flags", ["monitoring.monitor=true", "access.tokensSecret=tokens"])
def test_a_scrapers_token_that_nothing_asks_for_is_refused(flags: str) -> None:
    assert "access.scrapeTokenSecret is for" in refusal(*REDIS, "--set", f"access.scrapeTokenSecret=scraper,{flags}")
