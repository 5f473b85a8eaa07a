"""The guides' Python, block after block as a reader copies it, but for the service's address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.on_loop import Service

GUIDES = sorted(Path(__file__).parents[1].glob("docs/guides/*.md"))
# It has no Python of its own.
WORDS_ONLY = {"troubleshooting.md"}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in WORDS_ONLY], ids=lambda page: page.stem)
def test_the_blocks_of_a_guide_run_one_after_another(service: Service, page: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    code = blocks(page)
    assert code
    for block in code:
        exec(compile(block.replace("127.0.0.1:50051", service.grpc_address), str(page), "exec"), names)
    made = [run for run in service.runs.names() if f'run="{run}"' in "".join(code)]
    assert made
    for run in made:
        status = service.runs.get(run).status()
        assert status.rows_accepted
        assert not status.failed_batches
