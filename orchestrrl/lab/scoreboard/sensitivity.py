"""Reproduce section 7.2.5 (appendix I) of the OrchestrRL paper: the effect of reconfiguration delays, and the effect of
allocating circuits by traffic instead of spreading them evenly. Also measure effects that the paper does not measure:
mixed fleets, weight sync, failures, and the gain from each of OrchestrRL's additions."""

from collections.abc import Iterator
from dataclasses import replace

from orchestrrl.lab.bench.solve import step
from orchestrrl.lab.scoreboard import cases
from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.claims import ScoreboardRow, beyond
from orchestrrl.lab.scoreboard.fabrics import MODELS
from orchestrrl.lab.scoreboard.generation import on_testbed
from orchestrrl.lab.sim.net.collectives import all_reduce
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fluid import seconds
from orchestrrl.lab.sim.net.model import MessageTransfer, Servers
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages
from orchestrrl.lab.sim.rl.weight_sync import sync_stage
from orchestrrl.lab.sim.train.compute import stage_parameters
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, crosses, groups, periods_of, traffic
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.fabric.topology import DEVICES
from planner.model import ConfigurationId
from planner.solver.makespan import solve

FIGURE = "Appendix I"
TRAIN_GPUS = dict(zip(MODELS, given.SHARED_OUT_GPUS.value, strict=True))
DELAYS_GPUS = dict(zip(MODELS, given.DELAYS_GPUS.value, strict=True))
KINDS = {
    "cp": "ring of keys and values (CP)",
    "pp": "point to point (PP)",
    "ep": "all-to-all (EP)",
    "dp_cp": "all-reduce of gradients (DP)",
    "expert_dp": "all-reduce of experts' gradients (DP)",
}
# Rail-aligned ToRs, as the paper draws them, and ToRs with all NICs of four servers, as in a fat tree.
TORS = {"rail-aligned ToRs": None, "ToRs of 4 servers": 4}


def delays(quick: bool) -> Iterator[ScoreboardRow]:
    """Compare training and weight sync times under several reconfiguration delays at the smallest scale."""
    for model in ("qwen2.5-72b",) if quick else tuple(MODELS):
        gpus = given.SCALES.value[0]
        scenario = cases.at_scale(model, DELAYS_GPUS[model], gpus, MODELS[model]).scenario(["rfabric"])
        found = {
            device: _stage_s(cases.stages_of(scenario, "rfabric", device=device)) for device in given.DEVICES.value
        }
        first = found[given.DEVICES.value[0]]
        for device, (train_s, sync_s) in found.items():
            delay = f"{DEVICES[device].reconfiguration_s * 1e3:g} ms ({device})"
            what = f"{{}} time with circuit changes of {delay} over that of 0.01 ms, {cases.TITLES[model]}"
            yield beyond(what.format("training"), train_s / first[0], figure=FIGURE)
            yield beyond(what.format("weight sync"), sync_s / first[1], figure=FIGURE)


def _stage_s(stages: FabricStages) -> tuple[float, float]:
    times = ArmTimes(stages, "verl_to", 1)
    train = stages.training(SimulatedFailures(), times.job(stages.scenario.samples))
    return train.seconds, times.sync_stage(SimulatedFailures()).seconds


def allocation(quick: bool) -> Iterator[ScoreboardRow]:
    """Compare circuits allocated by traffic with circuits spread evenly over all ToR pairs, and with circuits spread
    evenly over the sending ToR pairs."""
    for model in MODELS:
        for tors, servers_per_tor in TORS.items():
            for kind, times_s in _by_allocation(model, servers_per_tor).items():
                by_traffic_s, senders_s, all_s = times_s
                what = f"{KINDS[kind]}, time with even circuits over time by traffic, {cases.TITLES[model]}, {tors}"
                senders = f"{senders_s / by_traffic_s:.2f} for the sending pairs only"
                why = f"{by_traffic_s * 1e3:.4g} ms by traffic; the ratio is for circuits between all ToRs, {senders}"
                yield beyond(what, all_s / by_traffic_s, figure=FIGURE, why=why)
    if not quick:
        yield from _sync_rows()


