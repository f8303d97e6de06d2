"""A redeployment: from the engines that there are to those wanted, in ordered steps, and back. Pure.

The order is what keeps the fleet whole: engines that stay never stop serving; nothing is sent to an engine that is
about to stop; none stops while a request is there that its gateway would not take back; a GPU serves one engine at a
time; new engines serve once all of them have been verified. Carrying the steps out is run.py.
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
    FENCE = "fence"  # of the fleet: nothing new goes to the engines that leave
    EVACUATE = "evacuate"  # their requests move, or are kept by their gateway for an engine to come
    SLEEP = "sleep"  # it frees its GPUs and can be woken
    STOP = "stop"
    START = "start"
    WAKE = "wake"
    SCALE = "scale"  # elastic expert parallelism: it goes on with more or fewer replicas
    READY = "ready"  # it answers with a real token
    LOAD = "load_weights"
    WARM_UP = "warm_up"
    VERIFY = "verify"  # layout, KV capacity, weights, and that it answers as the others do
    ADMIT = "admit"  # of the fleet: requests go to all of the new engines
    COMMIT = "commit"  # of the fleet: from here on this is the deployment
    RETIRE = "retire"  # an engine that slept through the redeployment is stopped


# What is done to an engine before it may serve.
BRING_UP = (StepKind.READY, StepKind.LOAD, StepKind.WARM_UP, StepKind.VERIFY)


@dataclass(frozen=True, slots=True)
class RedeployTimeouts:
    """How long each step may take. Past it the step has failed."""

    drain_s: float = 30.0  # for requests that cannot be moved to finish
    stop_s: float = 60.0
    start_s: float = 60.0
    ready_s: float = 600.0  # large models are long to load
    load_s: float = 300.0
    check_s: float = 120.0  # warm-up, verification, admission, and going to sleep and waking

    def of(self, kind: StepKind) -> float:
        limits_s = {StepKind.EVACUATE: self.drain_s, StepKind.STOP: self.stop_s, StepKind.RETIRE: self.stop_s}
        limits_s |= {StepKind.START: self.start_s, StepKind.READY: self.ready_s, StepKind.LOAD: self.load_s}
        return limits_s.get(kind, self.check_s)


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What all engines have to serve. `version` None: nobody has named one, and the model's own are meant. `source`: a
    folder that engines can read; empty: nobody has told where to get them."""

    version: int | None = None
    source: str = ""
    tensors_only: bool = False  # no configuration beside them: engines begin with the model's own, and load these then


@dataclass(frozen=True, slots=True)
class Redeployment:
    """One change. `old` is the whole deployment, `new` the whole of what is wanted: what is in both stays as it is, or
    is scaled where it has other GPUs there."""

    id: RedeploymentId
    plan: PlanId
    reason: str
    created_s: float
    old: tuple[EngineSpec, ...]
    new: tuple[EngineSpec, ...]
    asleep: tuple[EngineSpec, ...] = ()  # that can be woken instead of starting their like
    can_sleep: frozenset[EngineId] = frozenset()  # of those that leave
    keep_asleep: bool = False  # who sleeps and is not wanted stays so, to be woken by a later redeployment
    destinations: Mapping[RequestId, EngineId] = field(default_factory=dict)  # of requests, as the plan has them
    weights: ServedWeights = ServedWeights()
    limits: RedeployTimeouts = RedeployTimeouts()
    reference: AnswerExcerpt | None = None  # how the old engines answer: the new ones have to agree

    def __post_init__(self) -> None:
        for name, specs in (("old", self.old), ("new", self.new)):
            owner: dict[GpuId, EngineId] = {}
            for spec in specs:
                for gpu in spec.gpus:
                    if gpu in owner:
                        raise ValueError(f"{name}: GPU {gpu} serves both {owner[gpu]} and {spec.engine}")
                    owner[gpu] = spec.engine
            ids = [spec.engine for spec in specs]
            if len(set(ids)) != len(ids):
                raise ValueError(f"{name}: engine ids must differ, got {ids}")
        changed = [new.engine for old, new in self.scaled if not can_scale(old, new)]
        if changed:
            raise ValueError(f"engines that stay must keep their GPUs, got others for {changed}")

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
        """Those to be verified before they serve: who comes, and who is scaled, as wanted."""
        return (*self.coming, *(new for _, new in self.scaled))

    @property
    def scaled(self) -> tuple[tuple[EngineSpec, EngineSpec], ...]:
        """As they are, and as they are wanted."""
        before = {spec.engine: spec for spec in self.old}
        pairs = ((before[spec.engine], spec) for spec in self.new if spec.engine in before)
        return tuple((old, new) for old, new in pairs if old.gpus != new.gpus)


def can_scale(old: EngineSpec, new: EngineSpec) -> bool:
    """Whether they differ in how many replicas share the experts, and in nothing else."""
    one, other = old.parallelism, new.parallelism
    spread = all(p.ep == p.tp * p.dp > 1 and not p.afd for p in (one, other))
    nested = set(old.gpus) < set(new.gpus) or set(new.gpus) < set(old.gpus)
    return spread and nested and (one.tp, one.pp) == (other.tp, other.pp) and one.dp != other.dp


@dataclass(frozen=True, slots=True)
class RedeployStep:
    """`number` from 1, over the whole direction. `engine` None: of the fleet."""

    number: int
    stage: int
    kind: StepKind
    engine: EngineId | None
    within_s: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.engine}" if self.engine else self.kind


@dataclass(frozen=True, slots=True)
class RedeployRequest:
    """What somebody asks for: a plan to be carried out, or how many engines of which configurations. A count of 0: as
    many as the GPUs make that the others leave. Nothing is checked yet."""

    targets: tuple[tuple[str, int], ...] = ()
    plan: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RedeploymentReport:
    """A redeployment as it stands, or as it ended. Seconds are the daemon's."""

    id: RedeploymentId
    plan: PlanId
    reason: str
    created_s: float
    state: OperationState
    old: tuple[EngineSpec, ...]
    new: tuple[EngineSpec, ...]
    engines: tuple[EngineId, ...]  # that the fleet has now
    steps: tuple[StepReport[RedeployStep], ...]  # forward, then those back where it was rolled back
    detail: str = ""  # why it was rolled back, what is missing
    ended_s: float | None = None
    requests_moved: int = 0
    requests_parked: int = 0  # kept by their gateway meanwhile
    # From the fence until requests went to the new engines; None: they have not.
    closed_s: float | None = None

    @property
    def elapsed_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.created_s


_Chain = Sequence[tuple[StepKind, EngineId | None]]
_Plan = list[list[_Chain]]


def stages_of(redeployment: Redeployment) -> tuple[Stage[RedeployStep], ...]:
    """Forward. Engines whose GPUs are free come up while the old ones still serve."""
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
    """Back to the old engines, from wherever it broke off. `alive`: all engines of either side whose processes are
    there now, `asleep` those of them that sleep; `scaled`, whose scaling was begun: some may find that nothing came of
    it; `failing`, who are there and will not be: their stop was begun, or they have ended."""
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
    """Bring an engine up, after what comes first."""
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
    """Whether a redeployment that was cut short is finished rather than undone: all that is new has been verified, and
    is still there, so that going back would cost more than going on."""
    ready = all((StepKind.VERIFY, spec.engine) in done and spec.engine in alive for spec in redeployment.preparing)
    # A redeployment that only stops engines is undone as long as they are all there.
    began = bool(redeployment.preparing) or any((StepKind.STOP, spec.engine) in done for spec in redeployment.leaving)
    return ready and began
