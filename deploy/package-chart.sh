#!/usr/bin/env bash
# Packages the chart as for a release: `package-chart.sh [DIRECTORY]`, build/chart by default. GRISTMILL_REPOSITORY: the
# URL of the repository, for the runbook. GRISTMILL_IMAGE, GRISTMILL_IMAGE_DIGEST: the image of the chart.
set -euo pipefail
cd "$(dirname "$0")/.."
helm=$PWD/.venv/bin/helm
[ -x "$helm" ] || helm=helm
out=${1:-build/chart}
version=$(make --silent version)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -R deploy/helm/gristmill "$work/gristmill"
if [ -n "${GRISTMILL_REPOSITORY:-}" ]; then
  printf 'home: %s\nsources: [%s]\n' "$GRISTMILL_REPOSITORY" "$GRISTMILL_REPOSITORY" >> "$work/gristmill/Chart.yaml"
fi
if [ -n "${GRISTMILL_IMAGE:-}" ]; then
  sed -i -e "s|^  repository: gristmill$|  repository: $GRISTMILL_IMAGE|" \
    -e "s|^  digest: \"\"$|  digest: \"${GRISTMILL_IMAGE_DIGEST:-}\"|" \
    -e '/There is no published image yet/d' "$work/gristmill/values.yaml"
fi
mkdir -p "$out"
"$helm" package "$work/gristmill" --version "$version" --app-version "$version" --destination "$out"
