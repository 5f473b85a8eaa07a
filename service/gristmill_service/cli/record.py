"""`gristmill record` runs one recorder in one process. Heavy modules are imported when it runs."""

from __future__ import annotations

import sys

import typer

from gristmill.errors import GristmillError
from gristmill_recorder.settings import RecorderSettings
from gristmill_service.cli.options import flags_of
from gristmill_service.settings import load

OK, CANNOT_START = 0, 2


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("record")(record_command)


def record_command(**flags: object) -> None:
    """Record an agent's calls to an engine as steps of its trajectory.

    This is a proxy in front of vLLM, SGLang, Dynamo or llama.cpp, for OpenAI's, Anthropic's and Gemini's APIs, streamed
    or not. In the agent, only the base URL changes; it names the agent's trajectory:

      http://127.0.0.1:8090/runs/RUN/uid/UID/sample/0/v1

    Create RUN with step_wise: true and merge: tree. Sampled tokens are trained, with the engine's token ids and
    logprobs; messages of users and tools are context. A call with the reward ends the trajectory (URL is without /v1):

      curl URL/finish -H 'content-type: application/json' -d '{"reward": 1.0}'

    Every answer is journaled before it is returned, and delivered when the service is reachable and has capacity. The
    engine's errors are returned unchanged. /metrics, /healthz and /readyz work as in the service. docs/recorder.md
    is the guide.

    A setting is read from its flag, else from the environment (--upstream is GRISTMILL_RECORD_UPSTREAM); its
    credentials for the service are GRISTMILL_TOKEN and similar variables (docs/security.md). It listens only on this
    machine, because it does not authenticate callers; --insecure allows other addresses. After SIGTERM or Ctrl-C it
    finishes the running calls and exits with 0; after a second signal it exits at once. Exit status 2: an invalid
    setting, or an address or a journal in use.
    """
    try:
        settings = load(RecorderSettings, flags)
    except GristmillError as error:
        print(f"gristmill record: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_START) from None
    raise typer.Exit(record(settings))


record_command.__signature__ = flags_of(RecorderSettings)  # type: ignore[attr-defined]


def record(settings: RecorderSettings) -> int:
    """Records until a stop signal. Returns the exit status."""
    from gristmill_service.logs import configure_logs
    from gristmill_service.process_tuning import tune_process

    configure_logs(settings.log_level, settings.log_format)
    try:
        import uvloop

        from gristmill_recorder.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "gristmill").startswith("gristmill"):
            raise
        print(
            f"gristmill record: it needs {error.name}, which is not installed; pip install '.[record]' in gristmill's "
            "checkout",
            file=sys.stderr,
        )
        return CANNOT_START
    tune_process()
    try:
        uvloop.run(serve(settings))
    except GristmillError as error:
        print(f"gristmill record: {error}", file=sys.stderr)
        return CANNOT_START
    return OK
