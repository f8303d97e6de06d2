"""Reproduce figures 17 and 18 of the OrchestrRL paper: the gain from the scheduler and the fabric together, and the
effect of the fabric on a redeployment of engines."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from orchestrrl.lab.scoreboard import cases
from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.claims import ScoreboardRow, beyond, compared
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.generation import redeployed_stage
from orchestrrl.lab.sim.rl.generation_fleet import Hardware
from orchestrrl.lab.sim.rl.model import GenStage
from orchestrrl.lab.sim.rl.scenario import layout_named
from orchestrrl.lab.sim.workload import requests_of_step
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.paper import paper_engine

MODEL = "qwen3-235b-a22b"
QUICK = 4  # divisor of the number of GPUs in a quick run
BASE, OURS, REFERENCE = "oversubscribed", "rfabric", "fat_tree"
NEAR = "expert groups of 16 GPUs have two servers, which usually share a ToR of six and avoid the 3:1 uplinks"
LONE = "the time of the change and the number of requests are assumptions"


def two_by_two(quick: bool) -> Iterator[ScoreboardRow]:
    case = _case(QUICK if quick else 1)
    wanted = [(kind, arm) for arm in ("verl_to", "both") for kind in (BASE, OURS, *(() if quick else (REFERENCE,)))]
    found = {(kind, arm): cases.measured(cases.stages_of(case.scenario([kind]), kind), arm) for kind, arm in wanted}
    found["lone", "verl_to"] = cases.measured(cases.stages_of(case.scenario([BASE]), "lone"))
    yield from _rows(case, found)
    for some in dict.fromkeys((case, _fewer_train(case, found))):
        yield from _lone_rows(some, found)
    if not quick:
        ours = found[OURS, "both"].samples_per_s / found[REFERENCE, "both"].samples_per_s
        yield beyond("RFabric over a full fat tree, both with OrchestrRL's scheduler", ours, figure="Figure 17")


def _case(fewer: int) -> cases.Case:
    train_gpus, gen_gpus = (count // fewer for count in given.CODESIGN_GPUS.value)
    return cases.at_scale(MODEL, train_gpus, train_gpus + gen_gpus, given.CODESIGN_LAYOUTS.value)


def _fewer_train(case: cases.Case, found: Mapping[tuple[str, str], cases.SteadyStep]) -> cases.Case:
    """Return the case with fewer training GPUs, so that the ratio of generation time to training time on RFabric equals
    the ratio in section 2 of the paper. The paper does not state the number of training GPUs at this scale."""
    ours, unit = found[OURS, "verl_to"], cases.UNITS[MODEL]
    wanted = case.train_gpus * given.GEN_OVER_TRAIN.value * ours.train.seconds / ours.gen.seconds
    return replace(case, train_gpus=min(case.train_gpus, max(unit, round(wanted / unit) * unit)))


def _rows(case: cases.Case, found: Mapping[tuple[str, str], cases.SteadyStep]) -> Iterator[ScoreboardRow]:
    base = found[BASE, "verl_to"]
    for name, key in (("scheduler_only", (BASE, "both")), ("fabric_only", (OURS, "verl_to")), ("both", (OURS, "both"))):
        here, words = found[key], name.replace("_", " ")
        rate = here.samples_per_s / base.samples_per_s
        why, of = f"{_why(base, here)}; {NEAR}", f"{words}, {case.gpus:,} GPUs"
        yield compared("Figure 17", f"throughput, {of}", f"codesign.throughput.{name}", rate, why)
        worth = rate * base.network_usd / here.network_usd
        cost = f"{why}; the network costs {here.network_usd / base.network_usd:.2f} times the baseline's"
        yield compared("Figure 17", f"throughput per dollar, {of}", f"codesign.per_dollar.{name}", worth, cost)


def _why(base: cases.SteadyStep, here: cases.SteadyStep) -> str:
    return (
        f"generation takes {base.gen.seconds:.0f} s on the baseline and {here.gen.seconds:.0f} s here, training"
        f" {base.train.seconds:.0f} and {here.train.seconds:.0f} s (experts' all-to-all"
        f" {base.train.parts_s['ep']:.0f} and {here.train.parts_s['ep']:.0f} s); the longer of the two sets the rate;"
        f" generation alone is {base.gen.seconds / here.gen.seconds:.2f} times as fast, training alone"
        f" {base.train.seconds / here.train.seconds:.2f} times"
    )


def _lone_rows(case: cases.Case, found: Mapping[tuple[str, str], cases.SteadyStep]) -> Iterator[ScoreboardRow]:
    """Yield the rows for a baseline in which every server has its own ToR, with three uplinks for its eight NICs.
    `case` determines the number of training GPUs."""
    there = cases.stages_of(case.scenario([BASE]), "lone")
    lone = cases.retrained(found["lone", "verl_to"], there)
    ours = cases.stages_of(case.scenario([OURS]), OURS)
    for name, arm in (("fabric_only", "verl_to"), ("both", "both")):
        here = cases.retrained(found[OURS, arm], ours)
        of = f"{name.replace('_', ' ')}, {case.train_gpus:,} training and {case.gen_gpus:,} generation GPUs"
        what = f"throughput, {of}, baseline with one server and three uplinks per ToR"
        rate = here.samples_per_s / lone.samples_per_s
        yield compared("Figure 17", what, f"codesign.throughput.{name}", rate, _why(lone, here))


# --- Figure 18


def change_of_engines(quick: bool) -> Iterator[ScoreboardRow]:
    case = _case(QUICK if quick else 1)
    train_gpus, afd = case.train_gpus, layout_named(given.AFD.value)
    servers = Servers(count=case.gpus // 8, nic_gbps=given.NIC_GBPS.value)
    workload = case.scenario([BASE]).generation.workload
    requests = requests_of_step(workload, 1, 0)
    fabrics = {
        BASE: build(BASE, servers, ratio=given.OVERSUBSCRIPTION.value),
        OURS: build(OURS, servers, train_servers=train_gpus // 8),
        "lone": build(BASE, servers, ratio=given.OVERSUBSCRIPTION.value, radix=cases.LONE_RADIX),
    }

    def run(fabric: SimulatedFabric, left_share: float) -> GenStage:
        hardware = Hardware(model_named(MODEL), gpu_named(given.GPU.value), paper_engine(model_named(MODEL)))
        where = range(train_gpus, train_gpus + case.gen_gpus)
        return redeployed_stage(hardware, where, (afd, layout_named("tp8")), requests, left_share, fabric)

    shares = given.LEFT_SHARES.value[1:4] if quick else given.LEFT_SHARES.value
    tried = {share: run(fabrics[BASE], share) for share in shares}
    best = min(tried, key=lambda share: tried[share].seconds)
    yield from _redeployment_rows(tried[best], run(fabrics[OURS], best), run(fabrics["lone"], best), best)


def _redeployment_rows(base: GenStage, ours: GenStage, lone: GenStage, left_share: float) -> Iterator[ScoreboardRow]:
    parts = (
        ("AFD phase", "afd_phase", given.AFD.value),
        ("KV migration", "kv_migration", "moving KV"),
        ("generation step", "gen_step", ""),
    )
    for words, claim, phase in parts:
        then_s, now_s, alone_s = (each.phases_s[phase] if phase else each.seconds for each in (base, ours, lone))
        why = (
            f"{then_s:.3g} to {now_s:.3g} s, changed with {left_share:.0%} of requests left; an instance has five"
            " servers and a ToR of the 3:1 tree six, so that most traffic stays below ToRs, and micro-batches hide"
            f" the rest; with one server and three uplinks per ToR it would be {now_s / alone_s - 1:+.1%}"
        )
        what = f"{words} on RFabric over the 3:1 fat tree, minus 1"
        yield compared("Figure 18", what, f"fabric_effect.{claim}", now_s / then_s - 1, why, "share")
        lone_what = f"{what}, one server and three uplinks per ToR"
        yield compared("Figure 18", lone_what, f"fabric_effect.{claim}", now_s / alone_s - 1, LONE, "share")
