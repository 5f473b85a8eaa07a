"""`python -m tests.tools.bench.report`: what was measured last goes into docs/performance.md and docs/performance/.

Tables are between markers, `<!-- figures NAME -->` and `<!-- end -->`, where NAME is how the figures' names begin.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tests.tools.bench import curves, formats, plot
from tests.tools.bench.figures import OUTPUT, Figure, parse, read

DOCUMENT = Path("docs/performance.md")
PICTURES = Path("docs/performance")
_TABLE = re.compile(r"<!-- (figures|summary)(?: ([\w. ]+))? -->\n.*?<!-- end -->", re.DOTALL)
_HEAD = "\n| figure | ours | bound in the same run | ratio | reach | |\n| --- | --- | --- | --- | --- | --- |\n"


def main() -> int:
    if not OUTPUT.exists():
        print(f"{OUTPUT} is not there: run `make bench` first", file=sys.stderr)
        return 2
    figures = parse(read())
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(), figures))
    plot.reached()
    PICTURES.mkdir(exist_ok=True)
    for picture in (plot.REACHED, curves.OUTPUT):
        if picture.exists():
            shutil.copyfile(picture, PICTURES / picture.name)
    print(f"{len(figures)} figures written into {DOCUMENT}")
    return 0


def rendered(text: str, figures: list[Figure]) -> str:
    """The document with its tables rebuilt; the table without a NAME takes the figures that no other one has."""
    named = tuple(name for _, names in _TABLE.findall(text) for name in names.split())

    def make(match: re.Match[str]) -> str:
        kind, names = match.group(1), match.group(2) or ""
        if kind == "summary":
            return f"<!-- summary -->\n\n{_summary(figures)}\n\n<!-- end -->"
        begins = tuple(names.split())
        mine = [one for one in figures if one.name.startswith(begins or named) == bool(begins)]
        table = f"{_HEAD}{''.join(map(_row, mine))}\n" if mine else ""
        return f"<!-- {f'figures {names}'.strip()} -->\n{table}<!-- end -->"

    return _TABLE.sub(make, text)


def _summary(figures: list[Figure]) -> str:
    reaching = [figure for figure in figures if figure.reach is not None]
    missed = [f"`{figure.name}`" for figure in reaching if not figure.ok]
    names = f" Missed: {', '.join(missed)}." if missed else ""
    return f"{len(reaching) - len(missed)} of {len(reaching)} figures reached.{names}"


def _row(figure: Figure) -> str:
    verdict = {"missed": "**missed**"}.get(formats.verdict(figure), formats.verdict(figure))
    cells = (
        f"`{figure.name}`",
        formats.ours(figure),
        formats.bound(figure),
        formats.ratio(figure),
        formats.reach(figure),
        verdict,
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(main())
