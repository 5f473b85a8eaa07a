"""NVIDIA Dynamo 1.6.1, in front of any engine: `nvext` of `lib/llm/src/protocols/openai` of ai-dynamo/dynamo.

It takes a prompt as tokens (`nvext.token_data`), but has no route that renders (pull request 9012 is open).
"""

from __future__ import annotations

from gristmill._engines import fields
from gristmill_recorder.engines.api import EngineApi

DYNAMO = EngineApi(fields=fields.DYNAMO)
