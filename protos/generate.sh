#!/usr/bin/env bash
# Writes clients/python/gristmill/v1 from protos/, with the pinned generator (grpcio-tools 1.71: its output runs on
# protobuf 5, 6 and 7; newer generators force the newest runtime). `--check` fails when the committed stubs are stale.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tools=.venv-protos
if [ ! -x "$tools/bin/python" ]; then
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet "grpcio-tools==1.71.2" "setuptools<81" "mypy-protobuf==3.6.0"
fi
out=clients/python
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/python" -W ignore -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" protos/gristmill/v1/*.proto
if [ "${1:-}" = --check ]; then
  diff -r -x __pycache__ -x __init__.py "$out/gristmill/v1" clients/python/gristmill/v1 \
    || { echo "stubs are stale: run 'make protos'" >&2; exit 1; }
fi
