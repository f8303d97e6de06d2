"""The communication periods of an iteration, and what is sent in each (section 5.2 of the OrchestrRL paper). Pure."""

from collections.abc import Mapping

from orchestrrl.sim.net.fabrics.base import Period, Stage
from orchestrrl.sim.net.model import Flows, Servers
from orchestrrl.sim.train.constants import MEGATRON, TrainConstants
from orchestrrl.sim.train.model import TrainJob
from orchestrrl.sim.train.traffic import FORWARD_BACKWARD, GRADIENTS, Exchange, traffic


def periods(job: TrainJob, servers: Servers, *, constants: TrainConstants = MEGATRON) -> tuple[Period, ...]:
    """Forward and backward, then gradients (and parameters). Demand is that of a whole iteration."""
    return periods_of(job, traffic(job, servers, constants))


def periods_of(job: TrainJob, exchanges: Mapping[str, Exchange]) -> tuple[Period, ...]:
    return (
        Period(f"{_name(job)}:forward_backward", Stage.TRAIN, _demand(exchanges, FORWARD_BACKWARD)),
        Period(f"{_name(job)}:gradients", Stage.TRAIN, _demand(exchanges, GRADIENTS)),
    )


def layer_periods_of(job: TrainJob, exchanges: Mapping[str, Exchange]) -> tuple[Period, Period]:
    """Attention, with what passes between stages, and experts: the parts of a layer that circuits may follow."""
    return (
        Period(f"{_name(job)}:attention", Stage.TRAIN, _demand(exchanges, ("tp", "cp", "pp"))),
        Period(f"{_name(job)}:experts", Stage.TRAIN, _demand(exchanges, ("ep",))),
    )


def _name(job: TrainJob) -> str:
    """One name, one demand: everything that it depends on is in it."""
    layout = job.layout
    degrees = f"tp{layout.tp}cp{layout.cp}dp{layout.dp}pp{layout.pp}ep{layout.ep}v{layout.vpp}"
    batch = f"{job.sequences}x{job.tokens:g}/{job.micro_sequences}{'r' if job.recompute else ''}"
    return f"train:{job.model.name}:{degrees}:{batch}@{job.first_gpu}"


def _demand(exchanges: Mapping[str, Exchange], kinds: tuple[str, ...]) -> Flows:
    """Between servers: what stays within one asks nothing of the fabric."""
    found = [exchanges[kind] for kind in kinds if kind in exchanges and exchanges[kind].crosses]
    return Flows.joined([each.transfer.flows.times(each.times) for each in found])
