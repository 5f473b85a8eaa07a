#!/usr/bin/env bash
# Writes deploy/manifests, the chart's examples as plain manifests for those without Helm. `--check` fails when they are
# stale, or when the chart's copies of rules and dashboard are: Helm cannot read outside of a chart.
set -euo pipefail
cd "$(dirname "$0")/.."
helm=$PWD/.venv/bin/helm
[ -x "$helm" ] || helm=helm
out=deploy/manifests files=deploy/helm/gristmill/files
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
  cmp deploy/prometheus/alerts.yaml $files/alerts.yaml && cmp deploy/grafana/gristmill.json $files/gristmill.json \
    || { echo "the chart's copies are stale: run deploy/render.sh" >&2; exit 1; }
else
  mkdir -p "$out"
  cp deploy/prometheus/alerts.yaml deploy/grafana/gristmill.json $files/
fi
for values in deploy/helm/examples/*.yaml; do
  "$helm" lint --strict --quiet deploy/helm/gristmill -f "$values"
  "$helm" template gristmill deploy/helm/gristmill -n gristmill --kube-version 1.29 -f "$values" > "$out/$(basename "$values")"
done
"$helm" lint --strict --quiet deploy/helm/examples/trainer
"$helm" template trainer deploy/helm/examples/trainer -n gristmill --kube-version 1.29 > "$out/sidecar.yaml"
if [ "${1:-}" = --check ]; then
  diff -r "$out" deploy/manifests || { echo "manifests are stale: run deploy/render.sh" >&2; exit 1; }
fi
