#!/usr/bin/env bash
# Removes files of installed packages that are not used at run time: `slim.sh DIRECTORY`. If `strip` is installed, also
# removes debug symbols, except numpy's: its relocated libraries would break.
set -euo pipefail
directory=$1
find "$directory" -depth -type d \( -name tests -o -name test -o -name __pycache__ -o -path '*/numpy/f2py' \) \
  -exec rm -rf {} +
find "$directory" -type f \( -name '*.a' -o -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.pyx' -o -name '*.pxd' \
  -o -name '*.pyi' -o -path '*/zstandard/_cffi.*.so' \
  -o -path '*/numpy/_core/_simd.*' -o -path '*/numpy/_core/*_tests.*' -o -ipath '*/bin/activate*' -o -path '*/bin/f2py' \) -delete
if command -v strip > /dev/null; then
  find "$directory" -type f -name '*.so' -not -path '*/numpy*' -exec strip --strip-unneeded {} +
else
  echo "strip is not installed: debug symbols stay" >&2
fi
