"""The tables of a report. A cell says a figure for people; `data-value` has all of its digits."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
Row = Mapping[str, Cell]  # by column; that of the row's name has none


def table(rows: Sequence[Row], best: Sequence[bool] = ()) -> str:
    """`best` [row]: those that are marked. A column in which nothing stands is left out; the first names the rows."""
    if not rows:
        return ""
    columns = [name for name in rows[0] if not name or any(row[name] is not None for row in rows)]
    words = {name for name in columns for row in rows if isinstance(row[name], str)}
    head = "".join(f'<th scope="col"{_word(name in words)}>{escape(name)}</th>' for name in columns)
    body = ""
    for row, is_best in zip(rows, best or [False] * len(rows), strict=True):
        cells = "".join(_cell(row[name]) for name in columns[1:])
        kind = ' class="best"' if is_best else ""
        body += f'<tr{kind}><th scope="row">{escape(str(row[columns[0]]))}</th>{cells}</tr>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
    first: dict[str, float] = {}
    sizes = Counter(group.family for group in groups)
    rows: list[Row] = []
    for group in groups:
        reference = first.setdefault(group.family, group.samples_per_s)
        least, most = group.spread if len(group.seeds) > 1 else (None, None)
        rows.append(
            {
                "": group.title,
                "seeds": ", ".join(map(str, group.seeds)),
                "samples/s": group.samples_per_s,
                "least of seeds": least,
                "most of seeds": most,
                "times the first": group.samples_per_s / reference
                if reference > 0 and sizes[group.family] > 1
                else None,
                "network, M$": group.network_usd / 1e6 if group.network_usd else None,
                "samples/s per M$": group.samples_per_s_per_musd if group.network_usd else None,
                "trainer idle": _share(group.idle_share(FabricStage.TRAIN)),
                "engines idle": _share(group.idle_share(FabricStage.GEN)),
                "samples trained on": group.first.run.samples,
            }
        )
    return table(rows)


def _share(value: float | None) -> PercentShare | None:
    return None if value is None else PercentShare(value)


def stages(groups: Sequence[ArmGroup]) -> str:
    """What one of each takes: the median of the first seed's."""
    return table(
        [
            {
                "": group.title,
                "training, s": stage_s(group.first.run, FabricStage.TRAIN),
                "generation, s": stage_s(group.first.run, FabricStage.GEN),
                "weight sync, s": stage_s(group.first.run, FabricStage.WEIGHT_SYNC),
                "MFU of training": _share(group.first.train_mfu or None),
            }
            for group in groups
        ]
    )


def steps(groups: Sequence[ArmGroup]) -> str:
    """Seconds of a step, in the mean over steps. What never took any is left out."""
    told = [group.mean_step_s() for group in groups]
    names = sorted(
        {name for each in told for name, seconds in each.items() if seconds > 0}, key=lambda name: rank(OF_A_STEP, name)
    )
    rows: list[Row] = [
        {"": group.title, **{f"{display_name(OF_A_STEP, name)}, s": each.get(name) for name in names}}
        for group, each in zip(groups, told, strict=True)
    ]
    return table(rows if names else [])


def tier_rates(groups: Sequence[ArmGroup]) -> str:
    return table(
        [
            {
                "": group.title,
                "stage": display_name(STAGES, stage),
                "tier": display_name(TIERS, tier),
                "GB in one of it": group.first.run.tier_bytes[stage][tier] / 1e9,
                "Gbps": rate,
            }
            for group in groups
            for (stage, tier), rate in sorted(tier_gbps(group.first.run).items(), key=lambda each: by_stage(*each[0]))
        ]
    )


def slack(groups: Sequence[ArmGroup]) -> str:
    """Windows of an optimiser step, in milliseconds; those that a run kept stand for all."""
    rows: list[Row] = []
    for group in groups:
        if lengths_ms := [window.length_s * 1e3 for window in group.first.run.windows]:
            quantiles = {f"{each:.0%} are at most, ms": float(np.quantile(lengths_ms, each)) for each in QUANTILES}
            rows.append({"": group.title, "windows kept": len(lengths_ms), **quantiles, "longest, ms": max(lengths_ms)})
    return table(rows)


def staleness(groups: Sequence[ArmGroup]) -> str:
    """Shares of samples by the versions that they were behind."""
    lags = sorted({lag for group in groups for lag in group.first.run.staleness})
    rows: list[Row] = []
    for group in groups:
        counts = group.first.run.staleness
        if total := sum(counts.values()):
            shares = {f"{lag} behind": PercentShare(counts.get(lag, 0) / total) for lag in lags}
            rows.append({"": group.title, **shares})
    return table(rows)


def cost(groups: Sequence[ArmGroup]) -> str:
    """Rows on the frontier are marked."""
    names = sorted({name for group in groups for name in group.first.bill.parts_usd})
    priced = [group for group in groups if group.network_usd]
    best = frontier(priced)
    rows: list[Row] = [
        {
            "": group.title,
            "frontier": "yes" if is_best else "",
            "network, $": group.network_usd,
            **{f"{display_name({}, name)}, $": group.first.bill.parts_usd.get(name) for name in names},
            "GPUs, $": group.first.bill.gpus_usd,
            "samples/s per M$ of network": group.samples_per_s_per_musd,
        }
        for group, is_best in zip(priced, best, strict=True)
    ]
    return table(rows, best)
