"""Plan a redeployment as ordered steps from the present engines to the requested engines, and back, without side
effects.

The order preserves these invariants. Engines that stay never stop serving. No new requests go to an engine that is
about to stop. An engine stops only when no request on it would be lost. A GPU serves one engine at a time. New engines
serve only after all of them are verified. run.py carries out the steps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NewType

from orchestrrl.core.operation import OperationState, Stage, StepReport
from orchestrrl.engines.base import AnswerExcerpt
from orchestrrl.fleet.deployers.command_line import EngineSpec
from planner.model import EngineId, GpuId, PlanId, RequestId

RedeploymentId = NewType("RedeploymentId", str)


class StepKind(StrEnum):
    FENCE = "fence"  # fleet: no new requests go to leaving engines
    EVACUATE = "evacuate"  # requests move, or gateways keep them for a new engine
    SLEEP = "sleep"  # frees its GPUs; can be woken
    STOP = "stop"
    START = "start"
    WAKE = "wake"
    SCALE = "scale"  # elastic expert parallelism: more or fewer replicas
    READY = "ready"  # generates a real token
    LOAD = "load_weights"
    WARM_UP = "warm_up"
    VERIFY = "verify"  # layout, KV capacity, weights and answers
    ADMIT = "admit"  # fleet: requests go to all new engines
    COMMIT = "commit"  # fleet: the new deployment is final
    RETIRE = "retire"  # stop an engine that slept through the redeployment


# The steps before an engine may serve.
BRING_UP = (StepKind.READY, StepKind.LOAD, StepKind.WARM_UP, StepKind.VERIFY)


@dataclass(frozen=True, slots=True)
class RedeployTimeouts:
    """The time limits of the steps, in seconds. A step that exceeds its limit has failed."""

    drain_s: float = 30.0  # for unmovable requests to finish
    stop_s: float = 60.0
    start_s: float = 60.0
    ready_s: float = 600.0  # large models load slowly
    load_s: float = 300.0
    check_s: float = 120.0  # warm-up, verification, admission, sleep and wake-up

    def of(self, kind: StepKind) -> float:
        limits_s = {StepKind.EVACUATE: self.drain_s, StepKind.STOP: self.stop_s, StepKind.RETIRE: self.stop_s}
        limits_s |= {StepKind.START: self.start_s, StepKind.READY: self.ready_s, StepKind.LOAD: self.load_s}
        return limits_s.get(kind, self.check_s)


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that all engines must serve. `version` is None if no version was set; the model's own weights then
    apply. `source` is a folder that engines can read, or an empty string if no such folder is known."""

    version: int | None = None
    source: str = ""
    tensors_only: bool = False  # no model configuration: engines start with the model's own, then load these


@dataclass(frozen=True, slots=True)
class Redeployment:
    """One change of the deployment. `old` and `new` are the complete deployments before and after the change. An engine
    in both deployments keeps running unchanged, or is scaled if its GPUs differ between them."""

    id: RedeploymentId
    plan: PlanId
    reason: str
    created_s: float
    old: tuple[EngineSpec, ...]
    new: tuple[EngineSpec, ...]
    asleep: tuple[EngineSpec, ...] = ()  # can be woken instead of starting an equal engine
    can_sleep: frozenset[EngineId] = frozenset()  # of the leaving engines
    keep_asleep: bool = False  # keep unused sleeping engines for a later redeployment
    destinations: Mapping[RequestId, EngineId] = field(default_factory=dict)  # of requests, by the plan
    weights: ServedWeights = ServedWeights()
    limits: RedeployTimeouts = RedeployTimeouts()
    reference: AnswerExcerpt | None = None  # an answer of the old engines, which new ones must match

    def __post_init__(self) -> None:
        for name, specs in (("old", self.old), ("new", self.new)):
            owner: dict[GpuId, EngineId] = {}
            for spec in specs:
                for gpu in spec.gpus:
                    if gpu in owner:
                        raise ValueError(f"{name}: GPU {gpu} must have one engine, got {owner[gpu]} and {spec.engine}")
                    owner[gpu] = spec.engine
            ids = [spec.engine for spec in specs]
            if len(set(ids)) != len(ids):
                raise ValueError(f"{name}: engine ids must be unique, got {ids}")
        changed = [new.engine for old, new in self.scaled if not can_scale(old, new)]
        if changed:
            raise ValueError(f"engines that stay must keep their GPUs, got other GPUs for engines {changed}")

    @property
    def leaving(self) -> tuple[EngineSpec, ...]:
        wanted = {spec.engine for spec in self.new}
        return tuple(spec for spec in self.old if spec.engine not in wanted)

    @property
    def coming(self) -> tuple[EngineSpec, ...]:
        there = {spec.engine for spec in self.old}
        return tuple(spec for spec in self.new if spec.engine not in there)

    @property
    def preparing(self) -> tuple[EngineSpec, ...]:
        """Return the engines to verify before they serve: added engines, and scaled engines with their new specs."""
        return (*self.coming, *(new for _, new in self.scaled))

    @property
    def scaled(self) -> tuple[tuple[EngineSpec, EngineSpec], ...]:
        """Return the (old, new) specs of each scaled engine."""
        before = {spec.engine: spec for spec in self.old}
        pairs = ((before[spec.engine], spec) for spec in self.new if spec.engine in before)
        return tuple((old, new) for old, new in pairs if old.gpus != new.gpus)


