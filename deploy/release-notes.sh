#!/usr/bin/env bash
# Prints the section of CHANGELOG.md for a version: `release-notes.sh VERSION`. Exit status 1 if there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
awk -v wanted="## $1" '
  /^## / { within = $0 == wanted || index($0, wanted " ") == 1; next }
  within { print; if (NF) found = 1 }
  END { exit !found }
' CHANGELOG.md
