"""The options of every adapter: which run to train, and what the trainer's own configuration has no name for."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from gristmill.errors import InvalidArgumentError

_ROLLOUTS = ("trainer", "workers")
_OLD_LOGPROBS = ("rollout", "trainer")


@dataclass(frozen=True)
class Gristmill:
    """The run that a trainer trains.

    address, run: as for `TrainerClient`. The adapter creates the run from the trainer's configuration.
    rollouts: `trainer`: the trainer samples as it does without gristmill, and the adapter submits the rollouts;
        `workers`: other programs submit rollouts to the run. By default the first of these that the adapter supports.
    settings: settings of the run that do not follow from the trainer's configuration, such as `merge` or `balance`.
    ignore: names of fields of the trainer's rollouts that are not submitted (slime).
    old_logprobs: with `rollouts="workers"`, the log-probabilities that the loss's ratio is taken against: `rollout`:
        those of the rows; `trainer`: those of the policy at the start of a batch, computed by the adapter (TRL).
    publish_weights: with `rollouts="workers"`, a function of the trainer and the policy version that sends the model's
        weights to the workers. Every rank calls it when training starts and after every batch (TRL).
    timeout_s: seconds for which a call is retried while the service is unreachable.
    """

    address: str
    run: str
    _: KW_ONLY
    rollouts: Literal["trainer", "workers"] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    old_logprobs: Literal["rollout", "trainer"] = "rollout"
    publish_weights: Callable[[Any, int], None] | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, choices in (("rollouts", _ROLLOUTS), ("old_logprobs", _OLD_LOGPROBS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise InvalidArgumentError(f"gristmill: {name} is {value!r}; use {' or '.join(choices)}")
        if not isinstance(self.settings, Mapping):
            raise InvalidArgumentError(f"gristmill: settings is {self.settings!r}; give a mapping of run settings")
        if isinstance(self.ignore, str):
            raise InvalidArgumentError(f"gristmill: ignore is the string {self.ignore!r}; give a list of names")

    @classmethod
    def of(cls, options: object, where: str) -> Gristmill:
        """Read the options from a mapping, such as a part of a YAML file, a Hydra node or parsed flags.

        where: the mapping's name in the trainer's configuration, for errors. Raises InvalidArgumentError for an option
        that is missing or unknown.
        """
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(f"{where} is missing; give a mapping with address and run")
        known = [option.name for option in fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidArgumentError(f"{where}: unknown option {unknown[0]!r}; known are {', '.join(known)}")
        if missing := [name for name in ("address", "run") if not options.get(name)]:
            raise InvalidArgumentError(
                f"{where}.{missing[0]} is not set; give the service's address and the run's name, such as "
                f"{where}.address=127.0.0.1:50051 {where}.run=my-run"
            )
        return cls(**{name: _plain(value) for name, value in options.items() if value is not None})

    @staticmethod
    def add_flags(parser: ArgumentParser) -> None:
        """Add the options that a command line needs: the address, `--run` and `--timeout-s`."""
        parser.add_argument("address", help="the service's HOST:PORT; separate several replicas with commas")
        parser.add_argument("--run", required=True, help="the run's name")
        parser.add_argument(
            "--timeout-s",
            type=float,
            default=Gristmill.timeout_s,
            help="seconds for which a call is retried while the service is unreachable",
        )

    @classmethod
    def of_flags(cls, flags: object) -> Gristmill:
        """Read the options from what a parser with `add_flags` returned."""
        return cls(**{name: getattr(flags, name) for name in ("address", "run", "timeout_s")})


def _plain(value: Any) -> Any:
    """Return containers, such as Hydra's, as dictionaries and lists, which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(element) for name, element in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(element) for element in value]
    return value
