"""`make demo`: a small policy learns a game in several turns, its rollouts going through gristmill.

Two rollout workers play and submit each turn over gRPC; `gristmill serve` merges, scores, schedules and lays out; two
trainer ranks map their shards and train; new weights go back to the workers. Exit status 1: the reward did not rise,
or a process failed; 130: stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from rich.console import Console

from experiment import BEST_SUCCESS, BLIND_SUCCESS, DP_SIZE, LAYOUTS, RUN, WORKERS, Experiment
from game import LARGEST, MAX_REPLY_TOKENS, MAX_TURNS, Episode, decode
from gristmill import RolloutClient
from plot import plot
from policy import Policy, load_weights, save_weights, speak
from processes import Children, Ended, ProcessFailedError, Service, serve
from table import LiveTable
from trainer import BatchReport, train
from worker import work

PICTURE = Path(__file__).resolve().parents[2] / "build" / "demo.png"
COMPARED_BATCHES = 10
SHOWN_SECRETS = (3, 8)


def main() -> int:
    arguments = _arguments()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with _ended_by_signals():
        try:
            with tempfile.TemporaryDirectory(prefix="gristmill-demo-") as directory:
                began = time.monotonic()
                experiment = Experiment(Path(directory), arguments.seed, arguments.batches, arguments.layout)
                reports = run(experiment, console)
        except KeyboardInterrupt:
            console.print("stopped; nothing is left running")
            return 130
        except ProcessFailedError as error:
            console.print(str(error), style="red")
            return 1
    plot(reports, arguments.picture)
    return conclude(reports, time.monotonic() - began, arguments, console)


def run(experiment: Experiment, console: Console) -> list[BatchReport]:
    """Run the whole loop, from the first weights to the last batch."""
    torch.manual_seed(experiment.seed)
    save_weights(Policy(), 0, experiment.weights)
    with serve(experiment.directory) as service, Children(service.check) as children:
        _introduce(service, console)
        console.print(f"Games of the untrained policy: {_games(experiment)}")
        with RolloutClient(service.grpc_address, RUN) as client:
            for warning in client.create_run(experiment.run_config):
                console.print(f"gristmill warns: {warning}")
            workers = _start(children, experiment, service.grpc_address)
            reports = _follow(children, workers, client, LiveTable(console, experiment.batches))
    if len(reports) < experiment.batches:
        raise ProcessFailedError(f"the trainer ended after {len(reports)} of {experiment.batches} batches")
    console.print(f"Games of the trained policy: {_games(experiment)}")
    return reports


def _start(children: Children, experiment: Experiment, address: str) -> set[str]:
    """Start workers and ranks, and return the workers' names."""
    workers = [f"rollout worker {index}" for index in range(WORKERS)]
    for index, name in enumerate(workers):
        children.start(name, work, experiment, address, index)
    for rank in range(DP_SIZE):
        children.start(f"trainer rank {rank}", train, experiment, address, rank, reports=True)
    return set(workers)


def _follow(children: Children, playing: set[str], client: RolloutClient, table: LiveTable) -> list[BatchReport]:
    """Show the trainer's reports; finish the run once the workers have played all their games."""
    reports = []
    with table:
        for report in children.reports():
            if isinstance(report, BatchReport):
                reports.append(report)
                table.add(report)
            elif isinstance(report, Ended) and report.name in playing:
                playing.remove(report.name)
                if not playing:
                    client.finish()
    return reports


def _games(experiment: Experiment) -> str:
    """Play a few games with the newest policy; return its replies and the answers."""
    policy, generator, games = Policy(), torch.Generator().manual_seed(experiment.seed), []
    load_weights(policy, experiment.weights)
    for secret in SHOWN_SECRETS:
        episode, moves = Episode(secret), []
        while not episode.done:
            tokens = speak(policy, [episode.context], MAX_REPLY_TOKENS, generator)[0].tokens
            moves.append(f"{decode(tokens).strip() or '(nothing)'} {episode.reply(tokens).answer}")
        games.append(f"[{secret}] {', '.join(moves)}")
    return "; ".join(games)


def _introduce(service: Service, console: Console) -> None:
    console.print(
        f"The game: find a number from 1 to {LARGEST} with {MAX_TURNS} guesses and a hint after each. A player that "
        f"ignores the hints wins at most {BLIND_SUCCESS:.0%} of the games, the best player {BEST_SUCCESS:.0%}.\n"
        f"{WORKERS} rollout workers → gristmill serve ({service.grpc_address}, page {service.http_url}/) → "
        f"{DP_SIZE} trainer ranks"
    )


def conclude(reports: list[BatchReport], seconds: float, arguments: argparse.Namespace, console: Console) -> int:
    """Print by how much the reward rose. Returns the exit status."""
    count = max(1, min(COMPARED_BATCHES, len(reports) // 2))
    first, last = reports[:count], reports[-count:]
    rise = _mean(last, "reward") - _mean(first, "reward")
    console.print(
        f"{len(reports)} batches in {seconds:.0f} s, the first {count} against the last {count}:\n"
        f"reward  {_mean(first, 'reward'):+.2f} → {_mean(last, 'reward'):+.2f}, a rise of {rise:+.2f}\n"
        f"success {_mean(first, 'success'):5.0%} → {_mean(last, 'success'):5.0%}\n"
        f"picture {arguments.picture}",
    )
    if rise < arguments.least_rise:
        console.print(f"The reward was to rise by {arguments.least_rise:g} at least.", style="red")
        return 1
    return 0


def _mean(reports: list[BatchReport], name: str) -> float:
    values = [float(getattr(report, name)) for report in reports]
    return sum(values) / len(values)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the block at the first of these signals as Ctrl-C does; ignore further ones during the cleanup."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python clients/demo", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=220, help="batches to train on (default: 220)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of the shards (default: %(default)s)")
    parser.add_argument("--least-rise", type=float, default=0.5, help="a smaller rise of the mean reward is a failure")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"where the picture goes (default: {PICTURE})")
    arguments = parser.parse_args()
    if arguments.batches < 1:
        parser.error(f"--batches is {arguments.batches}; expected 1 or more")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
