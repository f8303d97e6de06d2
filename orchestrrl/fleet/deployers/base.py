"""What OrchestrRL asks of whatever starts and stops engines: processes, Ray, Kubernetes, a simulator.

A plug point: one module per product, registered in the entry-point group `orchestrrl.deployers`; every one passes
`orchestrrl/fleet/deployers/conformance.py`. Starting and stopping may be repeated: an engine's id names it for good, so
starting what runs as wanted and stopping what is gone change nothing. Engines outlive the daemon: a deployer that is
made anew finds the engines of its fleet again, also those whose start was cut short. Implementations raise `Retryable`
(not now), `Permanent` (not like this) and `OutcomeUnknown`; after the last, `status` tells.
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
    """Of an engine's processes. Whether they answer is to be asked of the engine itself."""

    ALIVE = "alive"
    ENDED = "ended"  # they went by themselves; what is left of them, GPUs included, goes with `stop`
    UNKNOWN = "unknown"  # its machine does not answer: the GPUs count as taken


@dataclass(frozen=True, slots=True)
class DeployedInstance:
    """One engine of the fleet that holds GPUs. An empty `url`: its place is not known yet. `spec` is what it was
    started with, None where that was lost: such an engine can be stopped, and not started again."""

    engine: EngineId
    configuration: ConfigurationId
    gpus: tuple[GpuId, ...]
    url: str = ""
    life: EngineLife = EngineLife.ALIVE
    detail: str = ""  # of an end: how, with the end of its log
    spec: EngineSpec | None = None
    lent: bool = False  # it sleeps, and its GPUs may serve another


class Deployer(Protocol):
    """Starts and stops engines. A GPU serves one engine at a time. Construction touches nothing."""

    can_lend: bool  # whether the GPUs of an engine that sleeps can serve another
    can_scale: bool  # whether an engine that runs can be given more GPUs, or fewer

    def check(self, spec: EngineSpec) -> None:
        """What can be told of a start beforehand, at once and from files alone. Raises ProblemFaults, or Permanent, for
        what could never start so: a redeployment asks before it stops anybody."""

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        """Begin to start an engine; returns when its processes are there and its URL is known, which is before it
        answers. Raises Permanent when a GPU is taken, when the id runs with another spec, or when it can never start
        so; ProblemFaults for what cannot be put into command lines. Retryable while room may come."""

    async def stop(self, engine: EngineId) -> None:
        """Returns once the engine's processes are gone and its GPUs are free, by force after a grace. An engine that is
        not there is none."""

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        """How it is now; None: nothing of it is left."""

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        """All of this fleet, by id, whoever started them: what holds GPUs now, ended ones and lost ones included."""

    async def lend(self, engine: EngineId, lent: bool) -> None:
        """The engine sleeps, and others may have its GPUs; or it takes them back. Raises Permanent where `can_lend` is
        False, where there is no such engine, and when one that is to have its GPUs back shares them with another."""

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        """An engine that runs has the GPUs of `spec` from now on, and counts as started so; its processes are scaled by
        whoever asks. Raises Permanent where `can_scale` is False, where there is no such engine, and for a GPU that is
        taken."""

    async def close(self) -> None:
        """Release connections. Engines go on."""


class FixedGpusDeployer:
    """A base for deployers whose engines keep their GPUs for as long as they live."""

    can_lend = False
    can_scale = False
    keeps_gpus: ClassVar[str]  # why, for messages

    async def lend(self, engine: EngineId, lent: bool) -> None:
        raise Permanent(f"the GPUs of {engine} cannot be lent: {self.keeps_gpus}")

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        raise Permanent(f"the GPUs of {spec.engine} cannot change: {self.keeps_gpus}")


@dataclass(frozen=True, slots=True)
class FleetIdentity:
    """Whose engines are whose: two daemons that share a machine or a cluster leave each other's alone."""

    name: str
    folder: str  # of the daemon's own, for records and logs


# Each is called with an EngineLaunch, a FleetIdentity, its options and a Clock. It raises Permanent where what it needs
# is not installed, and ProblemFaults for what is wrong with the options, with paths that begin with `options.`
DEPLOYERS = PlugPoint("deployer", "orchestrrl.deployers", {})


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Return a deployer's options, checked. Raises ProblemFaults with every fault, its path beginning with
    `options.`"""
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise ProblemFaults([f"options.{fault}" for fault in faults_of(error, kind)]) from None


def check_free(engine: EngineId, gpus: Collection[GpuId], held: Mapping[EngineId, Collection[GpuId]]) -> None:
    """Raise Permanent where others hold some of the GPUs that the engine is to have."""
    owners = {gpu: other for other, theirs in held.items() if other != engine for gpu in theirs}
    if taken := ", ".join(f"{gpu} by {owners[gpu]}" for gpu in sorted(gpus) if gpu in owners):
        raise Permanent(f"engine {engine} cannot have GPUs that are in use: {taken}")


def check_same(spec: EngineSpec, there: DeployedInstance) -> DeployedInstance:
    """Return the engine that has the id of `spec`. Raises Permanent where it was started with another spec."""
    if there.spec != spec:
        held = f"as {there.configuration or 'nobody knows what'} on GPUs {list(there.gpus)}"
        raise Permanent(f"engine {spec.engine} is there already, {held}, and was started with another spec")
    return there
