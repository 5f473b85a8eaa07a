"""The options of all adapters: the run to train, and settings that the trainer's configuration does not have."""

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
    rollouts: `trainer`: the trainer samples as without gristmill, and the adapter submits the rollouts. `workers`:
        other programs submit rollouts to the run. The default is the first of these that the adapter supports.
    settings: settings of the run that do not follow from the trainer's configuration, such as `merge` or `balance`.
    ignore: names of fields of the trainer's rollouts that are not submitted (slime).
    old_logprobs: with `rollouts="workers"`, the denominator of the loss's ratio. `rollout`: the log-probabilities of
        the rows. `trainer`: those of the policy at the start of a batch, computed by the adapter (TRL).
    publish_weights: with `rollouts="workers"`, a function of the trainer and the policy version that sends the model's
        weights to the workers. Every rank calls it when training starts and after every batch (TRL).
    timeout_s: the seconds for which a call is retried while the service is unreachable.
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
            raise InvalidArgumentError(f"gristmill: settings is {self.settings!r}; set a mapping of run settings")
        if isinstance(self.ignore, str):
            raise InvalidArgumentError(f"gristmill: ignore is the string {self.ignore!r}; set a list of names")

    @classmethod
    def of(cls, options: object, where: str) -> Gristmill:
        """Read the options from a mapping, for example a part of a YAML file, a Hydra node or parsed flags.

        where: the mapping's name in the trainer's configuration, for errors. Raises InvalidArgumentError for a missing
        or unknown option.
        """
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(f"{where} is missing; set a mapping with address and run")
        known = [option.name for option in fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidArgumentError(f"{where}: unknown option {unknown[0]!r}; expected {', '.join(known)}")
        if missing := [name for name in ("address", "run") if not options.get(name)]:
            raise InvalidArgumentError(
                f"{where}.{missing[0]} is not set; set the service's address and the run's name, for example "
                f"{where}.address=127.0.0.1:50051 {where}.run=my-run"
            )
        return cls(**{name: _plain(value) for name, value in options.items() if value is not None})

    @staticmethod
    def add_flags(parser: ArgumentParser) -> None:
        """Add the options of a command line: the address, `--run` and `--timeout-s`."""
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
        """Read the options from the result of a parser with `add_flags`."""
        return cls(**{name: getattr(flags, name) for name in ("address", "run", "timeout_s")})


def _plain(value: Any) -> Any:
    """Convert containers, such as Hydra's, to dictionaries and lists, which can be encoded as JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(element) for name, element in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(element) for element in value]
    return value
