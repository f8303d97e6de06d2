"""The contract between OrchestrRL and deployers, which start and stop engines: processes, Ray, Kubernetes, a simulator.

A plug point: one module per product, registered in the entry-point group `orchestrrl.deployers`; each must pass
`orchestrrl/fleet/deployers/conformance.py`. Start and stop are idempotent: an engine's id identifies it permanently, so
starting an engine that runs as wanted, or stopping one that is gone, changes nothing. Engines outlive the daemon: a new
deployer finds the engines of its fleet, including those whose start was interrupted. Implementations raise `Retryable`
(not now), `Permanent` (never with this spec) and `OutcomeUnknown`; after the last, read `status`.
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
    """The state of an engine's processes. It does not include whether the engine answers requests."""

    ALIVE = "alive"
    ENDED = "ended"  # they exited; `stop` releases their GPUs and other remains
    UNKNOWN = "unknown"  # its machine does not answer: the GPUs count as in use


@dataclass(frozen=True, slots=True)
class DeployedInstance:
    """One engine of the fleet that holds GPUs. An empty `url` means that its place is not known yet. `spec` is what it
    was started with; None if that was lost: such an engine can be stopped, but not started again."""

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
        """Check a start in advance, without waiting and from files only. Raises ProblemFaults or Permanent if it can
        never succeed. A redeployment calls this before it stops any engine."""

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        """Begin to start an engine. Returns when its processes exist and its URL is known, which is before it answers.

        Raises Permanent if a GPU is in use, the id runs with another spec, or the start can never succeed;
        ProblemFaults for what cannot be put into command lines; Retryable if resources may become free.
        """

    async def stop(self, engine: EngineId) -> None:
        """Stop an engine and return once its processes are gone and its GPUs are free, by force after a grace period.
        Does nothing if the engine does not exist."""

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        """Return the engine as it is now; None if nothing of it is left."""

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        """Return all engines of this fleet that hold GPUs, by id, including ended and lost ones and those of earlier
        daemons."""

    async def lend(self, engine: EngineId, lent: bool) -> None:
        """Release the GPUs of a sleeping engine for other engines, or reclaim them. Raises Permanent if `can_lend` is
        False, the engine does not exist, or a GPU to reclaim is in use by another engine."""

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        """Record that a running engine has the GPUs of `spec` from now on, as if started so; the caller scales its
        processes. Raises Permanent if `can_scale` is False, the engine does not exist, or a GPU is in use."""

    async def close(self) -> None:
        """Release connections. Engines continue to run."""


class FixedGpusDeployer:
    """A base for deployers whose engines keep their GPUs for their lifetime."""

    can_lend = False
    can_scale = False
    keeps_gpus: ClassVar[str]  # the reason, for messages

    async def lend(self, engine: EngineId, lent: bool) -> None:
        raise Permanent(f"the GPUs of {engine} cannot be lent: {self.keeps_gpus}")

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        raise Permanent(f"the GPUs of {spec.engine} cannot change: {self.keeps_gpus}")


@dataclass(frozen=True, slots=True)
class FleetIdentity:
    """The identity of a fleet. Two daemons that share a machine or a cluster ignore each other's engines."""

    name: str
    folder: str  # the daemon's own, for records and logs


# Each is called with an EngineLaunch, a FleetIdentity, its options and a Clock. It raises Permanent if a dependency is
# not installed, and ProblemFaults for invalid options, with paths that begin with `options.`
DEPLOYERS = PlugPoint("deployer", "orchestrrl.deployers", {})


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Return a deployer's options, validated. Raises ProblemFaults with every fault; each path begins with
    `options.`"""
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise ProblemFaults([f"options.{fault}" for fault in faults_of(error, kind)]) from None


def check_free(engine: EngineId, gpus: Collection[GpuId], held: Mapping[EngineId, Collection[GpuId]]) -> None:
    """Raise Permanent if other engines hold any of these GPUs."""
    owners = {gpu: other for other, theirs in held.items() if other != engine for gpu in theirs}
    if taken := ", ".join(f"{gpu} by {owners[gpu]}" for gpu in sorted(gpus) if gpu in owners):
        raise Permanent(f"engine {engine} needs GPUs that are in use: {taken}")


def check_same(spec: EngineSpec, there: DeployedInstance) -> DeployedInstance:
    """Return the engine that has the id of `spec`. Raises Permanent if it was started with another spec."""
    if there.spec != spec:
        held = f"{there.configuration or 'an unknown configuration'} on GPUs {list(there.gpus)}"
        raise Permanent(f"engine {spec.engine} exists already with another spec: {held}")
    return there
