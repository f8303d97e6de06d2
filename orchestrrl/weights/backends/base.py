"""What the version protocol asks of a weight backend: whatever brings a version's bytes into engines.

A plug point: one module per product, registered in the entry-point group `orchestrrl.weight_backends`; every one passes
`orchestrrl/weights/backends/conformance.py`. The order is always the same, and the daemon keeps it: publish, prepare,
fence, install, verify, commit, resume. The tree is one of them: the daemon plans it itself, and peers carry it. A
`DirectBackend` brings bytes from the trainer's process straight into engines, while the trainer stands by. It has three
parts, one in each process: in the daemon (`prepare`, `install`, `relayed`), at the peers of engines (`at_engine`), and
in the trainer (`sender`).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent
from orchestrrl.core.plug_points import PlugPoint
from orchestrrl.engines.base import Engine
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.publication import Publication
from planner.model import EngineId

TREE = "tree"
STEP_DONE, STEP_FAILED = "done", "failed"  # calls by which a rank ends a step


class TreeBackend:
    """Trainers stage a version, peers send it on to each other, and engines load it from their host's folder. All bytes
    are at the engines' hosts before the fence, so the trainer may go on; peers hold versions until they are told to let
    go. The daemon plans and mends the tree itself (weights/controller/carrying.py)."""


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """Of the trainer, in its publish: a step of the backend's. Numbers go up within a sync."""

    number: int
    step: str
    body: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return _ASKED.dump_json(self).decode()


_ASKED: TypeAdapter[TrainerStep] = TypeAdapter(TrainerStep)


def trainer_step_from(text: str) -> TrainerStep | None:
    """Raises Permanent for what a newer daemon says."""
    try:
        return _ASKED.validate_json(text) if text else None
    except ValidationError as error:
        raise Permanent(f"the daemon asks for what is not known here: {text}") from error


class DirectSync(Protocol):
    """One version's way, as the daemon's part of a backend sees it."""

    @property
    def version(self) -> int: ...

    @property
    def engines(self) -> Sequence[EngineId]:
        """That are to have it, by id."""
        ...

    @property
    def publications(self) -> Sequence[Publication]:
        """One of each rank, by rank."""
        ...

    async def at(self, engine: EngineId, act: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """`at_engine` at the engine's peer. Raises Permanent where the engine is as it was, OutcomeUnknown where it may
        not be."""
        ...

    async def request_trainer(self, step: str, body: Mapping[str, Any]) -> None:
        """Until every part of the step that the trainer's first rank has to do is done. Raises OutcomeUnknown where a
        rank says that it failed, or time is over."""
        ...


# From the trainer to the daemon's part, a call and its body: `relayed` there. Blocks. Raises OrchestrRLError.
ReportStep = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]


class WeightSender(Protocol):
    """The trainer's part, of one rank. `act` is called in the thread that publishes, on all ranks, since tensors may
    have to be gathered."""

    @property
    def tensors(self) -> Sequence[TensorMeta]:
        """Of which the version is made."""
        ...

    def use(self, model: Any, options: "SenderOptions") -> None:
        """For a version after this one. Raises as the backend's `sender` does."""
        ...

    def act(self, step: TrainerStep, report: ReportStep) -> None:
        """Raises whatever it likes where it cannot."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """`model`: as WeightsClient.publish takes it. `own`: the publication's options."""

    rank: int
    world: int
    dtype: Any = None
    rename: Any = None
    ignore: Sequence[str] = ()
    own: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class DirectBackend(Protocol):
    """One process's. Construction opens nothing, and imports nothing but ours. The daemon has one for as long as it
    lives: what trainer and engines have joined may serve many versions. After a sync that failed it is told so by
    `forget`. No version can be had again without the trainer."""

    def faults(self, publication: Publication) -> list[str]:
        """With what a rank says, as `path: what is wrong`. Pure."""
        ...

    async def prepare(self, sync: DirectSync) -> None:
        """Before the fence: whatever changes nothing of what engines answer. Raises EnginesFailed for those that
        cannot, and OrchestrRLError where it is nobody's fault or the trainer's."""
        ...

    async def install(self, sync: DirectSync) -> Mapping[EngineId, OrchestrRLError | None]:
        """Behind the fence. For each engine None: it has the version; Permanent or Retryable: it has what it had;
        OutcomeUnknown: nobody knows."""
        ...

    async def relayed(self, sync: DirectSync, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the trainer tells while a step is asked of it. Raises OrchestrRLError."""
        ...

    def forget(self) -> None:
        """What trainer and engines have joined is not to be relied upon."""
        ...

    async def at_engine(self, engine: Engine, act: str, version: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """At its peer. Raises as engines' clients do: OutcomeUnknown where the engine may not be as it was. An engine
        that is being changed says of itself that it has no known version."""
        ...

    def sender(self, model: Any, options: SenderOptions) -> WeightSender:
        """In the trainer. Raises Permanent for what cannot be published so, or is not installed."""
        ...


class EnginesFailed(Permanent):
    """These cannot take part, and are as they were. The others might without them."""

    def __init__(self, why: Mapping[EngineId, str]) -> None:
        super().__init__("; ".join(f"{engine}: {words}" for engine, words in sorted(why.items())))
        self.why = why


class EngineOutcomes:
    """What each engine became by one installation. None: it has the version. Permanent or Retryable: it has what it
    had. OutcomeUnknown: it may have some of either."""

    def __init__(self, engines: Iterable[EngineId] = ()) -> None:
        self.by_engine: dict[EngineId, OrchestrRLError | None] = {
            engine: Permanent("the trainer has sent nothing") for engine in engines
        }

    async def act(
        self, sync: DirectSync, act: str, bodies: Mapping[EngineId, Mapping[str, Any]], first: bool, last: bool
    ) -> None:
        """Carry out `act` at all of these engines at once. `first`: nothing has changed before it; `last`: an engine
        has the version after it. Raises the first engine's error, when all have ended."""

        async def one(engine: EngineId, body: Mapping[str, Any]) -> None:
            try:
                await sync.at(engine, act, body)
            except OrchestrRLError as error:
                is_as_it_was = first and not isinstance(error, OutcomeUnknown)
                self.by_engine[engine] = error if is_as_it_was else OutcomeUnknown(str(error))
                raise
            self.by_engine[engine] = None if last else OutcomeUnknown("it began to take weights, and did not end")

        for outcome in await asyncio.gather(*(one(*each) for each in bodies.items()), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def broke_off(self, error: OrchestrRLError) -> None:
        """The installation ended with this error: it is not known of any engine that it has the version."""
        for engine, became in self.by_engine.items():
            self.by_engine[engine] = became if became is not None else OutcomeUnknown(str(error))


BACKENDS = PlugPoint(
    "backend",
    "orchestrrl.weight_backends",
    {
        TREE: "orchestrrl.weights.backends.base:TreeBackend",
        "checkpoint_engine": "orchestrrl.weights.backends.checkpoint_engine:CheckpointEngineBackend",
        "vllm_transfer": "orchestrrl.weights.backends.vllm_transfer:VllmTransferBackend",
    },
)


def make_direct(name: str) -> DirectBackend:
    """Raises Permanent for an unknown name, listing the known ones, where what it needs is not installed, and for one
    whose bytes peers carry."""
    backend = BACKENDS.load(name)()
    if not isinstance(backend, DirectBackend):
        raise Permanent(f"backend {name!r} is not one that trainers send by")
    return backend
