"""The tables of a report. A cell says a figure for people; `data-value` has all of its digits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.report_page.charts import by_stage, stage_s, tier_gbps
from orchestrrl.lab.sim.report_page.display_names import OF_A_STEP, STAGES, TIERS, display_name, number, rank
from orchestrrl.lab.sim.report_page.groups import ArmGroup, frontier

QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class PercentShare:
    """Of one, shown in per cent."""

    value: float


Cell = str | float | int | PercentShare | None


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], best: Sequence[bool] = ()) -> str:
    """`best` [row]: those that are marked. A column in which nothing stands is left out; the first names the rows."""
    cells = list(rows)
    shown = [place for place in range(len(columns)) if place == 0 or any(row[place] is not None for row in cells)]
    is_word = [any(isinstance(row[place], str) for row in cells) for place in range(len(columns))]
    head = "".join(f'<th scope="col"{_word(is_word[place])}>{escape(columns[place])}</th>' for place in shown)
    body = []
    for number_of, row in enumerate(cells):
        kind = ' class="best"' if number_of < len(best) and best[number_of] else ""
        name, *others = (row[place] for place in shown)
        body.append(f'<tr{kind}><th scope="row">{escape(str(name))}</th>{"".join(map(_cell, others))}</tr>')
    if not body:
        return ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _word(is_word: bool) -> str:
    return ' class="word"' if is_word else ""


def _cell(value: Cell) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, str):
        return f"<td{_word(True)}>{escape(value)}</td>"
    if isinstance(value, PercentShare):
        return f'<td data-value="{value.value!r}">{value.value:.1%}</td>'
    return f'<td data-value="{value!r}">{escape(number(value))}</td>'


def summary(groups: Sequence[ArmGroup]) -> str:
    """Throughput beside that of the first of that name, and what the network costs."""
    columns = (
        "",
        "seeds",
        "samples/s",
        "least of seeds",
        "most of seeds",
        "times the first",
        "network, M$",
        "samples/s per M$",
        "trainer idle",
        "engines idle",
        "samples trained on",
    )
    first: dict[str, float] = {}
    sizes = Counter(group.family for group in groups)
    rows: list[list[Cell]] = []
    for group in groups:
        reference = first.setdefault(group.family, group.samples_per_s)
        gain = group.samples_per_s / reference if reference > 0 and sizes[group.family] > 1 else None
        idle = [group.idle_share(stage) for stage in (FabricStage.TRAIN, FabricStage.GEN)]
        spread = group.spread if len(group.seeds) > 1 else (None, None)
        usd = (group.network_usd / 1e6, group.samples_per_s_per_musd) if group.network_usd else (None, None)
        shares = [None if share is None else PercentShare(share) for share in idle]
        rows.append(
            [
                group.title,
                ", ".join(map(str, group.seeds)),
                group.samples_per_s,
                *spread,
                gain,
                *usd,
                *shares,
                group.first.run.samples,
            ]
        )
    return table(columns, rows)


def stages(groups: Sequence[ArmGroup]) -> str:
    """What one of each takes: the median of the first seed's."""
    columns = ("", "training, s", "generation, s", "weight sync, s", "MFU of training")
    rows: list[list[Cell]] = []
    for group in groups:
        mfu = group.first.train_mfu
        seconds = (stage_s(group.first.run, stage) for stage in FabricStage)
        rows.append([group.title, *seconds, PercentShare(mfu) if mfu else None])
    return table(columns, rows)


def steps(groups: Sequence[ArmGroup]) -> str:
    """Seconds of a step, in the mean over steps. What never took any is left out."""
    told = [group.mean_step_s() for group in groups]
    names = sorted(
        {name for each in told for name, seconds in each.items() if seconds > 0},
        key=lambda name: rank(OF_A_STEP, name),
    )
    rows = [[group.title, *(each.get(name) for name in names)] for group, each in zip(groups, told, strict=True)]
    columns = (f"{display_name(OF_A_STEP, name)}, s" for name in names)
    return table(("", *columns), rows if names else [])


def tier_rates(groups: Sequence[ArmGroup]) -> str:
    rows: list[list[Cell]] = []
    for group in groups:
        run = group.first.run
        for (stage, tier), rate in sorted(tier_gbps(run).items(), key=lambda each: by_stage(*each[0])):
            names = (
                display_name(STAGES, stage),
                display_name(TIERS, tier),
            )
            rows.append([group.title, *names, run.tier_bytes[stage][tier] / 1e9, rate])
    return table(("", "stage", "tier", "GB in one of it", "Gbps"), rows)


def slack(groups: Sequence[ArmGroup]) -> str:
    """Windows of an optimiser step, in milliseconds; those that a run kept stand for all."""
    quantiles = (f"{quantile:.0%} are at most, ms" for quantile in QUANTILES)
    columns = ("", "windows kept", *quantiles, "longest, ms")
    rows: list[list[Cell]] = []
    for group in groups:
        lengths_ms = [window.length_s * 1e3 for window in group.first.run.windows]
        if lengths_ms:
            told = [float(value) for value in np.quantile(lengths_ms, QUANTILES)]
            rows.append([group.title, len(lengths_ms), *told, max(lengths_ms)])
    return table(columns, rows)


def staleness(groups: Sequence[ArmGroup]) -> str:
    """Shares of samples by the versions that they were behind."""
    lags = sorted({lag for group in groups for lag in group.first.run.staleness})
    rows: list[list[Cell]] = []
    for group in groups:
        counts = group.first.run.staleness
        total = sum(counts.values())
        if total:
            rows.append([group.title, *(PercentShare(counts.get(lag, 0) / total) for lag in lags)])
    return table(("", *(f"{lag} behind" for lag in lags)), rows)


def cost(groups: Sequence[ArmGroup]) -> str:
    """Rows on the frontier are marked."""
    names = sorted({name for group in groups for name in group.first.bill.parts_usd})
    parts_of = (f"{display_name({}, name)}, $" for name in names)
    columns = ("", "frontier", "network, $", *parts_of, "GPUs, $", "power of optics, W", "samples/s per M$ of network")
    best = frontier(groups)
    rows: list[list[Cell]] = []
    for group, is_best in zip(groups, best, strict=True):
        if not group.network_usd:
            continue
        bill = group.first.bill
        parts = [bill.parts_usd.get(name) for name in names]
        own = [group.title, "yes" if is_best else "", group.network_usd, *parts, bill.gpus_usd, bill.optics_watts]
        rows.append([*own, group.samples_per_s_per_musd])
    priced = [is_best for group, is_best in zip(groups, best, strict=True) if group.network_usd]
    return table(columns, rows, priced)
