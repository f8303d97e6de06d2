"""Run a cluster scenario: each arm on each fabric, over each seed; the same requests for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.sim.cost import PRICES_USD, network_cost_usd
from orchestrrl.lab.sim.net.fabrics.base import FabricStage, SimulatedFailures
from orchestrrl.lab.sim.rl.generation_fleet import leaves_servers, left_idle
from orchestrrl.lab.sim.rl.loop import run_loop
from orchestrrl.lab.sim.rl.model import RlRun, SyncStage, TimelineSpan, TrainStage
from orchestrrl.lab.sim.rl.results import Bill, ClusterResult
from orchestrrl.lab.sim.rl.scenario import ClusterScenario
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages, lane_of
from orchestrrl.lab.sim.rl.training import LOG_PROBS, RESPONSE_STREAM, ResponseStream, response_stream, training_bytes
from orchestrrl.lab.sim.run import CONTROLS

Point = TypeVar("Point")
Report = Callable[[str, int, int], None]  # what is under way, done, in all

NAMES = {FabricStage.TRAIN: "training", FabricStage.GEN: "generation"}
MOST_POINTS = 1000  # of a curve that is kept for pictures


def run_cluster(
    scenario: ClusterScenario,
    report: Report = lambda what, done, total: None,
    keep: Callable[[Sequence[ClusterResult]], None] = lambda results: None,
) -> list[ClusterResult]:
    """By fabric, arm and seed. `keep` is given what there is after each. Raises ProblemFaults where no engine holds the
    longest request, and Permanent where a fault holds a stage up for good or samples do not allow the loop to go on."""
    arms, seeds = scenario.generation.arms, scenario.seeds
    total = len(scenario.fabrics) * len(arms) * len(seeds)
    results: list[ClusterResult] = []
    for section in scenario.fabrics:
        stages = FabricStages(scenario, section)
        for arm in arms:
            for seed in seeds:
                report(f"{section.title}, {arm}, seed {seed}", len(results), total)
                results.append(run_arm(stages, arm, seed))
                keep(results)
    report("done", total, total)
    return results


def run_arm(stages: FabricStages, arm: str, seed: int) -> ClusterResult:
    scenario, times = stages.scenario, ArmTimes(stages, arm, seed)
    try:
        run = run_loop(
            scenario.rules(),
            times.batches,
            times,
            warmup_steps=scenario.loop.warmup_steps,
            fabric=stages.section.title,
            arm=arm,
            seed=seed,
        )
        job = times.job(scenario.loop.batch_samples or times.batches[-1].finished)
        trained, synced = (
            stages.training(SimulatedFailures(), job),
            times.sync_stage(SimulatedFailures(), run.sync_beside),
        )
    except ValueError as error:
        raise Permanent(f"{stages.section.title}, {arm}: {error}") from error
    last, log_probs = times.healthy[-1], trained.parts_s[LOG_PROBS]
    streamed = response_stream(times.job(last.samples), stages.where, stages.fabric)
    return ClusterResult(
        scenario=scenario.document(),
        run=replace(
            run,
            spans=(*run.spans, *_fault_spans(scenario, run.seconds)),
            # Of what training took: what faults lengthen, they lengthen alike.
            steps=tuple(
                {**row, "train_log_probs_s": row["train_s"] * log_probs / trained.seconds} for row in run.steps
            ),
            tier_bytes={
                FabricStage.TRAIN.value: training_bytes(job, scenario.training, stages.fabric),
                FabricStage.GEN.value: last.tier_bytes,
                FabricStage.WEIGHT_SYNC.value: synced.tier_bytes,
                RESPONSE_STREAM: streamed.tier_bytes,
            },
            windows=_thinned(trained.update.windows),
            remaining=_thinned(last.remaining),
            notes=(*_notes(run, trained, synced, times), _streamed(streamed)),
        ),
        bill=_bill(stages),
        train_parts_s=dict(trained.parts_s),
        train_mfu=trained.mfu,
        gen_phases_s=dict(last.phases_s),
        sync_phases_s=dict(synced.phases_s),
    )


def _bill(stages: FabricStages) -> Bill:
    """Of a rate that no prices are known of, nothing."""
    cluster = stages.scenario.cluster
    gpus_usd = None if cluster.gpu_usd is None else cluster.gpu_usd * cluster.gpus
    if cluster.nic_gbps not in PRICES_USD:
        return Bill(0.0, {}, gpus_usd)
    priced = network_cost_usd(stages.fabric.inventory(), cluster.nic_gbps)
    parts_usd = {part: float(usd) for part, usd in priced.items()}
    return Bill(sum(parts_usd.values()), parts_usd, gpus_usd)


def _fault_spans(scenario: ClusterScenario, until_s: float) -> list[TimelineSpan]:
    return [
        TimelineSpan(
            "fault",
            lane_of(scenario, fault.fail, fault.of[0]),
            number,
            fault.at_s,
            min(fault.back_s, until_s),
            str(fault),
        )
        for number, fault in enumerate(scenario.schedule.faults)
        if fault.at_s < until_s
    ]


def _notes(run: RlRun, trained: TrainStage, synced: SyncStage, times: ArmTimes) -> list[str]:
    notes = [f"weights are brought to {len(times.fleet)} x {times.stages.tuned(times.seed).id}"]
    waits_s = [sum(step[name] for step in run.steps) for name in ("gen_waits_weights_s", "train_waits_samples_s")]
    notes.append(f"generation waited {waits_s[0]:.1f} s for weights, training {waits_s[1]:.1f} s for samples")
    if trained.updates > 1:
        notes.append(f"a training step is {trained.updates} optimiser steps of {trained.update.seconds:.1f} s")
    if trained.update.waits_s > 0:
        notes.append(f"an optimiser step waits {trained.update.waits_s:.3f} s for circuits")
    if times.stages.fabric.reconfigures_s:
        notes.append(f"weight sync: circuits {synced.circuits.replace('_', ' ')}")
    notes += _beside(run, synced, times)
    notes += _idle(times)
    gbps = times.stages.scenario.cluster.nic_gbps
    if gbps not in PRICES_USD:
        notes.append(f"no prices are known of {gbps:g} Gbps")
    left = sum(batch.begun for batch in times.batches) - run.samples
    if left:
        notes.append(f"{left} samples were begun and not trained on before the end")
    return notes


def _beside(run: RlRun, synced: SyncStage, times: ArmTimes) -> list[str]:
    """What weights on their way, and those who send beside them, cost each other."""
    if not synced.held_s:
        return []
    alone_s, who = times.sync_stage(SimulatedFailures()).seconds, " and ".join(NAMES[stage] for stage in synced.held_s)
    train_s, gen_s = (sum(step[name] for step in run.steps) for name in ("train_held_s", "gen_held_s"))
    return [
        f"weight sync beside {who} takes {synced.seconds:.3f} s, {alone_s:.3f} s alone",
        f"weights on their way held training up by {train_s:.3f} s, generation by {gen_s:.3f} s",
    ]


def _idle(times: ArmTimes) -> list[str]:
    """Where engines that stay inside PoDs leave GPUs over."""
    ready, where = times.stages.ready(SimulatedFailures()), times.stages.where
    planned = "; plans do not know of PoDs, and may use them" if times.arm in CONTROLS else ""
    return [
        f"{len(fleet)} x {name} stay inside PoDs, which leaves {idle} of {where.count} GPUs idle{planned}"
        for name, fleet in ready.fleets.items()
        if leaves_servers(fleet, ready.fabric.servers) and (idle := left_idle(fleet, where))
    ]


def _streamed(stream: ResponseStream) -> str:
    size, at_once = f"{stream.bytes / 1e6:,.2f} MB", f"{stream.seconds * 1e3:.2g} ms"
    return f"answers of a step are {size} on their way to training, {at_once} if all went at once"


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Evenly, the first and the last kept."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    return tuple(points[round(i * (len(points) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS))
