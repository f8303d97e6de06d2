"""Figures 15 and 16: what networks cost, and what they bring for it at several link rates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.cases import FABRICS, NAMES, TITLES, Case, SteadyStep, balanced, measured, stages_of
from orchestrrl.lab.scoreboard.fabrics import MODELS
from orchestrrl.lab.scoreboard.model import ScoreboardRow
from orchestrrl.lab.scoreboard.rows import beyond, compared
from orchestrrl.lab.sim.cost import gpus_cost_usd, network_cost_usd
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fabrics.rfabric import rfabric
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.results import pareto

GPUS = 2048
LANES = (
    "each of a PoD's lanes to the core, half as many as its ToRs' uplinks, is a fibre between two ports of OCSs, which"
    " the paper's figure seems to leave out: without lanes"
)
MIXNET = (
    "the paper has it beside RFabric and the 3:1 tree; six of a server's eight NICs have one transceiver, one fibre and"
    " one port of an OCS above them, and no port of a packet switch"
)
GPU_PRICE = "an H800 is taken at an H100's 27,500 USD; the paper's figures come to one of 23,500"


def costs(quick: bool) -> list[ScoreboardRow]:
    rows = []
    for gbps in given.COST_RATES_GBPS.value:
        servers = Servers(count=GPUS // 8, nic_gbps=float(gbps))
        usd = {kind: network_cost_usd(build(kind, servers).inventory(), gbps).total_usd for kind in FABRICS}
        alone = build("rfabric", servers).inventory()
        without_lanes = replace(
            alone, ocs_ports=alone.ocs_ports - 2 * _lanes(servers), fibers=alone.fibers - _lanes(servers)
        )
        bare = network_cost_usd(without_lanes, gbps).total_usd / usd["fat_tree"]
        for kind in FABRICS[1:]:
            what, ours = f"cost of {NAMES[kind]} over fat tree, {gbps} Gbps", usd[kind] / usd["fat_tree"]
            if kind == "mixnet":
                rows.append(beyond(what, ours, figure="Figure 15", why=MIXNET))
            else:
                why = f"{LANES} {bare:.2f}" if kind == "rfabric" else "where 3 to 1 is, is ours to choose"
                rows.append(compared("Figure 15", what, f"fabric.cost.{kind}", ours, why))
        ours = usd["fat_tree"] / gpus_cost_usd("H800", GPUS)
        what = f"cost of the fat tree over that of all GPUs, {gbps} Gbps"
        rows.append(compared("Figure 15", what, f"fabric.cost_vs_gpus.{gbps}", ours, GPU_PRICE))
    return rows


def _lanes(servers: Servers) -> int:
    return len(rfabric(servers).site.lanes)


def frontier(quick: bool) -> list[ScoreboardRow]:
    """Both models at the smallest scale: what each fabric brings for its price."""
    models = ("qwen2-57b-a14b",) if quick else tuple(MODELS)
    rates = given.LINK_RATES_GBPS.value[1:2] if quick else given.LINK_RATES_GBPS.value
    rows = []
    for model in models:
        case = balanced(model, given.SCALES.value[0], MODELS[model])
        found: dict[tuple[str, float], SteadyStep] = {}
        for gbps in rates:
            scenario = replace(case, nic_gbps=gbps).scenario()
            for kind in FABRICS:
                found[kind, gbps] = measured(stages_of(scenario, kind))
            rows += _efficiency_rows(case, gbps, {kind: found[kind, gbps] for kind in FABRICS})
        rows.append(_frontier_row(case, rates, found))
    return rows


def _efficiency_rows(case: Case, gbps: float, found: Mapping[str, SteadyStep]) -> list[ScoreboardRow]:
    worth = {kind: each.samples_per_s / each.network_usd for kind, each in found.items()}
    rate = {kind: each.samples_per_s / found["fat_tree"].samples_per_s for kind, each in found.items()}
    cost = {kind: each.network_usd / found["fat_tree"].network_usd for kind, each in found.items()}
    rows = []
    for kind in ("fat_tree", "rail_optimized", "mixnet"):
        what = f"throughput per dollar of RFabric over {NAMES[kind]}, {TITLES[case.model]}, {gbps:g} Gbps"
        why = (
            f"of the fat tree's, RFabric has {rate['rfabric']:.2f} of the throughput at {cost['rfabric']:.2f} of the"
            f" cost, {NAMES[kind]} {rate[kind]:.2f} at {cost[kind]:.2f}"
        )
        ours = worth["rfabric"] / worth[kind]
        rows.append(compared("Figure 16", what, f"fabric.cost_efficiency.{kind}", ours, why))
    return rows


def _frontier_row(case: Case, rates: Sequence[float], found: Mapping[tuple[str, float], SteadyStep]) -> ScoreboardRow:
    points = list(found)
    on = pareto([(found[point].network_usd, found[point].samples_per_s) for point in points])
    best = [f"{NAMES[kind]} at {gbps:g}" for (kind, gbps), is_best in zip(points, on, strict=True) if is_best]
    ours = sum(name.startswith("RFabric") for name in best) / len(rates)
    what = f"of RFabric's {len(rates)} link rates on the Pareto frontier, {TITLES[case.model]}"
    return beyond(what, ours, "share", figure="Figure 16", why=f"on it: {', '.join(best)}")