def can_scale(old: EngineSpec, new: EngineSpec) -> bool:
    """Return whether an engine can be scaled from `old` to `new`. This requires that the specs differ only in the
    number of replicas that share the experts, and that the larger engine uses all GPUs of the smaller one."""
    one, other = old.parallelism, new.parallelism
    spread = all(p.ep == p.tp * p.dp > 1 and not p.afd for p in (one, other))
    nested = set(old.gpus) < set(new.gpus) or set(new.gpus) < set(old.gpus)
    return spread and nested and (one.tp, one.pp) == (other.tp, other.pp) and one.dp != other.dp


@dataclass(frozen=True, slots=True)
class RedeployStep:
    """One step of a redeployment. `number` counts from 1 in each direction. `engine` is None for steps of the whole
    fleet."""

    number: int
    stage: int
    kind: StepKind
    engine: EngineId | None
    within_s: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.engine}" if self.engine else self.kind


@dataclass(frozen=True, slots=True)
class RedeployRequest:
    """A request to carry out a plan, or to run a number of engines per configuration. A count of 0 means as many
    engines as fit on the GPUs that the other configurations leave free. The fields are not validated yet."""

    targets: tuple[tuple[str, int], ...] = ()
    plan: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RedeploymentReport:
    """The state or the result of a redeployment. Times are in seconds of the daemon's clock."""

    id: RedeploymentId
    plan: PlanId
    reason: str
    created_s: float
    state: OperationState
    old: tuple[EngineSpec, ...]
    new: tuple[EngineSpec, ...]
    engines: tuple[EngineId, ...]  # the engines that serve now
    steps: tuple[StepReport[RedeployStep], ...]  # forward steps, then undo steps if rolled back
    detail: str = ""  # why it was rolled back, or what is missing
    ended_s: float | None = None
    requests_moved: int = 0
    requests_parked: int = 0  # kept by their gateway meanwhile
    # From the fence until requests went to the new engines; None: not yet.
    closed_s: float | None = None

    @property
    def elapsed_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.created_s


_Chain = Sequence[tuple[StepKind, EngineId | None]]
_Plan = list[list[_Chain]]


def stages_of(redeployment: Redeployment) -> tuple[Stage[RedeployStep], ...]:
    """Return the forward stages of a redeployment. Engines on free GPUs are brought up while the old engines still
    serve."""
    held = {gpu for spec in redeployment.old for gpu in spec.gpus}
    early = [spec for spec in redeployment.coming if not held.intersection(spec.gpus)]
    late = [spec for spec in redeployment.coming if held.intersection(spec.gpus)]
    asleep = {spec.engine for spec in redeployment.asleep}
    leave = {
        spec.engine: StepKind.SLEEP if spec.engine in redeployment.can_sleep else StepKind.STOP
        for spec in redeployment.leaving
    }
    shrink = [new.engine for old, new in redeployment.scaled if len(new.gpus) < len(old.gpus)]
    grow = [new.engine for old, new in redeployment.scaled if len(new.gpus) > len(old.gpus)]
    plan: _Plan = [[_coming(spec, asleep) for spec in early]]
    if emptied := [*leave, *shrink, *grow]:
        plan.append([[(StepKind.FENCE, None)]])
        plan.append([[(StepKind.EVACUATE, engine)] for engine in emptied])
        freeing = [*((way, engine) for engine, way in leave.items()), *((StepKind.SCALE, engine) for engine in shrink)]
        plan.append([[step] for step in freeing])
    plan.append(
        [
            *(_coming(spec, asleep) for spec in late),
            *(_chain(engine, StepKind.SCALE) for engine in grow),
            *(_chain(engine) for engine in shrink),
        ]
    )
    plan += [[[(StepKind.ADMIT, None)]], [[(StepKind.COMMIT, None)]]]
    if not redeployment.keep_asleep:
        slept = [engine for engine, way in leave.items() if way is StepKind.SLEEP]
        slept += [spec.engine for spec in redeployment.asleep if spec not in redeployment.new]
        plan.append([[(StepKind.RETIRE, engine)] for engine in slept])
    return _numbered(plan, redeployment.limits)


