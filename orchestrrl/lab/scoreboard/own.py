"""Beyond the paper: mixed fleets against those of one configuration, and what each of our own additions is worth."""

from dataclasses import replace

from orchestrrl.lab.bench.solve import step
from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.cases import NAMES, TITLES, Case, at_scale, measured, stages_of
from orchestrrl.lab.scoreboard.fabrics import MODELS
from orchestrrl.lab.scoreboard.generation import MODELS as TESTBED_GPUS
from orchestrrl.lab.scoreboard.generation import TESTBED
from orchestrrl.lab.scoreboard.model import ScoreboardRow
from orchestrrl.lab.scoreboard.rows import beyond
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages
from orchestrrl.lab.sim.rl.weight_sync import sync_stage
from planner.model import ConfigurationId
from planner.solver.makespan import solve
from planner.solver.problem import MakespanProblem

MIXED_GPUS = {False: (12, 64, 1024), True: (12, 64)}  # by whether it is quick
KEPT = ConfigurationId("tp2")  # of the engines that are there when it is solved
SYNC_FABRICS = ("fat_tree", "oversubscribed", "rfabric")


def mixed_fleets(quick: bool) -> list[ScoreboardRow]:
    """Makespans that the solver finds, lengths known, redeployments and moves included."""
    rows = []
    for gpus in MIXED_GPUS[quick]:
        problem = step(gpus, 1)
        mixed_s = solve(problem).makespan_s
        alone = {str(each.id): solve(_alone(problem, each.id)).makespan_s for each in problem.configurations}
        best = min(alone, key=lambda name: alone[name])
        what = f"makespan of a fleet of one configuration (and tp2, as it is) over a mixed one, {gpus:,} GPUs"
        rows.append(beyond(what, alone[best] / mixed_s, why=f"best of one: {best}, {alone[best]:.0f} s"))
    return rows


def _alone(problem: MakespanProblem, wanted: ConfigurationId) -> MakespanProblem:
    """Engines that are there may stay as they are."""
    return replace(problem, configurations=tuple(each for each in problem.configurations if each.id in (wanted, KEPT)))


def weight_sync(quick: bool) -> list[ScoreboardRow]:
    model = "qwen2-57b-a14b"
    case = at_scale(model, given.SYNC_GPUS.value, given.SCALES.value[0], MODELS[model])
    rows = []
    for kind in SYNC_FABRICS:
        stages = stages_of(case.scenario([kind]), kind)
        times = ArmTimes(stages, "verl_to", 1)
        job, fleet = times.job(stages.scenario.samples), times.fleet
        found = {each: sync_stage(job, [fleet], stages.fabric, each) for each in ("tree", "two_stage", "naive")}
        of = f"{NAMES[kind]}, {TITLES[model]} to {len(fleet)} engines"
        tree = found["tree"]
        why = f"the tree takes {tree.seconds:.3g} s, {tree.seconds / tree.bound_s:.2f} times what no plan can pass"
        for name, words in (("two_stage", "two stages, as veRL"), ("naive", "everyone from a holder")):
            ratio = found[name].seconds / tree.seconds
            rows.append(beyond(f"weight sync in {words}, over our tree, {of}", ratio, why=why))
    return rows


def additions(quick: bool) -> list[ScoreboardRow]:
    """Samples per second with an addition over those without it, on the testbed."""
    model, max_tokens = "qwen2.5-14b", given.MAX_TOKENS.value[0]
    prompts = given.BATCH.value // given.SAMPLES.value
    gpus = TESTBED_GPUS[model]
    case = Case(model, gpus, gpus, prompts, max_tokens, given.TESTBED_LAYOUTS.value, steps=2)
    usual, no_kv = _stages(case), _stages(replace(case, kv_transfer=False))
    unadmitted = _stages(replace(case, admission=False))
    wide = _stages(replace(case, initial="tp2"))
    wanted: tuple[tuple[str, FabricStages, str, FabricStages, str], ...] = (
        ("packing balancer over the paper's rule, balancing alone", usual, "balancing", usual, "balancing_paper"),
        ("packing balancer over the paper's rule, with planning", usual, "both", usual, "both_paper"),
        ("forecast of the distribution over its mean alone", usual, "both", usual, "mean_only"),
        ("knowing all lengths over forecasting them", usual, "oracle", usual, "both"),
        (
            "admission (gain over cost, cooldown) over changing whenever it pays at all",
            usual,
            "both",
            unadmitted,
            "both",
        ),
        ("KV handed over, over computed again", usual, "both", no_kv, "both"),
        ("beginning with the tuned fleet over the paper's eight of TP=2", usual, "both", wide, "both"),
    )
    rows = []
    for what, there, arm, here, other in wanted[:1] if quick else wanted:
        with_it, without = (measured(stages, name).samples_per_s for stages, name in ((there, arm), (here, other)))
        rows.append(beyond(f"{what}, {TITLES[model]}, {max_tokens:,} tokens", with_it / without))
    return rows


def _stages(case: Case) -> FabricStages:
    return stages_of(case.scenario([TESTBED]), TESTBED)


def failures(quick: bool) -> list[ScoreboardRow]:
    """Section 5.4: what is left of an iteration's speed when parts of RFabric are lost."""
    model, gpus = "qwen2-57b-a14b", given.SCALES.value[0]
    scenario = at_scale(model, given.FAILURES_GPUS.value, gpus, MODELS[model]).scenario(["rfabric"])
    stages = stages_of(scenario, "rfabric")
    job = scenario.train_job(scenario.samples, given.LENGTH_MEDIAN.value)
    whole_s = stages.training(SimulatedFailures(), job).seconds
    lost = {
        "one NIC": SimulatedFailures(nics=frozenset({0})),
        "a quarter of one ToR's uplinks": SimulatedFailures(tor_uplinks={0: 0.25}),
        "half of a PoD's lanes to the core": SimulatedFailures(pod_uplinks={0: 0.5}),
    }
    rows = []
    for what, failed in lost.items():
        ratio = stages.training(failed, job).seconds / whole_s
        rows.append(beyond(f"training with {what} lost over all there, RFabric, {TITLES[model]}", ratio))
    return rows
