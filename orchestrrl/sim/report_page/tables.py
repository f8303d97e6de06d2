"""The tables of a report. A cell says a figure for people; `data-value` has all of its digits."""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from orchestrrl.sim.net.fabrics.base import Stage
from orchestrrl.sim.report_page.charts import stage_s, tier_gbps
from orchestrrl.sim.report_page.groups import Group, frontier
from orchestrrl.sim.report_page.svg import number

Cell = str | float | int | None
QUANTILES = (0.1, 0.5, 0.9, 0.99)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], best: Sequence[bool] = ()) -> str:
    """`best` [row]: those that are marked."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = []
    for place, row in enumerate(rows):
        kind = ' class="best"' if place < len(best) and best[place] else ""
        body.append(f"<tr{kind}>{''.join(map(_cell, row))}</tr>")
    if not body:
        return ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _cell(value: Cell) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td data-value="{value!r}">{escape(number(value))}</td>'


def summary(groups: Sequence[Group]) -> str:
    """Throughput beside that of the first arm of the scenario."""
    columns = ("", "seeds", "samples/s", "least", "most", "by the first", "train idle", "gen idle", "samples")
    first: dict[str, float] = {}
    rows: list[list[Cell]] = []
    for group in groups:
        reference = first.setdefault(group.scenario, group.samples_per_s)
        gain = group.samples_per_s / reference if reference > 0 else None
        idle = [group.idle_share(stage) for stage in (Stage.TRAIN, Stage.GEN)]
        seeds = ", ".join(map(str, group.seeds))
        rows.append([group.title, seeds, group.samples_per_s, *group.spread, gain, *idle, group.first.run.samples])
    return table(columns, rows)


def stages(groups: Sequence[Group]) -> str:
    """What one of each takes: the median of the first seed's."""
    columns = ("", "training s", "generation s", "weight sync s", "MFU")
    rows: list[list[Cell]] = [
        [group.title, *(stage_s(group.first.run, stage) for stage in Stage), group.first.train_mfu or None]
        for group in groups
    ]
    return table(columns, rows)


def steps(groups: Sequence[Group]) -> str:
    """Seconds of a step, in the mean over steps."""
    told = [group.mean_step_s() for group in groups]
    names = list(dict.fromkeys(name for each in told for name in each))
    rows = [[group.title, *(each.get(name) for name in names)] for group, each in zip(groups, told, strict=True)]
    return table(("", *names), rows if names else [])


def tier_rates(groups: Sequence[Group]) -> str:
    rows: list[list[Cell]] = []
    for group in groups:
        run = group.first.run
        for (stage, tier), rate in sorted(tier_gbps(run).items()):
            rows.append([group.title, stage, tier, run.tier_bytes[stage][tier] / 1e9, rate])
    return table(("", "stage", "tier", "GB of one", "Gbps"), rows)


def slack(groups: Sequence[Group]) -> str:
    """Windows of an optimiser step, in milliseconds."""
    columns = ("", "windows", "sum ms", *(f"{quantile:.0%} ms" for quantile in QUANTILES), "longest ms")
    rows: list[list[Cell]] = []
    for group in groups:
        lengths_ms = [window.length_s * 1e3 for window in group.first.run.windows]
        if lengths_ms:
            told = [float(value) for value in np.quantile(lengths_ms, QUANTILES)]
            rows.append([group.title, len(lengths_ms), sum(lengths_ms), *told, max(lengths_ms)])
    return table(columns, rows)


def staleness(groups: Sequence[Group]) -> str:
    """Shares of samples by the versions that they were behind."""
    lags = sorted({lag for group in groups for lag in group.first.run.staleness})
    rows: list[list[Cell]] = []
    for group in groups:
        counts = group.first.run.staleness
        total = sum(counts.values())
        if total:
            rows.append([group.title, *(counts.get(lag, 0) / total for lag in lags)])
    return table(("", *(f"{lag} behind" for lag in lags)), rows)


def cost(groups: Sequence[Group]) -> str:
    """Rows on the frontier are marked."""
    names = sorted({name for group in groups for name in group.first.bill.parts_usd})
    columns = ("", "frontier", "network $", *(f"{name} $" for name in names), "GPUs $", "optics W", "samples/s/M$")
    best = frontier(groups)
    rows: list[list[Cell]] = []
    for group, is_best in zip(groups, best, strict=True):
        bill = group.first.bill
        parts = [bill.parts_usd.get(name) for name in names]
        own = [group.title, "yes" if is_best else "", group.network_usd, *parts, bill.gpus_usd, bill.optics_watts]
        rows.append([*own, group.samples_per_s_per_musd])
    return table(columns, rows, best)
