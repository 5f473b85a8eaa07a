#!/usr/bin/env bash
# Renders the chart's examples as plain manifests: `render.sh [DIRECTORY]`, build/manifests by default.
set -euo pipefail
cd "$(dirname "$0")/.."
helm=$PWD/.venv/bin/helm
[ -x "$helm" ] || helm=helm
out=${1:-build/manifests}
mkdir -p "$out"
render() {  # NAME CHART EXAMPLE [FLAG...]
  "$helm" lint --strict --quiet "$2" "${@:4}"
  "$helm" template "$1" "$2" -n gristmill --kube-version 1.29 "${@:4}" > "$out/$3.yaml"
}
for values in deploy/helm/examples/*.yaml; do
  render gristmill deploy/helm/gristmill "$(basename "$values" .yaml)" -f "$values"
done
render trainer deploy/helm/examples/trainer sidecar
