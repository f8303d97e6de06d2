"""Convert a plan or an operator's request into the engines that the fleet should have and their GPUs, without side
effects."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrrl.core.errors import Permanent, ProblemFaults, shorten
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import RedeployRequest, can_scale
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, Plan, RequestId

# The request to stop all engines once their requests have finished.
NOTHING = (("nothing", 0),)

MakeSpec = Callable[[EngineId, ConfigurationId, Sequence[GpuId]], EngineSpec]


@dataclass(frozen=True, slots=True)
class StandingEngine:
    """The present deployment. `serving` are the deployer's engines that do not sleep, including dead engines until they
    are stopped. `others` maps the GPUs of engines that the deployer did not start to these engines."""

    serving: tuple[EngineSpec, ...]
    asleep: tuple[EngineSpec, ...]
    elastic: frozenset[EngineId]  # can be scaled while running
    alive: frozenset[EngineId]
    drained: frozenset[EngineId]  # by an operator: they stay, and finish their requests
    lost: frozenset[EngineId]  # their state is unknown: their GPUs count as in use
    others: Mapping[GpuId, EngineId]
    gpus_count: int
    per_node: int
    configurations: Mapping[ConfigurationId, Configuration]
    make_spec: MakeSpec  # for an engine to start

    @property
    def kept_anyway(self) -> tuple[EngineSpec, ...]:
        """Return the engines that no redeployment changes."""
        return tuple(spec for spec in self.serving if spec.engine in self.drained | self.lost)


@dataclass(frozen=True, slots=True)
class TargetEngine:
    new: tuple[EngineSpec, ...]
    destinations: Mapping[RequestId, EngineId] = field(default_factory=dict)
    sleepers_too: bool = False  # stop sleeping engines as well


def wanted_by_plan(plan: Plan, standing: StandingEngine) -> TargetEngine:
    """Return the target engines of a plan. Raises Permanent if the plan has no engines, or if the fleet has changed so
    that the plan can no longer be carried out."""
    if not plan.instances:
        raise Permanent(f"plan {plan.id} has no engines")
    there = {spec.engine: spec for spec in standing.serving if spec.engine in standing.alive}
    foreign = set(standing.others.values())
    new = list(standing.kept_anyway)
    for instance in plan.instances:
        if instance.id in there:
            if instance.id not in {spec.engine for spec in new}:
                new.append(there[instance.id])
        elif instance.id not in foreign:
            if instance.kept:
                raise Permanent(f"plan {plan.id} keeps engine {instance.id}, which no longer exists")
            new.append(standing.make_spec(instance.id, instance.configuration, instance.gpus))
    wanted = {instance.id for instance in plan.instances}
    if unowned := sorted(foreign - wanted):
        raise Permanent(f"plan {plan.id} omits engines {', '.join(unowned)}, which this deployer cannot stop")
    _check_gpus(new, standing)
    destinations = {move.request: move.destination for move in plan.moves}
    destinations |= {request: instance.id for instance in plan.instances for request in instance.requests}
    return _reusing(TargetEngine(tuple(new), destinations), standing)


def wanted_by_targets(wish: RedeployRequest, name: str, standing: StandingEngine) -> TargetEngine:
    """Return the target engines for a requested number of engines per configuration. Existing engines are kept if they
    fit. New engines are named after `name`. The target `nothing` stops all engines. Raises ProblemFaults with every
    fault of the request."""
    if wish.targets == NOTHING:
        return TargetEngine(standing.kept_anyway, sleepers_too=True)
    configurations = standing.configurations
    if faults := _target_faults(wish, configurations):
        raise ProblemFaults(faults)
    targets = [(ConfigurationId(target), count) for target, count in wish.targets]
    keepable = _keepable(targets, standing)
    for dropped in range(len(keepable) + 1):  # drop as few as possible
        new = _filled(targets, name, standing, keepable[dropped:])
        if new is not None:
            return _reusing(TargetEngine((*standing.kept_anyway, *new)), standing)
    free = len(_free(standing, standing.kept_anyway))
    asked = ", ".join(f"{count or 'any'} x {target} of {configurations[target].gpus} GPUs" for target, count in targets)
    fault = f"targets: must fit on the {free} GPUs in nodes of {standing.per_node}, got {asked}"
    raise ProblemFaults([fault + _taken_by(standing)])


def _taken_by(standing: StandingEngine) -> str:
    """Return the end of an error message, which lists the engines on GPUs that no redeployment can free."""
    kept = {gpu: spec.engine for spec in standing.kept_anyway for gpu in spec.gpus}
    words = (
        (kept, "drained by an operator, or their state is unknown"),
        (standing.others, "not started by this deployer, which cannot stop them"),
    )
    holders = [f"{', '.join(sorted(set(owner.values())))} ({why})" for owner, why in words if owner]
    return f"; the other GPUs belong to {' and '.join(holders)}" if holders else ""


def _target_faults(wish: RedeployRequest, configurations: Mapping[ConfigurationId, Configuration]) -> list[str]:
    faults = []
    if wish.plan and wish.targets:
        faults.append(f"plan_id: must not be given with targets, got {wish.plan!r}")
    if not wish.targets:
        faults.append("targets: must name a configuration, got none")
    known = ", ".join(sorted(configurations)) or "none"
    for place, (target, count) in enumerate(wish.targets):
        if target not in configurations:
            where = f"targets[{place}].configuration"
            faults.append(f"{where}: must be one of fleet.configurations ({known}), got {shorten(target)}")
        if target in [earlier for earlier, _ in wish.targets[:place]]:
            faults.append(f"targets[{place}].configuration: must not be repeated, got {shorten(target)}")
        if count < 0:
            faults.append(f"targets[{place}].engines: must be >= 0 (0: as many as fit), got {count}")
    return faults


def _keepable(targets: Sequence[tuple[ConfigurationId, int]], standing: StandingEngine) -> list[EngineSpec]:
    """Return the existing engines that match the targets. If they leave too little room for the new engines, some of
    them are dropped, beginning with the first."""
    untouched = {spec.engine for spec in standing.kept_anyway}
    there = [s for s in standing.serving if s.engine in standing.alive and s.engine not in untouched]
    by_configuration = {
        target: [spec for spec in there if spec.configuration == target][: count or None] for target, count in targets
    }
    filling = [target for target, count in targets if not count]
    order = [*filling, *(target for target, count in targets if count)]
    return [spec for target in order for spec in by_configuration[target]]


def _filled(
    targets: Sequence[tuple[ConfigurationId, int]], name: str, standing: StandingEngine, kept: Sequence[EngineSpec]
) -> list[EngineSpec] | None:
    """Return the kept engines and the new engines, or None if the new engines do not fit on the free GPUs. The largest
    engines are placed first, since small engines fit into any gap."""
    new, configurations = list(kept), standing.configurations
    have = Counter(spec.configuration for spec in kept)
    free = _free(standing, [*standing.kept_anyway, *new])

    def place(target: ConfigurationId) -> bool:
        gpus = _room(free, configurations[target].gpus, standing.per_node)
        if gpus is None:
            return False
        free.difference_update(gpus)
        new.append(standing.make_spec(EngineId(f"{name}.{len(new) - len(kept)}"), target, gpus))
        return True

    by_size = sorted(targets, key=lambda one: (-configurations[one[0]].gpus, one[0]))
    for target, count in by_size:  # at least one of each configuration with count 0
        if not all(place(target) for _ in range(max(count, 1) - have[target])):
            return None
    for target, count in by_size:
        while not count and place(target):
            pass
    return new


def _free(standing: StandingEngine, specs: Iterable[EngineSpec]) -> set[GpuId]:
    taken = {gpu for spec in specs for gpu in spec.gpus} | set(standing.others)
    return {GpuId(gpu) for gpu in range(standing.gpus_count)} - taken


def _room(free: set[GpuId], size: int, per_node: int) -> tuple[GpuId, ...] | None:
    """Return the lowest free GPUs for an engine of `size` GPUs, or None if no suitable GPUs are free. An engine that
    fits in a node gets contiguous GPUs of one node, which are aligned if the size divides the node's GPU count. A
    larger engine gets whole nodes."""
    starts: Iterable[int]
    if size > per_node:
        starts = range(0, max(free, default=-1) + 1, per_node) if size % per_node == 0 else ()
    else:
        places = ((gpu, gpu % per_node) for gpu in sorted(free))
        starts = (g for g, place in places if place + size <= per_node and (per_node % size or place % size == 0))
    blocks = (tuple(GpuId(gpu) for gpu in range(start, start + size)) for start in starts)
    return next((gpus for gpus in blocks if free.issuperset(gpus)), None)


def _reusing(wanted: TargetEngine, standing: StandingEngine) -> TargetEngine:
    """Return the target with new engines replaced by existing engines where possible. A sleeping engine of the same
    configuration and GPUs is woken. A leaving engine that differs only in its number of replicas is scaled. A reused
    engine keeps its id."""
    sleeping = {(spec.configuration, spec.gpus): spec for spec in standing.asleep if spec.engine in standing.alive}
    there = {spec.engine for spec in standing.serving}
    kept = {spec.engine for spec in wanted.new}
    free = [
        spec for spec in standing.serving if spec.engine in standing.elastic - kept and spec.engine in standing.alive
    ]
    new, names = [], {}
    for spec in wanted.new:
        reused = spec
        if spec.engine not in there:
            similar = [old for old in free if can_scale(old, spec)]
            if (spec.configuration, spec.gpus) in sleeping:
                reused = sleeping[spec.configuration, spec.gpus]
            elif similar:
                old = max(similar, key=lambda one: (len(set(one.gpus) & set(spec.gpus)), one.engine))
                free.remove(old)
                reused = replace(spec, engine=old.engine, port=old.port)
        new.append(reused)
        names[spec.engine] = reused.engine
    destinations = {request: names.get(engine, engine) for request, engine in wanted.destinations.items()}
    return TargetEngine(tuple(new), destinations)


def _check_gpus(new: Sequence[EngineSpec], standing: StandingEngine) -> None:
    """Raise Permanent if two engines need the same GPU."""
    owner: dict[GpuId, EngineId] = dict(standing.others)
    for spec in new:
        for gpu in spec.gpus:
            if gpu in owner:
                raise Permanent(f"GPU {gpu} is needed for engine {spec.engine} but is in use by engine {owner[gpu]}")
            owner[gpu] = spec.engine
