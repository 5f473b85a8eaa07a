"""Derives the settings of a run from a trainer's configuration, by a table.

The table also lists all settings of the trainer that a run does not support, so that one error can name all of them. It
reads the configuration by the names of entries or attributes, without importing the trainer's package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gristmill.adapters._core.options import Gristmill
from gristmill.errors import InvalidArgumentError

WORKERS_ONLY = ("tag_shares", "group_timeout_s", "min_samples", "max_samples_per_prompt", "surplus")
"""Settings that select groups. A trainer that samples one batch at a time would wait forever for more groups."""

_WORKERS_ONLY_VALUES = {"stale": ("drop", "count or mask"), "zero_variance_filter": ("replace", "mask")}
"""Values that remove a group from a batch, and the values to use instead, by setting."""

_MISSING = object()
_R = TypeVar("_R", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Configured:
    """A trainer's configuration, the adapter's options, and values that only the trainer's process knows.

    dp_size: the number of data-parallel ranks. pad_token_id: the tokenizer's.
    """

    config: Any
    gristmill: Gristmill
    dp_size: int
    pad_token_id: int

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at `a.b.c` in the configuration."""
        value = self.config
        for name in path.split("."):
            value = value.get(name, _MISSING) if isinstance(value, Mapping) else getattr(value, name, _MISSING)
            if value is _MISSING:
                return default
        return value

    def __getitem__(self, path: str) -> Any:
        value = self.get(path, _MISSING)
        if value is _MISSING:
            raise InvalidArgumentError(
                f"the trainer's configuration has no {path}; use a trainer version with which the adapter was tested"
            )
        return value


Text = str | Callable[[Configured], str]


def always(_: Configured) -> bool:
    return True


class Same(NamedTuple):
    """A setting of the run with the same value as a setting of the trainer."""

    setting: str
    path: str
    when: Callable[[Configured], bool] = always


class Derived(NamedTuple):
    """A setting of the run that is computed from the configuration. value: returns None to omit the setting. Must
    accept every configuration, including those that the table refuses."""

    setting: str
    value: Callable[[Configured], Any]


class Fixed(NamedTuple):
    """A setting of the run for which the trainer requires this value."""

    setting: str
    value: Any
    why: str


class Default(NamedTuple):
    """A default for a setting of the run, which the options' `settings` override. value: returns None to omit it."""

    setting: str
    value: Callable[[Configured], Any]


class Refuse(NamedTuple):
    """A setting of the trainer that a run does not support. when: returns whether to refuse the setting's value."""

    path: str
    when: Callable[[Any, Configured], bool]
    why: Text
    instead: Text


class RefuseSetting(NamedTuple):
    """A setting in `settings` of the options that the trainer does not support. when: returns whether to refuse it."""

    setting: str
    when: Callable[[Any, Configured], bool]
    why: Text
    instead: Text


Row = Same | Derived | Fixed | Default | Refuse | RefuseSetting


def is_on(value: Any, _: Configured) -> bool:
    return bool(value)


def off(path: str, why: str, when: Callable[[Configured], bool] = always) -> Refuse:
    """Refuse a setting that is on."""
    return Refuse(path, lambda value, c: bool(value) and when(c), why, "set it to False")


def one_of(path: str, choices: Collection[str], why: str, when: Callable[[Configured], bool] = always) -> Refuse:
    """Refuse all values except `choices`."""
    return Refuse(path, lambda value, c: value not in choices and when(c), why, f"use {', '.join(choices)}")


def is_given(_: Any, __: Configured) -> bool:
    return True


def refuse_row_padding(trainer: str) -> tuple[RefuseSetting, ...]:
    """Refuse padding after rows and parts for context-parallel ranks, for a trainer that makes both of whole rows."""
    names = ("pad_rows_to_multiple_of", "pad_packed_to", "cp_shards")
    why = f"is not supported: {trainer} pads rows and cuts them for context parallelism itself"
    return tuple(RefuseSetting(name, is_given, why, "omit it") for name in names)


def written_column(name: str) -> dict[str, Any]:
    """Declare a column with one number per response token, which the trainer computes and writes back."""
    return {"name": name, "dtype": "float32", "scope": "response", "source": "trainer"}


