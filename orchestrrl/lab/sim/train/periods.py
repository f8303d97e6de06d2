"""The communication periods of an iteration, and what is sent in each (section 5.2 of the OrchestrRL paper). Pure."""

from collections.abc import Mapping

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period
from orchestrrl.lab.sim.net.model import GpuFlows, Servers
from orchestrrl.lab.sim.train.constants import MEGATRON, TrainConstants
from orchestrrl.lab.sim.train.model import TrainJob
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, GRADIENTS, GroupCollective, traffic


def periods(job: TrainJob, servers: Servers, *, constants: TrainConstants = MEGATRON) -> tuple[Period, ...]:
    """Forward and backward, then gradients (and parameters). Demand is that of a whole iteration."""
    return periods_of(job, traffic(job, servers, constants))


def periods_of(job: TrainJob, exchanges: Mapping[str, GroupCollective]) -> tuple[Period, Period]:
    return (
        _period(job, "forward_backward", exchanges, FORWARD_BACKWARD),
        _period(job, "gradients", exchanges, GRADIENTS),
    )


def layer_periods_of(job: TrainJob, exchanges: Mapping[str, GroupCollective]) -> tuple[Period, Period]:
    """Attention, with what passes between stages, and experts: the parts of a layer that circuits may follow."""
    return (
        _period(job, "attention", exchanges, ("tp", "cp", "pp")),
        _period(job, "experts", exchanges, ("ep",)),
    )


def _period(job: TrainJob, name: str, exchanges: Mapping[str, GroupCollective], kinds: tuple[str, ...]) -> Period:
    """What stays within a server asks nothing of the fabric."""
    found = [exchanges[kind] for kind in kinds if kind in exchanges and exchanges[kind].crosses]
    demand = GpuFlows.joined([each.transfer.flows.times(each.times) for each in found])
    return Period.of(f"train:{job.model.name}:{name}", FabricStage.TRAIN, demand)
