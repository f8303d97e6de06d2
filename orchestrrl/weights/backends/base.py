"""Interfaces of a weight backend, which brings a version's bytes into engines.

Backends are a plug point: one module per product, registered in the entry-point group `orchestrrl.weight_backends`.
Every backend passes `orchestrrl/weights/backends/conformance.py`. The daemon runs the same steps for every backend:
publish, prepare, fence, install, verify, commit, resume. For the tree backend, the daemon plans the transfer, and peers
carry it out. A `DirectBackend` sends bytes from the trainer's process directly into engines, while the trainer waits in
`publish`. It has parts in three processes: in the daemon (`prepare`, `install`, `relayed`), at the peers of engines
(`at_engine`), and in the trainer (`sender`).
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
    """The backend in which trainers stage a version, peers forward it to each other, and engines load it from a folder
    on their host. All bytes are on the engines' hosts before the fence, so the trainer may continue. Peers store a
    version until they are ordered to discard it. The daemon plans and repairs the tree
    (weights/controller/carrying.py)."""


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """A step of a backend, which the trainer performs within `publish`. The step numbers of a sync increase. `body`
    contains the arguments of the step."""

    number: int
    step: str
    body: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return _ASKED.dump_json(self).decode()


_ASKED: TypeAdapter[TrainerStep] = TypeAdapter(TrainerStep)


def trainer_step_from(text: str) -> TrainerStep | None:
    """Parse the trainer's step in a report. Return None for an empty text. Raises Permanent if the step cannot be
    parsed, for example because the daemon is newer."""
    try:
        return _ASKED.validate_json(text) if text else None
    except ValidationError as error:
        raise Permanent(
            f"the daemon requested an unknown step: {text}; use the same version of OrchestrRL for the daemon and the"
            " trainer"
        ) from error


class DirectSync(Protocol):
    """One sync, as seen by the daemon's part of a direct backend."""

    @property
    def version(self) -> int: ...

    @property
    def engines(self) -> Sequence[EngineId]:
        """Return the engines that receive the version, sorted by id."""
        ...

    @property
    def publications(self) -> Sequence[Publication]:
        """Return the publications, one per rank, sorted by rank."""
        ...

    async def at(self, engine: EngineId, act: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call `at_engine` at the engine's peer and return its response. Raises Permanent if the call failed and the
        engine is unchanged, and OutcomeUnknown if the engine may have changed."""
        ...

    async def request_trainer(self, step: str, body: Mapping[str, Any]) -> None:
        """Have the trainer perform a step, and return when rank 0 has completed it. Raises OutcomeUnknown if a rank
        reports a failure or the step does not end within the time limit."""
        ...


# Sends a call and its body from the trainer to `relayed` in the daemon, and blocks until the answer arrives. Raises
# OrchestrRLError if the call fails.
ReportStep = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]


class WeightSender(Protocol):
    """The part of a direct backend in one rank of the trainer. `act` is called on all ranks, because tensors may have
    to be gathered. It is called in the thread that publishes."""

    @property
    def tensors(self) -> Sequence[TensorMeta]:
        """Return the tensors of the version."""
        ...

    def use(self, model: Any, options: "SenderOptions") -> None:
        """Use this model's tensors for the next version. Raises the errors of the backend's `sender`."""
        ...

    def act(self, step: TrainerStep, report: ReportStep) -> None:
        """Perform a step. `report` sends calls to the daemon during the step. If the step fails, raises an exception of
        any type."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """The options of a sender, as passed to WeightsClient.publish. `world` is the number of ranks. `own` contains the
    publication's backend-specific options."""

    rank: int
    world: int
    dtype: Any = None
    rename: Any = None
    ignore: Sequence[str] = ()
    own: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class DirectBackend(Protocol):
    """A backend whose trainer sends weights directly into engines. Each process has one instance.

    Construction opens no connections and imports only OrchestrRL. The daemon keeps one instance for its lifetime, so
    that process groups of the trainer and engines can be used for many versions. After a failed sync, the daemon calls
    `forget`. A version cannot be installed again without the trainer.
    """

    def faults(self, publication: Publication) -> list[str]:
        """Return the faults of a publication, each as `path: fault`. The method has no side effects."""
        ...

    async def prepare(self, sync: DirectSync) -> None:
        """Prepare the installation before the fence. The preparation must not change the tokens that engines generate.
        Raises EnginesFailed if engines cannot take part, and another OrchestrRLError if the preparation fails for
        another reason."""
        ...

    async def install(self, sync: DirectSync) -> Mapping[EngineId, OrchestrRLError | None]:
        """Send the version to the engines while all requests are paused. Return the outcome for each engine: None if
        the engine has the version, Permanent or Retryable if the engine is unchanged, and OutcomeUnknown otherwise."""
        ...

    async def relayed(self, sync: DirectSync, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle a call of the trainer during one of its steps, and return the response. Raises OrchestrRLError if the
        call is not allowed in this step or fails."""
        ...

    def forget(self) -> None:
        """Discard the process groups of the trainer and engines, because they may be broken."""
        ...

    async def at_engine(self, engine: Engine, act: str, version: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Perform the action `act` at an engine. This method runs in the engine's peer. It raises the errors of engine
        clients, and OutcomeUnknown if the engine may have changed. An engine must report no version while it is being
        changed."""
        ...

    def sender(self, model: Any, options: SenderOptions) -> WeightSender:
        """Create the sender of one rank of the trainer. Raises Permanent if the model or the options are unsupported,
        or a required package is not installed."""
        ...


class EnginesFailed(Permanent):
    """Raised if engines cannot take part in a sync and are unchanged. `why` contains the reason for each of them. An
    attempt without these engines may succeed."""

    def __init__(self, why: Mapping[EngineId, str]) -> None:
        super().__init__("; ".join(f"{engine}: {words}" for engine, words in sorted(why.items())))
        self.why = why


class EngineOutcomes:
    """The outcome of one installation for each engine. None means that the engine has the version. Permanent or
    Retryable means that the engine is unchanged. OutcomeUnknown means that the engine may have parts of the old and the
    new version."""

    def __init__(self, engines: Iterable[EngineId] = ()) -> None:
        self.by_engine: dict[EngineId, OrchestrRLError | None] = {
            engine: Permanent("the trainer has sent no weights") for engine in engines
        }

    async def act(
        self, sync: DirectSync, act: str, bodies: Mapping[EngineId, Mapping[str, Any]], first: bool, last: bool
    ) -> None:
        """Perform the action `act` at the engines of `bodies` concurrently. `first` is set if the engines are unchanged
        before the action. `last` is set if the engines have the version after the action. If actions fail, raises the
        error of the first engine whose action failed, once all actions have ended."""

        async def one(engine: EngineId, body: Mapping[str, Any]) -> None:
            try:
                await sync.at(engine, act, body)
            except OrchestrRLError as error:
                is_as_it_was = first and not isinstance(error, OutcomeUnknown)
                self.by_engine[engine] = error if is_as_it_was else OutcomeUnknown(str(error))
                raise
            self.by_engine[engine] = None if last else OutcomeUnknown("the weight update began and did not finish")

        for outcome in await asyncio.gather(*(one(*each) for each in bodies.items()), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def broke_off(self, error: OrchestrRLError) -> None:
        """Record that the installation ended with an error. Engines that were recorded as having the version become
        OutcomeUnknown."""
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
    """Create a direct backend by name. Raises Permanent if the name is unknown (listing the known names), if a package
    is missing, or if the backend is not a direct backend."""
    backend = BACKENDS.load(name)()
    if not isinstance(backend, DirectBackend):
        raise Permanent(f"backend {name!r} is not a direct backend")
    return backend
