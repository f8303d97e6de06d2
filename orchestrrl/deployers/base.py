"""What OrchestrRL asks of whatever starts and stops engines: processes, Ray, Kubernetes, a simulator.

A plug point: one module per product, registered in the entry-point group `orchestrrl.deployers`. Both calls may be
repeated: starting what runs as wanted and stopping what is gone change nothing. Implementations raise `Retryable`,
`Permanent` and `OutcomeUnknown`; after the last, `observe` tells.
"""

from dataclasses import dataclass
from typing import Protocol

from planner.model import ConfigurationId, EngineId, GpuId


@dataclass(frozen=True, slots=True)
class Deployed:
    """One engine that holds GPUs. An empty `url`: it does not answer yet."""

    engine: EngineId
    configuration: ConfigurationId
    gpus: tuple[GpuId, ...]
    url: str = ""


class Deployer(Protocol):
    """Starts and stops engines. A GPU serves one engine at a time; whose it is, `observe` says."""

    async def start(self, engine: EngineId, configuration: ConfigurationId, gpus: tuple[GpuId, ...]) -> Deployed:
        """Returns once the engine answers. Raises Permanent when a GPU is taken, or the configuration unknown."""
        ...

    async def stop(self, engine: EngineId) -> None:
        """Returns once the engine's GPUs are free."""
        ...

    async def observe(self) -> tuple[Deployed, ...]:
        """What holds GPUs now, by id."""
        ...
