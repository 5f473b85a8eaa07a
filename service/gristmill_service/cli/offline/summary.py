"""What `gristmill plan` and `gristmill batch` made, and what another setting would have made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from gristmill_service.cli.counted import counted
from gristmill_service.cli.refusal_exit import messages
from gristmill_service.pipeline.alternatives import BatchCost
from gristmill_service.pipeline.plan_document import PlanDocument


def tell(plans: Sequence[PlanDocument], first: Iterable[tuple[str, BatchCost]]) -> None:
    """Prints the summary on standard error. first: what `costs` says of the first batch."""
    messages.print(_totals(plans))
    table = Table(box=None, header_style="bold")
    table.add_column("first batch" if len(plans) > 1 else "")
    for name in ("rows", "padding rows", "tokens", "of it padding", "slowest rank"):
        table.add_column(name, justify="right")
    for setting, found in first:
        table.add_row(f"with {setting}" if setting else "as configured", *_cells(found))
    # Wide enough that a pipe or a log gets every column whole.
    Console(stderr=True, highlight=False, width=None if messages.is_terminal else 120).print(table)


def _totals(plans: Sequence[PlanDocument]) -> str:
    received, rows = sum(plan.rows_received for plan in plans), sum(plan.rows for plan in plans)
    told = [
        counted(len(plans), "batch", "batches"),
        counted(sum(plan.prompts for plan in plans), "prompt group", "prompt groups"),
        f"{counted(received, 'row', 'rows')} sent" + (f", {rows:,} after merging" if rows < received else ""),
        f"{counted(sum(plan.optimizer_steps for plan in plans), 'optimizer step', 'optimizer steps')} on "
        f"{counted(plans[0].dp_size, 'rank', 'ranks')}",
    ]
    return "; ".join(told)


def _cells(cost: BatchCost) -> list[str]:
    return [
        f"{cost.rows:,}",
        f"{cost.padding_rows:,}",
        "-" if cost.tokens is None else f"{cost.tokens:,}",
        "-" if cost.padding_share is None else f"{cost.padding_share:.1%}",
        f"{cost.barrier_ratio:.2f} of mean",
    ]