class SettingsTable:
    """Derives a run's settings from the configuration of one trainer.

    trainer: the trainer's name. rows: the table. rollouts: the values of `Gristmill.rollouts` that the adapter
    supports, the default first. columns: returns the columns that the adapter declares. spell: converts a setting's
    name to the form that users of the trainer write.
    """

    def __init__(
        self,
        trainer: str,
        rows: Sequence[Row],
        *,
        rollouts: Sequence[str],
        columns: Callable[[Configured], Sequence[Mapping[str, Any]]] = lambda _: (),
        spell: Callable[[str], str] = str,
    ) -> None:
        self._trainer, self._rows, self._rollouts = trainer, rows, rollouts
        self._columns, self._spell = columns, spell

    def settings(self, configured: Configured) -> dict[str, Any]:
        """Return the settings of the run to create. Raises InvalidArgumentError that names all unsupported settings of
        the trainer, and all settings that contradict the configuration."""
        more = dict(configured.gristmill.settings)
        derived = self._derived(configured)
        problems = [
            *self._unsupported_rollouts(configured),
            *self._refused(configured),
            *self._contradictions(derived, more),
            *self._workers_only(configured, more),
        ]
        if problems:
            listed = problems[0] if len(problems) == 1 else "".join(f"\n- {problem}" for problem in problems)
            raise InvalidArgumentError(f"run {configured.gristmill.run!r}: {listed}")
        columns = [*self._columns(configured), *more.pop("columns", ())]
        defaults = {row.setting: row.value(configured) for row in self._of(Default)}
        return _given(defaults) | more | derived | ({"columns": columns} if columns else {})

    def _of(self, kind: type[_R]) -> Iterator[_R]:
        return (row for row in self._rows if isinstance(row, kind))

    def _derived(self, configured: Configured) -> dict[str, Any]:
        values = {row.setting: configured[row.path] for row in self._of(Same) if row.when(configured)}
        values |= {row.setting: row.value(configured) for row in self._of(Derived)}
        values |= {row.setting: row.value for row in self._of(Fixed)}
        return _given(values) | {"dp_size": configured.dp_size, "pad_token_id": configured.pad_token_id}

    def _refused(self, configured: Configured) -> Iterator[str]:
        for row in self._of(Refuse):
            value = configured.get(row.path, _MISSING)
            if value is not _MISSING and row.when(value, configured):
                yield _sentence(self._spell(row.path), value, row, configured)
        for name, value in configured.gristmill.settings.items():
            for refusal in self._of(RefuseSetting):
                if refusal.setting == name and refusal.when(value, configured):
                    yield _sentence(f"settings: {name}", value, refusal, configured)

    def _contradictions(self, derived: Mapping[str, Any], more: Mapping[str, Any]) -> Iterator[str]:
        fixed = {row.setting: row.why for row in self._of(Fixed)}
        for name in more.keys() & derived.keys():
            if name in fixed:
                yield f"settings: {name} is fixed at {derived[name]!r}, because {fixed[name]}; omit it"
            else:
                yield (
                    f"settings: {name} follows from {self._trainer}'s configuration, where it is {derived[name]!r}; "
                    "omit it, or change it there"
                )

    def _unsupported_rollouts(self, configured: Configured) -> Iterator[str]:
        rollouts = configured.gristmill.rollouts
        if rollouts is not None and rollouts not in self._rollouts:
            yield f"rollouts: the adapter of {self._trainer} does not support {rollouts!r}; use {self._rollouts[0]!r}"

    def _workers_only(self, configured: Configured, more: Mapping[str, Any]) -> Iterator[str]:
        if (configured.gristmill.rollouts or self._rollouts[0]) == "workers":
            return
        workers = ", or let workers sample (rollouts='workers')" if "workers" in self._rollouts else ""
        for name, value in more.items():
            refused, instead = _WORKERS_ONLY_VALUES.get(name, (_MISSING, ""))
            if name in WORKERS_ONLY or value == refused:
                remedy = f"use {instead}" if instead else "omit it"
                yield (
                    f"settings: {name}: {value!r} selects among groups of independent workers, but {self._trainer} "
                    f"samples one batch at a time; {remedy}{workers}"
                )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _sentence(name: str, value: Any, row: Refuse | RefuseSetting, configured: Configured) -> str:
    why, instead = (text if isinstance(text, str) else text(configured) for text in (row.why, row.instead))
    return f"{name}: {value!r} {why}; {instead}"
