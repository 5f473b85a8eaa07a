"""Tests with real environments. `make test-environments` makes a virtual environment for each package of them."""

from importlib.util import find_spec

_PACKAGES = {"atropos": "atroposlib", "verifiers": "verifiers"}

# A package's tests are collected only where it is installed, which is never the virtual environment of `make test`.
collect_ignore = [folder for folder, package in _PACKAGES.items() if find_spec(package) is None]