def stages_back(
    redeployment: Redeployment,
    alive: Collection[EngineId],
    asleep: Collection[EngineId] = (),
    scaled: Collection[EngineId] = (),
    failing: Collection[EngineId] = (),
) -> tuple[Stage[RedeployStep], ...]:
    """Return the stages that lead back to the old engines, from any point of interruption.

    `alive` are all old and new engines whose processes exist, and `asleep` are the sleeping engines among them.
    `scaled` are engines whose scaling was begun, perhaps without effect. `failing` are engines that still exist
    although they were being stopped or have ended.
    """
    new = [spec for spec in redeployment.coming if spec.engine in alive and spec.engine not in asleep]
    sleeping = {spec.engine for spec in redeployment.leaving if spec.engine in asleep}
    lent = {spec.engine for spec in redeployment.asleep}
    grew = [old for old, new in redeployment.scaled if len(new.gpus) > len(old.gpus)]
    shrank = [old for old, new in redeployment.scaled if len(new.gpus) < len(old.gpus)]
    ending = [s for s in (*redeployment.leaving, *grew, *shrank) if s.engine in failing and s.engine in alive]
    sleeping -= {spec.engine for spec in ending}
    gone = [*ending, *(spec for spec in (*redeployment.leaving, *grew, *shrank) if spec.engine not in alive)]
    untouched = [*gone, *(old for old in (*grew, *shrank) if old.engine not in scaled)]
    plan: _Plan = [
        [
            *([(StepKind.SLEEP if spec.engine in lent else StepKind.STOP, spec.engine)] for spec in new),
            *([(StepKind.STOP, spec.engine)] for spec in ending),
            *([(StepKind.SCALE, spec.engine)] for spec in grew if spec not in untouched),
        ],
        [
            *(_coming(spec, sleeping) for spec in redeployment.leaving if spec in gone or spec.engine in sleeping),
            *(_coming(spec, ()) for spec in (*grew, *shrank) if spec in gone),
            *(_chain(spec.engine) for spec in grew if spec not in untouched),
            *(_chain(spec.engine, StepKind.SCALE) for spec in shrank if spec not in untouched),
        ],
        [[(StepKind.ADMIT, None)]],
        [[(StepKind.COMMIT, None)]],
    ]
    return _numbered(plan, redeployment.limits)


def _chain(engine: EngineId, *first: StepKind) -> _Chain:
    """Return the steps in `first`, followed by the steps that bring an engine up."""
    return [(kind, engine) for kind in (*first, *BRING_UP)]


def _coming(spec: EngineSpec, asleep: Collection[EngineId]) -> _Chain:
    return _chain(spec.engine, StepKind.WAKE if spec.engine in asleep else StepKind.START)


def _numbered(plan: _Plan, limits: RedeployTimeouts) -> tuple[Stage[RedeployStep], ...]:
    numbers = count(1)
    return tuple(
        tuple(
            tuple(RedeployStep(next(numbers), place, kind, engine, limits.of(kind)) for kind, engine in chain)
            for chain in stage
        )
        for place, stage in enumerate(filter(None, plan), 1)
    )


def goes_on(
    redeployment: Redeployment, done: Collection[tuple[StepKind, EngineId | None]], alive: Collection[EngineId]
) -> bool:
    """Return whether an interrupted redeployment is completed rather than undone. It is completed if all new engines
    are verified and alive, because undoing it would then cost more than completing it."""
    ready = all((StepKind.VERIFY, spec.engine) in done and spec.engine in alive for spec in redeployment.preparing)
    # A redeployment that only stops engines is undone while all of them exist.
    began = bool(redeployment.preparing) or any((StepKind.STOP, spec.engine) in done for spec in redeployment.leaving)
    return ready and began
