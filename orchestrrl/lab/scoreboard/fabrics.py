"""Reproduce figures 13 to 16 of the OrchestrRL paper: throughput of fabrics, times of stages, network costs, and
throughput per dollar."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrrl.lab.scoreboard import cases
from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.claims import ScoreboardRow, beyond, compared
from orchestrrl.lab.sim.cost import H800_USD, network_cost_usd
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fabrics.rfabric import rfabric
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.results import pareto

MODELS: Mapping[str, tuple[str, ...]] = {"qwen2.5-72b": given.GEN_LAYOUTS.value, "qwen2-57b-a14b": (given.AFD.value,)}
OF_FIGURE_14 = "qwen2-57b-a14b"
ONCE = "gradients are exchanged once for all samples here, and after every 512 further below"
CLAIMED = ("topoopt", "mixnet", "rfabric")


def throughput(model: str, quick: bool) -> Iterator[ScoreboardRow]:
    scales = given.SCALES.value[:1] if quick else given.SCALES.value
    for gpus in scales:
        case = cases.balanced(model, gpus, MODELS[model])
        found = on_fabrics(case)
        yield from _throughput_rows(case, found)
        yield from _divided_rows(case, found)


def on_fabrics(case: cases.Case) -> dict[str, cases.SteadyStep]:
    scenario = case.scenario()
    return {kind: cases.measured(cases.stages_of(scenario, kind)) for kind in cases.NAMES}


def _throughput_rows(case: cases.Case, found: Mapping[str, cases.SteadyStep]) -> Iterator[ScoreboardRow]:
    first = found["fat_tree"]
    for kind in (*cases.FABRICS[1:], "lone"):
        what = f"throughput of {cases.NAMES[kind]} over fat tree, {cases.TITLES[case.model]} on {case.gpus:,} GPUs"
        ours = found[kind].samples_per_s / first.samples_per_s
        if kind in CLAIMED:
            why = f"{_why(case, first, found[kind])}; {ONCE}"
            yield compared("Figure 13", what, f"fabric.throughput.{kind}", ours, why)
        else:
            yield beyond(what, ours, figure="Figure 13", why=_parts(first, found[kind]))


def _divided_rows(case: cases.Case, found: Mapping[str, cases.SteadyStep]) -> Iterator[ScoreboardRow]:
    """Yield the rows for several optimiser steps per training step, each with its own exchange of gradients. The paper
    does not state the number of optimiser steps. With a single optimiser step, the exchange of gradients takes little
    time."""
    updates = max(1, found["fat_tree"].gen.samples // given.STEP_SAMPLES.value)
    scenario = replace(case, updates=updates).scenario()
    here = {kind: cases.retrained(found[kind], cases.stages_of(scenario, kind)) for kind in ("fat_tree", *CLAIMED)}
    first = here["fat_tree"]
    for kind in CLAIMED:
        of = f"{cases.TITLES[case.model]} on {case.gpus:,} GPUs, {updates} optimiser steps"
        what = f"throughput of {cases.NAMES[kind]} over fat tree, {of}"
        ours = here[kind].samples_per_s / first.samples_per_s
        yield compared("Figure 13", what, f"fabric.throughput.{kind}", ours, _why(case, first, here[kind]))


def _why(case: cases.Case, first: cases.SteadyStep, other: cases.SteadyStep) -> str:
    near = other.samples_per_s > first.samples_per_s * 0.9
    more = "; engines inside a server do not depend on the fabric" if near else ""
    return f"{case.train_gpus} training GPUs: {_parts(first, other)}{more}"


def _parts(first: cases.SteadyStep, other: cases.SteadyStep) -> str:
    """Return a text with the times of each stage on the fat tree (`first`) and on the other fabric. The text includes
    the parts of training whose times differ noticeably between the two fabrics."""
    times = [f"training {first.train.seconds:.0f} to {other.train.seconds:.0f} s"]
    for part, then_s in first.train.parts_s.items():
        now_s = other.train.parts_s[part]
        if abs(now_s - then_s) > 0.02 * first.train.seconds:
            times.append(f"of which {part} {then_s:.0f} to {now_s:.0f} s")
    times.append(f"generation {first.gen.seconds:.0f} to {other.gen.seconds:.0f} s")
    times.append(f"weight sync {first.sync.seconds:.2f} to {other.sync.seconds:.2f} s")
    return ", ".join(times)


def stage_times(quick: bool) -> Iterator[ScoreboardRow]:
    case = cases.balanced(OF_FIGURE_14, given.SCALES.value[0 if quick else 1], MODELS[OF_FIGURE_14])
    found = on_fabrics(case)
    first = found["fat_tree"]
    for kind in (*cases.FABRICS[1:], "lone"):
        other = found[kind]
        stages = (
            ("training", first.train.seconds, other.train.seconds),
            ("generation under AFD", first.gen.seconds, other.gen.seconds),
            ("weight sync", first.sync.seconds, other.sync.seconds),
        )
        for stage, then_s, now_s in stages:
            what = f"{stage} on {cases.NAMES[kind]} over fat tree, {cases.TITLES[case.model]} on {case.gpus:,} GPUs"
            why = f"{then_s:.3g} s on the fat tree"
            yield beyond(what, now_s / then_s, figure="Figure 14", why=why)


GPUS = 2048
LANES = (
    "each of a PoD's lanes to the core, half as many as its ToRs' uplinks, is a fibre between two OCS ports, which the"
    " paper's figure seems to omit; without lanes"
)
MIXNET = (
    "the paper shows it near RFabric and the 3:1 tree; six of a server's eight NICs have one transceiver, one fibre and"
    " one OCS port, and no port of a packet switch"
)
GPU_PRICE = "an H800 is priced as an H100, at 27,500 USD; the paper's figures imply 23,500"


def costs(quick: bool) -> Iterator[ScoreboardRow]:
    for gbps in given.COST_RATES_GBPS.value:
        servers = Servers(count=GPUS // 8, nic_gbps=float(gbps))
        usd = {kind: sum(network_cost_usd(build(kind, servers).inventory(), gbps).values()) for kind in cases.FABRICS}
        alone = build("rfabric", servers).inventory()
        without_lanes = replace(
            alone, ocs_ports=alone.ocs_ports - 2 * _lanes(servers), fibers=alone.fibers - _lanes(servers)
        )
        bare = sum(network_cost_usd(without_lanes, gbps).values()) / usd["fat_tree"]
        for kind in cases.FABRICS[1:]:
            what, ours = f"cost of {cases.NAMES[kind]} over fat tree, {gbps} Gbps", usd[kind] / usd["fat_tree"]
            if kind == "mixnet":
                yield beyond(what, ours, figure="Figure 15", why=MIXNET)
            else:
                why = f"{LANES} {bare:.2f}" if kind == "rfabric" else "the oversubscribed tier is an assumption"
                yield compared("Figure 15", what, f"fabric.cost.{kind}", ours, why)
        ours = usd["fat_tree"] / (H800_USD * GPUS)
        what = f"cost of the fat tree over the cost of all GPUs, {gbps} Gbps"
        yield compared("Figure 15", what, f"fabric.cost_vs_gpus.{gbps}", ours, GPU_PRICE)


def _lanes(servers: Servers) -> int:
    return len(rfabric(servers).site.lanes)


def frontier(quick: bool) -> Iterator[ScoreboardRow]:
    """Compare the fabrics' throughput per dollar at the smallest scale, for both models or, in a quick run, for one
    model."""
    models = ("qwen2-57b-a14b",) if quick else tuple(MODELS)
    rates = given.LINK_RATES_GBPS.value[1:2] if quick else given.LINK_RATES_GBPS.value
    for model in models:
        case = cases.balanced(model, given.SCALES.value[0], MODELS[model])
        found: dict[tuple[str, float], cases.SteadyStep] = {}
        for gbps in rates:
            scenario = replace(case, nic_gbps=gbps).scenario()
            for kind in cases.FABRICS:
                found[kind, gbps] = cases.measured(cases.stages_of(scenario, kind))
            yield from _efficiency_rows(case, gbps, {kind: found[kind, gbps] for kind in cases.FABRICS})
        yield _frontier_row(case, rates, found)


def _efficiency_rows(case: cases.Case, gbps: float, found: Mapping[str, cases.SteadyStep]) -> Iterator[ScoreboardRow]:
    worth = {kind: each.samples_per_s / each.network_usd for kind, each in found.items()}
    rate = {kind: each.samples_per_s / found["fat_tree"].samples_per_s for kind, each in found.items()}
    cost = {kind: each.network_usd / found["fat_tree"].network_usd for kind, each in found.items()}
    for kind in ("fat_tree", "rail_optimized", "mixnet"):
        what = f"throughput per dollar of RFabric over {cases.NAMES[kind]}, {cases.TITLES[case.model]}, {gbps:g} Gbps"
        why = (
            f"relative to the fat tree, RFabric has {rate['rfabric']:.2f} of the throughput at {cost['rfabric']:.2f} of"
            f" the cost, {cases.NAMES[kind]} {rate[kind]:.2f} at {cost[kind]:.2f}"
        )
        ours = worth["rfabric"] / worth[kind]
        yield compared("Figure 16", what, f"fabric.cost_efficiency.{kind}", ours, why)


def _frontier_row(
    case: cases.Case, rates: Sequence[float], found: Mapping[tuple[str, float], cases.SteadyStep]
) -> ScoreboardRow:
    points = list(found)
    on = pareto([(found[point].network_usd, found[point].samples_per_s) for point in points])
    best = [f"{cases.NAMES[kind]} at {gbps:g}" for (kind, gbps), is_best in zip(points, on, strict=True) if is_best]
    ours = sum(name.startswith("RFabric") for name in best) / len(rates)
    what = f"fraction of RFabric's {len(rates)} link rates on the Pareto frontier, {cases.TITLES[case.model]}"
    return beyond(what, ours, "share", figure="Figure 16", why=f"on the frontier: {', '.join(best)}")