def _by_allocation(model: str, servers_per_tor: int | None) -> dict[str, list[float]]:
    """Return three times, in seconds, for each kind of collective that crosses servers: with circuits allocated by
    traffic, with circuits spread evenly over the sending ToR pairs, and with circuits spread evenly over all ToR pairs.
    """
    job = _job(model)
    servers = Servers(count=job.layout.gpus // 8, nic_gbps=given.NIC_GBPS.value)
    exchanges = traffic(job, servers)
    passes, gradients = periods_of(job, exchanges)
    fabrics = [
        build("rfabric", servers, servers_per_tor=servers_per_tor, allocation=each)
        for each in ("traffic", "uniform", "fixed")
    ]
    crossing = (kind for kind in FORWARD_BACKWARD if kind in exchanges and exchanges[kind].crosses)
    transfers = {kind: (passes, exchanges[kind].transfer) for kind in crossing}
    transfers |= {axis: (gradients, each) for axis, each in _all_reduces(job, servers).items()}
    return {
        kind: [seconds(fabric.network(period), transfer) for fabric in fabrics]
        for kind, (period, transfer) in transfers.items()
        if kind in KINDS
    }


def _all_reduces(job: TrainJob, servers: Servers) -> dict[str, MessageTransfer]:
    """Return, by axis, the all-reduces of gradients that a trainer without a distributed optimizer needs."""
    sizes = dict(zip(("dp_cp", "expert_dp"), stage_parameters(job), strict=True))
    return {
        axis: all_reduce(groups(job, axis), parameters * job.constants.gradient_bytes, servers)
        for axis, parameters in sizes.items()
        if parameters and crosses(groups(job, axis), servers)
    }


def _job(model: str) -> TrainJob:
    part = cases.TRAINING[model]
    without_dp = part["tp"] * part.get("cp", 1) * part.get("pp", 1)
    layout = TrainLayout(**part, dp=TRAIN_GPUS[model] // without_dp)
    model_and_gpu = model_named(model), gpu_named(given.GPU.value)
    return TrainJob(*model_and_gpu, layout, *given.SHARED_OUT_STEP.value, constants=cases.TRAIN_CONSTANTS)


def _sync_rows() -> list[ScoreboardRow]:
    model = "qwen2-57b-a14b"
    scenario = cases.at_scale(model, given.SYNC_GPUS.value, given.SCALES.value[1], MODELS[model]).scenario(["rfabric"])
    by_traffic, even = (
        cases.measured(cases.stages_of(scenario, "rfabric", allocation=each)).sync.seconds
        for each in ("traffic", "uniform")
    )
    what = f"weight sync, time with circuits even over sending pairs over time by traffic, {cases.TITLES[model]}"
    return [beyond(what, even / by_traffic, figure=FIGURE, why=f"{by_traffic:.3g} s by traffic")]


MIXED_GPUS = {False: (12, 64, 1024), True: (12, 64)}  # by `quick`
KEPT = ConfigurationId("tp2")  # configuration of the existing engines
SYNC_FABRICS = ("fat_tree", "oversubscribed", "rfabric")


def mixed_fleets(quick: bool) -> Iterator[ScoreboardRow]:
    """Compare the makespans that the solver computes for uniform and for mixed fleets if output lengths are known.
    Makespans include redeployments and moves."""
    for gpus in MIXED_GPUS[quick]:
        problem = step(gpus, 1)
        mixed_s = solve(problem).makespan_s
        alone = {}
        for wanted in problem.configurations:
            # Existing engines may remain.
            kept = tuple(each for each in problem.configurations if each.id in (wanted.id, KEPT))
            alone[str(wanted.id)] = solve(replace(problem, configurations=kept)).makespan_s
        best = min(alone, key=lambda name: alone[name])
        what = f"makespan of a uniform fleet (plus existing tp2 engines) over that of a mixed fleet, {gpus:,} GPUs"
        yield beyond(what, alone[best] / mixed_s, why=f"best uniform fleet: {best}, {alone[best]:.0f} s")


def weight_sync(quick: bool) -> Iterator[ScoreboardRow]:
    model = "qwen2-57b-a14b"
    case = cases.at_scale(model, given.SYNC_GPUS.value, given.SCALES.value[0], MODELS[model])
    for kind in SYNC_FABRICS:
        stages = cases.stages_of(case.scenario([kind]), kind)
        times = ArmTimes(stages, "verl_to", 1)
        job, fleet = times.job(stages.scenario.samples), times.fleet
        found = {each: sync_stage(job, fleet, stages.fabric, each) for each in ("tree", "two_stage", "naive")}
        of = f"{cases.NAMES[kind]}, {cases.TITLES[model]} to {len(fleet)} engines"
        tree = found["tree"]
        why = f"the tree takes {tree.seconds:.3g} s, {tree.seconds / tree.bound_s:.2f} times the lower bound"
        for name, words in (("two_stage", "in two stages, as veRL"), ("naive", "directly from holders")):
            ratio = found[name].seconds / tree.seconds
            yield beyond(f"weight sync {words}, over the tree, {of}", ratio, why=why)


def additions(quick: bool) -> Iterator[ScoreboardRow]:
    """Compare samples per second with and without each of OrchestrRL's additions, on the paper's testbed."""
    testbed = "qwen2.5-14b", given.MAX_TOKENS.value[0]
    usual, no_kv = on_testbed(*testbed), on_testbed(*testbed, kv_transfer=False)
    unadmitted, wide = on_testbed(*testbed, admission=False), on_testbed(*testbed, initial="tp2")
    wanted: tuple[tuple[str, FabricStages, str, FabricStages, str], ...] = (
        ("packing balancer over the paper's rule, without planning", usual, "balancing", usual, "balancing_paper"),
        ("packing balancer over the paper's rule, with planning", usual, "both", usual, "both_paper"),
        ("forecast of the distribution over forecast of its mean", usual, "both", usual, "mean_only"),
        ("known lengths over forecast lengths", usual, "oracle", usual, "both"),
        (
            "plan admission (gain over cost, cooldown) over redeployment at any gain",
            usual,
            "both",
            unadmitted,
            "both",
        ),
        ("KV transfer over KV recomputation", usual, "both", no_kv, "both"),
        ("tuned initial fleet over the paper's eight TP=2 engines", usual, "both", wide, "both"),
    )
    for what, there, arm, here, other in wanted[:1] if quick else wanted:
        with_it, without = (
            cases.measured(stages, name).samples_per_s for stages, name in ((there, arm), (here, other))
        )
        yield beyond(f"{what}, {cases.TITLES[testbed[0]]}, {testbed[1]:,} tokens", with_it / without)


def failures(quick: bool) -> Iterator[ScoreboardRow]:
    """Compare the training time with failed parts of RFabric to the training time without failures (section 5.4 of the
    paper)."""
    model, gpus = "qwen2-57b-a14b", given.SCALES.value[0]
    scenario = cases.at_scale(model, given.FAILURES_GPUS.value, gpus, MODELS[model]).scenario(["rfabric"])
    stages = cases.stages_of(scenario, "rfabric")
    job = scenario.train_job(scenario.samples, given.LENGTH_MEDIAN.value, constants=cases.TRAIN_CONSTANTS)
    whole_s = stages.training(SimulatedFailures(), job).seconds
    lost = {
        "one NIC": SimulatedFailures(nics=frozenset({0})),
        "a quarter of one ToR's uplinks": SimulatedFailures(tor_uplinks={0: 0.25}),
        "half of a PoD's lanes to the core": SimulatedFailures(pod_uplinks={0: 0.5}),
    }
    for what, failed in lost.items():
        ratio = stages.training(failed, job).seconds / whole_s
        yield beyond(f"training time with {what} failed over no failures, RFabric, {cases.TITLES[model]}", ratio)
