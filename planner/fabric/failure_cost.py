"""What failures cost: the plan of a period on what is left of the fabric, against that on a sound one. Pure."""

from dataclasses import dataclass

from planner.fabric.allocate import BITS_PER_BYTE
from planner.fabric.demand import flows_of
from planner.fabric.intent import Intent
from planner.fabric.masks import failed_ports, healthy_lanes
from planner.fabric.materialize import materialize
from planner.fabric.plan import FabricFailures, FabricPlan, FabricState
from planner.fabric.topology import Site
from planner.model import Hold


@dataclass(frozen=True, slots=True)
class FailureCost:
    """Each as it was and as it is. Seconds of a period are those of its slowest pair of endpoints that has circuits,
    and of its most loaded NIC. `unserved`: pairs with demand that have no circuit any more."""

    healthy_gbps: float  # of all circuits of the plan, each way
    left_gbps: float
    healthy_completion_s: float
    completion_s: float
    healthy_nic_s: float
    nic_s: float
    ports_lost: int  # of optical switches, fibred ones
    lanes_lost: int  # to the core, at either end
    dropped_bytes: float
    unserved: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def lost_gbps(self) -> float:
        return self.healthy_gbps - self.left_gbps

    @property
    def slowdown(self) -> float:
        """Of the period as far as the fabric decides it; 1 where there was nothing to send."""
        before = max(self.healthy_completion_s, self.healthy_nic_s)
        return max(self.completion_s, self.nic_s) / before if before else 1.0


def cost_of(site: Site, intent: Intent, failures: FabricFailures) -> FailureCost | Hold:
    """Both plans start from a fabric on which nothing is up. A server that failed has lost its traffic, which comes
    back with its ranks: place these elsewhere first to learn what remains. Hold: either plan has none."""
    healthy = materialize(site, intent, FabricState())
    left = materialize(site, intent, FabricState(failures=failures))
    if isinstance(healthy, Hold):
        return healthy
    if isinstance(left, Hold):
        return left
    sound, broken = (flows_of(intent, site, each) for each in (FabricFailures(), failures))
    failed = failed_ports(site, failures)
    fibred = {(switch.id, port) for switch in site.switches for ports in switch.ports.values() for port in ports}
    before = {pair for tier in healthy.tiers for pair in tier.unserved}
    return FailureCost(
        healthy_gbps=_gbps(site, healthy),
        left_gbps=_gbps(site, left),
        healthy_completion_s=healthy.completion_s,
        completion_s=left.completion_s,
        healthy_nic_s=_nic_s(site, sound.busiest_nic_bytes),
        nic_s=_nic_s(site, broken.busiest_nic_bytes),
        ports_lost=len(failed & fibred),
        lanes_lost=len(site.lanes) - len(healthy_lanes(site, failed)),
        dropped_bytes=broken.dropped_bytes - sound.dropped_bytes,
        unserved=tuple(sorted({pair for tier in left.tiers for pair in tier.unserved} - before)),
        notes=left.notes,
    )


def _gbps(site: Site, plan: FabricPlan) -> float:
    return site.link_gbps * sum(count for tier in plan.tiers for count in tier.circuits.values())


def _nic_s(site: Site, sent_bytes: float) -> float:
    return sent_bytes * BITS_PER_BYTE / (site.nic_gbps * 1e9)
