"""Run each arm of a cluster scenario on each fabric with each seed, with the same requests. Also search for the split
of GPUs between training and generation that has the highest throughput.

StreamRL divides a GPU budget in a similar way (arXiv 2504.15930, its resource allocation): it times training and
generation under each split, and chooses the split whose slower stage is fastest. The search in this module compares the
throughput of the simulated loop, which includes weight sync, waiting, and modes in which stages do not overlap. The
search assumes that more GPUs never make a stage longer, so that throughput has a single peak.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import TypeVar

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.lab.sim.cost import PRICES_USD, network_cost_usd
from orchestrrl.lab.sim.net.fabrics.base import FabricStage, SimulatedFailures
from orchestrrl.lab.sim.rl.generation_fleet import leaves_servers, left_idle
from orchestrrl.lab.sim.rl.loop import run_loop
from orchestrrl.lab.sim.rl.model import RlRun, SyncStage, TimelineSpan, TrainStage
from orchestrrl.lab.sim.rl.results import Bill, ClusterResult, rows
from orchestrrl.lab.sim.rl.scenario import ClusterScenario, faults_between_sections
from orchestrrl.lab.sim.rl.stages import TUNED, ArmTimes, FabricStages, lane_of
from orchestrrl.lab.sim.rl.training import LOG_PROBS, RESPONSE_STREAM, ResponseStream, response_stream, training_bytes
from orchestrrl.lab.sim.run import CONTROLS, Report
from orchestrrl.lab.sim.scenario import ARMS

Point = TypeVar("Point")

NAMES = {FabricStage.TRAIN: "training", FabricStage.GEN: "generation"}
MOST_POINTS = 1000  # stored points of a curve, for charts


def run_cluster(
    scenario: ClusterScenario,
    report: Report = lambda what, done, total: None,
    keep: Callable[[Sequence[ClusterResult]], None] = lambda results: None,
) -> list[ClusterResult]:
    """Run the scenario and return the results in the order of fabrics, arms and seeds. After each run, `keep` is called
    with all results so far. Raises ProblemFaults if no engine can hold the longest request. Raises Permanent if a
    permanent fault prevents a stage from ending, or sample counts prevent a step from beginning."""
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
        run = run_loop(scenario.rules(), times.batches, times, warmup_steps=scenario.loop.warmup_steps)
        job = times.job(scenario.loop.batch_samples or times.batches[-1].finished)
        trained, synced = (
            stages.training(SimulatedFailures(), job),
            times.sync_stage(SimulatedFailures(), run.sync_beside),
        )
    except ValueError as error:
        raise Permanent(f"{stages.section.title}, {arm}: {error}") from error
    last, log_probs = times.healthy[-1], trained.parts_s[LOG_PROBS]
    streamed = response_stream(times.job(last.samples), scenario.cluster.generating, stages.fabric)
    return ClusterResult(
        scenario=scenario.document(),
        run=replace(
            run,
            fabric=stages.section.title,
            arm=arm,
            seed=seed,
            spans=(*run.spans, *_fault_spans(scenario, run.seconds)),
            # Faults lengthen all parts of training alike.
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
    """Return the price of the cluster and of its network by component. The network's price is 0 if the prices for its
    link rate are unknown."""
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
    notes = [f"weight sync to {len(times.fleet)} x {times.stages.tuned(times.seed).id}"]
    waits_s = [sum(step[name] for step in run.steps) for name in ("gen_waits_weights_s", "train_waits_samples_s")]
    notes.append(f"generation waited {waits_s[0]:.1f} s for weights, training {waits_s[1]:.1f} s for samples")
    if trained.updates > 1:
        notes.append(f"a training step has {trained.updates} optimiser steps of {trained.update.seconds:.1f} s")
    if (circuits_s := trained.update.parts_s["circuits"]) > 0:
        notes.append(f"an optimiser step waits {circuits_s:.3f} s for circuits")
    if times.stages.fabric.reconfigures_s:
        notes.append(f"circuits for weight sync: {synced.circuits.replace('_', ' ')}")
    notes += _beside(run, synced, times)
    notes += _idle(times)
    gbps = times.stages.scenario.cluster.nic_gbps
    if gbps not in PRICES_USD:
        notes.append(f"there are no prices for {gbps:g} Gbps")
    left = sum(batch.begun for batch in times.batches) - run.samples
    if left:
        notes.append(f"{left} samples were begun but not trained on before the end")
    return notes


def _beside(run: RlRun, synced: SyncStage, times: ArmTimes) -> list[str]:
    """Return the notes on the delays that weight sync and concurrent stages cause to each other."""
    if not synced.held_s:
        return []
    alone_s, who = times.sync_stage(SimulatedFailures()).seconds, " and ".join(NAMES[stage] for stage in synced.held_s)
    train_s, gen_s = (sum(step[name] for step in run.steps) for name in ("train_held_s", "gen_held_s"))
    return [
        f"weight sync during {who} takes {synced.seconds:.3f} s, {alone_s:.3f} s alone",
        f"weight sync delayed training by {train_s:.3f} s, generation by {gen_s:.3f} s",
    ]


def _idle(times: ArmTimes) -> list[str]:
    """Return the notes about GPUs that stay idle because engines do not span PoDs."""
    ready, where = times.stages.ready(SimulatedFailures()), times.stages.scenario.cluster.generating
    planned = "; plans ignore PoDs, and may use them" if times.arm in CONTROLS else ""
    return [
        f"{len(fleet)} x {name} stay inside PoDs, which leaves {idle} of {len(where)} GPUs idle{planned}"
        for name, fleet in ready.fleets.items()
        if leaves_servers(fleet, ready.fabric.servers) and (idle := left_idle(fleet, where))
    ]


def _streamed(stream: ResponseStream) -> str:
    size, at_once = f"{stream.bytes / 1e6:,.2f} MB", f"{stream.seconds * 1e3:.2g} ms"
    return f"answers streamed to training per step: {size}, {at_once} if all were sent at once"


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most MOST_POINTS evenly spaced points, including the first and the last."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    return tuple(points[round(i * (len(points) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS))


Found = TypeVar("Found")

FINEST = 32  # greatest number of splits among which the search chooses
FIRST = 5  # splits tried before the search narrows
# Splits within this fraction of the highest throughput count as equal: the assignment of prompts to engines causes
# differences of the same size.
ALIKE = 0.02


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """The mean times per step and the throughput under a split of the GPUs."""

    train_gpus: int
    gen_gpus: int
    gen_s: float
    train_s: float
    sync_s: float
    samples_per_s: float

    @property
    def gen_over_train(self) -> float:
        return self.gen_s / self.train_s


def splits(
    scenario: ClusterScenario,
    fabric: str | None = None,
    arm: str = TUNED,
    report: Report = lambda what, done, total: None,
    keep: Callable[[ClusterResult], object] = lambda result: None,
) -> list[GpuSplit]:
    """Search for the best split of GPUs between training and generation on one fabric (by default the first), with one
    arm and the first seed. Return all splits that were tried, ordered by the number of training GPUs. `keep` is called
    with the result of each split. Raises ProblemFaults if an argument is invalid, there are no GPUs to split, or no
    split works."""
    faults = faults_of(scenario, fabric, arm)
    if faults:
        raise ProblemFaults(faults)
    counts, title = train_counts(scenario), fabric or scenario.fabrics[0].title

    def tried(place: int) -> GpuSplit | None:
        report(f"{counts[place]} GPUs train", 0, 0)
        try:
            return _tried(scenario, counts[place], title, arm, keep)
        except (ProblemFaults, Permanent) as error:
            faults.extend(error.faults if isinstance(error, ProblemFaults) else [str(error)])
            return None

    found = search(len(counts), tried, lambda each: each.samples_per_s)
    if not found:
        raise ProblemFaults(list(dict.fromkeys(faults)) or ["cluster: has no servers to split"])
    return found


def best(found: Sequence[GpuSplit]) -> GpuSplit:
    """Return the split with the fewest training GPUs among the splits whose throughput is within the fraction ALIKE of
    the highest throughput."""
    most = max(each.samples_per_s for each in found)
    alike = (each for each in found if each.samples_per_s >= (1 - ALIKE) * most)
    return min(alike, key=lambda each: each.train_gpus)


def train_counts(scenario: ClusterScenario) -> list[int]:
    """Return the possible numbers of training GPUs: multiples of whole servers and whole training replicas."""
    cluster, part = scenario.cluster, scenario.training
    unit = lcm(cluster.gpus_per_server, part.tp * part.cp * part.pp)
    most = (cluster.gpus - cluster.gpus_per_server) // unit
    each = ceil(most / FINEST) if most else 1
    return [count * unit for count in range(each, most + 1, each)]


def search(count: int, tried: Callable[[int], Found | None], worth: Callable[[Found], float]) -> list[Found]:
    """Search `count` ordered positions for the highest value, and return the results of all tried positions that work.
    `tried` returns the result for a position, or None if the position does not work. `worth` returns the value of a
    result, which must be > 0. First try positions over the whole range, then positions between the best position and
    its neighbours. Positions within the fraction ALIKE of the highest value count as equally good, and the first of
    them is the best."""
    first = sorted({round(i * (count - 1) / (FIRST - 1)) for i in range(FIRST)}) if count else []
    known = {place: tried(place) for place in first}
    while True:
        good = {place: each for place, each in known.items() if each is not None}
        if not good:
            rest = [place for place in range(count) if place not in known]
            if not rest:
                return []
            known[rest[len(rest) // 2]] = tried(rest[len(rest) // 2])
            continue
        most = max(map(worth, good.values()))
        top = min(place for place, each in good.items() if worth(each) >= (1 - ALIKE) * most)
        lower = max((place for place in known if place < top), default=top)
        upper = min((place for place in known if place > top), default=top)
        new = {(lower + top) // 2, (top + upper + 1) // 2} - set(known)
        if not new:
            return [good[place] for place in sorted(good)]
        known |= {place: tried(place) for place in sorted(new)}


def faults_of(scenario: ClusterScenario, fabric: str | None, arm: str) -> list[str]:
    """Return the error messages for invalid arguments of `splits`."""
    titles, found = [section.title for section in scenario.fabrics], list[str]()
    if scenario.cluster.shared:
        found.append("cluster.shared: must be false, because GPUs that train and generate cannot be split")
    if fabric is not None and fabric not in titles:
        found.append(f"--fabric: must be one of {', '.join(titles)}, got {fabric!r}")
    if arm not in ARMS:
        found.append(f"--arm: must be one of {', '.join(ARMS)}, got {arm!r}")
    return found


def _tried(
    scenario: ClusterScenario, train_gpus: int, title: str, arm: str, keep: Callable[[ClusterResult], object]
) -> GpuSplit:
    changed = with_split(scenario, train_gpus).narrowed([title], [arm], scenario.seeds[:1])
    if faults := faults_between_sections(changed):
        raise ProblemFaults(faults)
    result = run_arm(FabricStages(changed, changed.fabrics[0]), arm, changed.seeds[0])
    keep(result)
    (row,) = rows([result])
    return GpuSplit(train_gpus, len(changed.cluster.generating), row.gen_s, row.train_s, row.sync_s, row.samples_per_s)


def with_split(scenario: ClusterScenario, train_gpus: int) -> ClusterScenario:
    """Return the scenario with `train_gpus` GPUs for training and the remaining GPUs for generation. The data-parallel
    degree follows from `train_gpus`."""
    sides = {"train_gpus": train_gpus, "gen_gpus": scenario.cluster.gpus - train_gpus}
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update=sides)})
