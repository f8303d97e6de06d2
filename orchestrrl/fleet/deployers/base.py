"""The contract between OrchestrRL and deployers, which start and stop engines as local processes, on Ray or on
Kubernetes, or simulate them.

Each product has one module, registered in the entry-point group `orchestrrl.deployers`, which must pass
`orchestrrl/fleet/deployers/conformance.py`. Start and stop are idempotent. An engine's id identifies it permanently, so
starting an engine that already runs with the same spec, or stopping an engine that does not exist, changes nothing.
Engines outlive the daemon: a new deployer finds the engines of its fleet, including engines whose start was
interrupted.

Implementations raise `Retryable` if a call may succeed later, and `Permanent` if it can never succeed with this spec.
They raise `OutcomeUnknown` if the change may have been made; the caller then reads `status`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import ValidationError

from orchestrrl.core.documents import Section
from orchestrrl.core.errors import Permanent, ProblemFaults, faults_of
from orchestrrl.core.plug_points import PlugPoint
from orchestrrl.fleet.deployers.command_line import EngineSpec
from planner.model import ConfigurationId, EngineId, GpuId

Options = TypeVar("Options", bound=Section)


class EngineLife(StrEnum):
    """The state of an engine's processes. It does not indicate whether the engine answers requests."""

    ALIVE = "alive"
    ENDED = "ended"  # they exited; `stop` releases their GPUs and other remains
    UNKNOWN = "unknown"  # its machine does not answer: the GPUs count as in use


@dataclass(frozen=True, slots=True)
class DeployedInstance:
    """One engine of the fleet that holds GPUs. `url` is empty until the engine's address is known. `spec` is the spec
    with which the engine was started, or None if its record was lost. An engine without a spec can be stopped, but not
    started again."""

    engine: EngineId
    configuration: ConfigurationId
    gpus: tuple[GpuId, ...]
    url: str = ""
    life: EngineLife = EngineLife.ALIVE
    detail: str = ""  # how the engine ended, with the end of its log
    spec: EngineSpec | None = None
    lent: bool = False  # it sleeps, and another engine may use its GPUs


class Deployer(Protocol):
    """Starts and stops engines. A GPU serves one engine at a time. Construction has no side effects."""

    can_lend: bool  # whether another engine can use the GPUs of a sleeping one
    can_scale: bool  # whether a running engine can get more or fewer GPUs

    def check(self, spec: EngineSpec) -> None:
        """Check in advance whether an engine can be started. The check does not wait and reads only files. Raises
        ProblemFaults or Permanent if the start can never succeed. A redeployment calls this method before it stops any
        engine."""

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        """Begin to start an engine. Return when its processes exist and its URL is known, before it answers
        requests.

        Raises Permanent if a GPU is in use, an engine with this id runs with another spec, or the start can never
        succeed. Raises ProblemFaults if no command line can be rendered from the spec, and Retryable if resources are
        missing that may become free.
        """

    async def stop(self, engine: EngineId) -> None:
        """Stop an engine, by force after a grace period, and return once its processes are gone and its GPUs are free.
        Does nothing if the engine does not exist."""

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        """Return the current state of the engine, or None if neither a process nor a record of it exists."""

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        """Return all engines of this fleet that hold GPUs, sorted by id, including ended and lost engines and engines
        that earlier daemons started."""

    async def lend(self, engine: EngineId, lent: bool) -> None:
        """If `lent` is True, release the GPUs of a sleeping engine for other engines; otherwise, reclaim them. Raises
        Permanent if `can_lend` is False, the engine does not exist, or a GPU to reclaim is in use by another engine."""

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        """Record that a running engine has the GPUs of `spec` from now on, as if it had been started with them. The
        caller scales the engine's processes. Raises Permanent if `can_scale` is False, the engine does not exist, or
        another engine uses one of the GPUs."""

    async def close(self) -> None:
        """Release connections. Engines continue to run."""


class FixedGpusDeployer:
    """A base class for deployers whose engines keep their GPUs for their lifetime."""

    can_lend = False
    can_scale = False
    keeps_gpus: ClassVar[str]  # the reason, for messages

    async def lend(self, engine: EngineId, lent: bool) -> None:
        raise Permanent(f"the GPUs of engine {engine} cannot be lent: {self.keeps_gpus}")

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        raise Permanent(f"the GPUs of engine {spec.engine} cannot change: {self.keeps_gpus}")


@dataclass(frozen=True, slots=True)
class FleetIdentity:
    """The identity of a fleet. Daemons of different fleets that share a machine or a cluster ignore each other's
    engines."""

    name: str
    folder: str  # the daemon's own, for records and logs


# Each is called with an EngineLaunch, a FleetIdentity, its options and a Clock. It raises Permanent if a dependency is
# not installed, and ProblemFaults for invalid options, with paths that begin with `options.`
DEPLOYERS = PlugPoint("deployer", "orchestrrl.deployers", {})


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Validate and return a deployer's options. Raises ProblemFaults with every fault if options are invalid. Each
    fault begins with the path of the option, for example `options.grace_s`."""
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise ProblemFaults([f"options.{fault}" for fault in faults_of(error, kind)]) from None


def check_free(engine: EngineId, gpus: Collection[GpuId], held: Mapping[EngineId, Collection[GpuId]]) -> None:
    """Raise Permanent if an engine other than `engine` holds any of these GPUs."""
    owners = {gpu: other for other, theirs in held.items() if other != engine for gpu in theirs}
    if taken := ", ".join(f"{gpu} by {owners[gpu]}" for gpu in sorted(gpus) if gpu in owners):
        raise Permanent(f"engine {engine} needs GPUs that are in use: {taken}")


def check_same(spec: EngineSpec, there: DeployedInstance) -> DeployedInstance:
    """Return `there`, the existing engine with the id of `spec`. Raises Permanent if this engine was started with
    another spec."""
    if there.spec != spec:
        held = f"{there.configuration or 'an unknown configuration'} on GPUs {list(there.gpus)}"
        raise Permanent(f"engine {spec.engine} already exists with other settings: {held}")
    return there
