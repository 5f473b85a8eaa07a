"""Asks an engine once what it gives, and says what is missing and how to start the engine so that it has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count

from gristmill._engines.fields import Document
from gristmill.completions import Sampled
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.columns import Source, columns_of, names_of
from gristmill_recorder.engines.connection import Engine
from gristmill_recorder.engines.names import ENGINES
from gristmill_recorder.engines.renderer import Renderer
from gristmill_recorder.languages.language import Asking, Form
from gristmill_recorder.languages.paths import form_at
from gristmill_recorder.languages.sampling import Sampling
from gristmill_recorder.refusals import EngineAway, EngineSlow, NotRecorded
from gristmill_recorder.settings import RecorderSettings

_log = logging.getLogger("gristmill.recorder")

_HEADERS = {"content-type": "application/json"}
_PAUSE_S = 2.0


class Probe:
    """Samples one token of the engine's first model, and checks that the answer has what the settings need."""

    def __init__(self, engine: Engine, settings: RecorderSettings) -> None:
        self._engine, self._settings = engine, settings
        self._api, self._columns = ENGINES[settings.engine], names_of(settings.columns)

    async def run(self) -> None:
        """Logs what is missing. Returns when the engine has answered."""
        for attempt in count():
            try:
                problems = [problem async for problem in self.problems()]
                break
            except (EngineAway, EngineSlow) as error:
                if not attempt:
                    _log.warning("engine not probed, will be retried: %s", error)
                await asyncio.sleep(_PAUSE_S)
        for problem in problems:
            _log.warning("engine probed: %s", problem)
        if not problems:
            _log.info("engine probed: nothing is missing")

    async def problems(self) -> AsyncIterator[str]:
        """Yields what is missing, with its remedy. Raises EngineAway and EngineSlow."""
        status, models = await self._engine.ask("GET", "v1/models", _HEADERS, None)
        if status != 200 or not models.get("data"):
            yield f"/v1/models answered with status {status} and no model, so the engine's answers were not checked"
            return
        make_form, trial = form_at(self._api.trial.path), self._api.trial
        assert make_form is not None
        asking = Asking(self._api, self._settings.logprobs, "prompt_logprobs" in self._columns)
        form = make_form({"model": models["data"][0]["id"], **trial.body}, asking)
        status, answer = await self._engine.ask("POST", form.path, _HEADERS, form.request)
        if status != 200:
            yield f"a /{form.path} of one token was refused with status {status}; calls may be refused too"
            return
        choice = _sampled(form, answer)
        if choice is None:
            yield f"its answers have no token ids, so no call can be recorded; {self._api.fields.remedy}"
            return
        if self._settings.logprobs and choice.rollout_logprobs is None:
            yield "its answers have no logprobs, so no call can be recorded; start the recorder with --no-logprobs"
        about = (await self._engine.ask("GET", self._api.about, _HEADERS, None))[1] if self._api.about else {}
        for problem in (*self._api.problems(answer, about), *self._of_columns(form, answer)):
            yield problem
        if self._settings.splice != "off":
            async for problem in self._of_splicing(form, choice.prompt_token_ids):
                yield problem

    def _of_columns(self, form: Form, answer: Document) -> Iterator[str]:
        samples, choices = form.read(answer)
        source = Source(choices[0] if choices else {}, samples[0], Sampling.of({}, None), {})
        try:
            columns = columns_of(self._columns, source)
        except (KeyError, TypeError, ValueError) as error:
            yield f"the columns of /{form.path} cannot be read, so its calls are refused: {error!r}"
            return
        for name in sorted({*self._columns} - columns.keys()):
            remedy = self._api.columns.get(name, f"omit {name} from --columns")
            yield f"/{form.path} returned no {name}, so rows are without it; {remedy}"

    async def _of_splicing(self, form: Form, prompt: Sequence[int]) -> AsyncIterator[str]:
        request = form.request
        best, *_, last = (self._api.renderings[0], *self._api.renderings)
        rendered = await Renderer(self._engine, self._api).render(request, [request["messages"]], _HEADERS)
        if rendered is None:
            yield f"it renders no conversation, so calls are not spliced; {last.remedy}"
        elif rendered[0] != [*prompt]:
            yield f"/{last.path} renders otherwise than its chat completions, so some are not spliced; {best.remedy}"
        longer = [*prompt, prompt[-1]]
        body = self._api.with_tokens(request, longer)
        _, answer = await self._engine.ask("POST", form.path, _HEADERS, body)
        choice = _sampled(form, answer)
        if choice is None or [*choice.prompt_token_ids] != longer:
            yield f"it ignores the tokens of a prompt, so calls are not spliced; {self._api.splicing}"


def _sampled(form: Form, answer: Document) -> Sampled | None:
    try:
        samples, _ = form.read(answer)
    except (AttributeError, InvalidArgumentError, KeyError, NotRecorded, TypeError):
        return None
    return next(iter(samples), None)
