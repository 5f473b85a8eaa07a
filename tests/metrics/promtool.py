"""Prometheus' own judgement of rules: Debian's package `prometheus` has promtool."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy/helm/gristmill/files/alerts.yaml"


def promtool(*arguments: str) -> str:
    """What it says; skips where it is not installed, which in CI is an error."""
    binary = shutil.which("promtool")
    if binary is None:
        reason = "promtool is not installed: apt-get install prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_alert(
    directory: Path, name: str, series: Mapping[str, Sequence[float]], fires: Sequence[Mapping[str, str]]
) -> None:
    """Whether the alert fires at the end of these series, of a value a minute, for exactly these labels."""
    rule = next(rule for group in _document()["groups"] for rule in group["rules"] if rule["alert"] == name)
    minutes = max(map(len, series.values())) - 1
    expected = [{"exp_labels": {**rule["labels"], **labels}} for labels in fires]
    # Annotations have values in them, and are expected as they are reported: only labels are compared.
    bare = {
        "groups": [
            {
                **group,
                "rules": [
                    {key: value for key, value in rule.items() if key != "annotations"} for rule in group["rules"]
                ],
            }
            for group in _document()["groups"]
        ]
    }
    (directory / "rules.yaml").write_text(yaml.safe_dump(bare))
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": one, "values": " ".join(f"{value:.9g}" for value in values)}
                    for one, values in series.items()
                ],
                "alert_rule_test": [{"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": expected}],
            }
        ],
    }
    path = directory / "test.yaml"
    path.write_text(yaml.safe_dump(test, width=1 << 20))
    promtool("test", "rules", str(path))


def _document() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(RULES.read_text())
    return document
