"""llama.cpp's server: `tools/server` of ggml-org/llama.cpp, b11434."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill._engines import fields
from gristmill._engines.fields import Document
from gristmill_recorder.engines.api import EngineApi, Trial
from gristmill_recorder.languages.sampling import Sampling


def _problems(answer: Document, about: Document) -> Iterator[str]:
    """Yields the defaults of llama-server that change the distribution: calls do not show them."""
    settings = {**answer.get("generation_settings", {}), "grammar": ""}
    if odd := Sampling.of(settings, None).odd:
        yield (
            f"its defaults change the distribution ({', '.join(odd)}), which the recorder cannot count; start "
            "llama-server with --temp 1 --top-k 0 --top-p 1 --min-p 0 and without penalties"
        )


LLAMACPP = EngineApi(
    fields=fields.LLAMACPP,
    # The grammar keeps the answer from ending within a character, which has no logprob.
    trial=Trial("completion", {"prompt": [0], "n_predict": 1, "grammar": 'root ::= "0"'}),
    problems=_problems,
)
