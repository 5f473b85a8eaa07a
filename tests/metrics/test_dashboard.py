"""The Grafana dashboard: what each panel asks for exists, parses, and says what it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metrics.promtool import promtool

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/helm/gristmill/files/gristmill.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Of each kind what Prometheus makes series of.
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
_ROW = re.compile(r"^\| `(gristmill_\w+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)
_GRAFANAS = {"$__rate_interval": "5m", "$run": ".*", "$job": ".*"}


def documented() -> dict[str, set[str]]:
    """Labels by the name of the series."""
    return {
        name + suffix: set(re.findall(r"`(\w+)`", labels)) | ({"le"} if suffix == "_bucket" else set())
        for name, kind, labels in _ROW.findall((ROOT / "docs/metrics.md").read_text())
        for suffix in _SUFFIXES[kind]
    }


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_each_panel_has_a_title_a_unit_and_a_description() -> None:
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_panels_have_numbers_and_places_of_their_own() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_and_label_asked_for_exists() -> None:
    known = documented()
    for expression in expressions():
        names = re.findall(r"gristmill_\w+", expression)
        assert set(names) <= known.keys(), expression
        allowed = {label for name in names for label in known[name]} | {"instance", "job"}
        labels = re.findall(r"[{,]\s*(\w+)\s*[!=]~?", expression)
        labels += [label for by in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in by.split(", ")]
        assert set(labels) <= allowed, expression
        assert names, expression


def test_every_metric_is_shown() -> None:
    shown = {name for expression in expressions() for name in re.findall(r"gristmill_\w+", expression)}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert bare == {name for name, _, _ in _ROW.findall((ROOT / "docs/metrics.md").read_text())}


def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    rules = []
    for number, expression in enumerate(expressions()):
        for grafanas, ours in _GRAFANAS.items():
            expression = expression.replace(grafanas, ours)
        assert "$" not in expression
        rules.append({"record": f"panel:{number}", "expr": expression})
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


@pytest.mark.parametrize(
    "variable", [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"], ids=lambda one: one["name"]
)
def test_variables_ask_for_metrics_that_there_are(variable: dict[str, Any]) -> None:
    query = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert query is not None
    name, label = query.groups()
    assert label in documented()[name] | {"job"}
