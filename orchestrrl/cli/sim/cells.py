"""Cells of the cluster simulator's tables, and the lines below them: what `orchestrrl sim run`, `compare`, `split` and
`sweep` print. Pure."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from orchestrrl.cli.output import Columns

if TYPE_CHECKING:
    from orchestrrl.lab.sim.rl.results import ClusterResult, SummaryRow

STAGES: Columns = {
    "gen": lambda row: f"{row.gen_s:.1f} s",
    "train": lambda row: f"{row.train_s:.1f} s",
    "sync": lambda row: f"{row.sync_s:.2f} s",
    "waits": lambda row: f"{row.waits_s:.2f} s",
    "idle gen": lambda row: f"{row.idle_gen:.0%}",
    "idle train": lambda row: f"{row.idle_train:.0%}",
    "staleness": lambda row: f"{row.staleness:.2f}",
}
LEGEND = (
    "gen, train, sync: means of a step; waits: engines for weights or room; per M$: samples/s for each million dollars"
    " of network"
)
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def rate_of(row: "SummaryRow") -> str:
    return digits(row.samples_per_s)


def usd_of(row: "SummaryRow") -> str | None:
    """Nothing where no prices are known."""
    return f"{row.network_usd / 1e6:.2f} M$" if row.network_usd else None


def worth_of(row: "SummaryRow") -> str | None:
    return digits(row.samples_per_s_per_musd) if row.network_usd else None


def total_of(row: "SummaryRow") -> str | None:
    return None if row.total_usd is None else f"{row.total_usd / 1e6:.2f} M$"


def digits(value: float) -> str:
    """Three, so that a column can be compared; never as a power of ten where it is large."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def notes_of(results: "Sequence[ClusterResult]", out: Path | None) -> list[str]:
    """For rich: each note once, with who has it first; those that differ from it in figures alone are counted."""
    told: dict[str, tuple[str, set[str]]] = {}
    for result in results:
        who = f"{result.run.fabric}, {result.run.arm}"
        for note in result.run.notes:
            told.setdefault(_FIGURE.sub("#", note), (f"{who}: {note}", set()))[1].add(who)
    lines = [LEGEND, *(escape(f"{first}{_others(len(having) - 1)}") for first, having in told.values())]
    return [*lines, *kept_in(out)]


def kept_in(out: Path | None) -> list[str]:
    return (
        [] if out is None else [escape(f"wrote results to {out}; `orchestrrl sim report {out}` makes a page of them")]
    )


def _others(count: int) -> str:
    return f" (and {count} more alike)" if count else ""
