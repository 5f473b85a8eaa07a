"""Prints what splicing makes of conversations: `python -m tests.engines.templates --conversations 1500 --seed 1`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from gristmill_service.settings import Settings
from tests.engines.templates.conversations import COUNTS, Outcome, run
from tests.engines.templates.engine import TemplateEngine
from tests.engines.templates.families import FAMILIES
from tests.on_loop import Service
from tests.serving import FREE_PORTS

_HEADS = (
    "family",
    "conversations",
    "calls",
    "spliced",
    "rows each",
    "broken",
    "rows that differ",
    "wrong bridges",
    "refused",
    "answers compared",
    "answers that differ",
    "refused without splicing",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=150, help="of all families together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one; may be repeated")
    options = parser.parse_args()
    names = options.family or list(FAMILIES)
    service = Service(Settings(**FREE_PORTS, store="memory"))
    service.start()
    print(" | ".join(_HEADS))
    outcomes = []
    for name in track(names, "conversations", disable=not sys.stdout.isatty()):
        with tempfile.TemporaryDirectory() as folder:
            engine, count = TemplateEngine(FAMILIES[name]), options.conversations // len(names)
            outcome = run(engine, count, options.seed, service, Path(folder), name)
        outcomes.append(outcome)
        print(_line(name, outcome))
        for problem in (*outcome.wrong[:5], *outcome.unlike[:5]):
            print(f"  {problem}")
    total = Outcome(*(sum(getattr(one, name) for one in outcomes) for name in COUNTS))
    total.results = {"spliced": sum(one.results["spliced"] for one in outcomes)}
    total.wrong = [problem for one in outcomes for problem in one.wrong]
    total.unlike = [problem for one in outcomes for problem in one.unlike]
    print(_line("all", total))
    service.stop()


def _line(name: str, of: Outcome) -> str:
    others = {result: count for result, count in of.results.items() if count and result not in ("spliced", "start")}
    figures = (of.conversations, of.calls, of.results["spliced"], f"{of.rows / max(1, of.conversations):.3f}")
    more = (of.broken, of.different, len(of.wrong), of.refused, of.answers, len(of.unlike), of.hidden)
    counts = [f"{key}: {count}" for key, count in others.items()]
    return " | ".join(map(str, (name, *figures, *more, *counts)))


if __name__ == "__main__":
    main()
