"""Results side by side: each arm on each fabric, the median over its seeds. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.results import ClusterResult


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """`gain`: samples per second over the first row's. `pareto`: nobody has more throughput for as little money."""

    fabric: str
    arm: str
    seeds: int
    gen_s: float  # of a step
    train_s: float
    sync_s: float
    waits_s: float  # of a step: of engines for weights and room
    idle_train: float
    idle_gen: float
    staleness: float  # of a sample, versions, in the mean
    samples_per_s: float
    gain: float
    network_usd: float
    samples_per_s_per_musd: float
    gain_per_usd: float
    total_usd: float | None  # with GPUs; None: no price of them is known
    pareto: bool


def rows(results: Sequence[ClusterResult]) -> list[SummaryRow]:
    """In the results' order."""
    groups: dict[tuple[str, str], list[ClusterResult]] = {}
    for result in results:
        groups.setdefault((result.run.fabric, result.run.arm), []).append(result)
    if not groups:
        return []
    rates = {key: median(each.samples_per_s for each in some) for key, some in groups.items()}
    worths = {key: median(each.samples_per_s_per_musd for each in some) for key, some in groups.items()}
    costs = {key: some[0].bill.network_usd for key, some in groups.items()}
    first = next(iter(groups))
    best = pareto([(costs[key], rates[key]) for key in groups])
    return [_row(key, some, rates, worths, first, on) for (key, some), on in zip(groups.items(), best, strict=True)]


Key = tuple[str, str]


def _row(
    key: Key, some: list[ClusterResult], rates: dict[Key, float], worths: dict[Key, float], first: Key, on: bool
) -> SummaryRow:
    def of_steps(*names: str) -> float:
        return median(_mean_s(result, names) for result in some)

    bill = some[0].bill
    return SummaryRow(
        fabric=key[0],
        arm=key[1],
        seeds=len(some),
        gen_s=of_steps("gen_s"),
        train_s=of_steps("train_s"),
        sync_s=median(_sync_s(result) for result in some),
        waits_s=of_steps("gen_waits_weights_s", "gen_waits_room_s"),
        idle_train=median(result.run.idle_share.get(FabricStage.TRAIN, 0.0) for result in some),
        idle_gen=median(result.run.idle_share.get(FabricStage.GEN, 0.0) for result in some),
        staleness=median(_mean_staleness(result) for result in some),
        samples_per_s=rates[key],
        gain=_ratio(rates[key], rates[first]),
        network_usd=bill.network_usd,
        samples_per_s_per_musd=worths[key],
        gain_per_usd=_ratio(worths[key], worths[first]),
        total_usd=None if bill.gpus_usd is None else bill.total_usd,
        pareto=on,
    )


def _mean_s(result: ClusterResult, names: Iterable[str]) -> float:
    """The sum over these, in the mean over steps after the warm-up."""
    measured = result.run.steps[int(result.scenario["loop"]["warmup_steps"]) :]
    return sum(step[name] for step in measured for name in names) / len(measured)


def _sync_s(result: ClusterResult) -> float:
    lengths_s = [span.end_s - span.begin_s for span in result.run.spans if span.stage is FabricStage.WEIGHT_SYNC]
    return fmean(lengths_s or [sum(result.sync_phases_s.values())])


def _mean_staleness(result: ClusterResult) -> float:
    total = sum(result.run.staleness.values())
    return sum(behind * count for behind, count in result.run.staleness.items()) / total if total else 0.0


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else 0.0


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of (cost, worth): whether no other is at least as good in both and better in one."""
    return [not any(c <= cost and w >= worth and (c, w) != (cost, worth) for c, w in points) for cost, worth in points]
