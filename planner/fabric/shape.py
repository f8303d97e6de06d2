"""What a regular site is made of, and what numbers cannot be one. `generate.py` builds it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.fabric.topology import DEVICES, SwitchModel

MOST_GPUS = 2**20  # beyond any site; what is more is a slip, and would take all memory
MOST_FIBRES = 2**22
MOST_GBPS = 10_000.0
_TOR_NICS = 32  # of a ToR with 64 ports, one half goes down


@dataclass(frozen=True, slots=True)
class ShapeFault:
    """What is wrong with a parameter, or what to change. `value`: what it is."""

    parameter: str
    message: str
    value: object


class ImpossibleSite(ValueError):
    """No site has these parameters. With all faults."""

    def __init__(self, faults: Iterable[ShapeFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{each.parameter}: {each.message}, got {each.value}" for each in self.faults))


@dataclass(frozen=True, slots=True)
class SiteShape:
    """What a regular site is made of; None: as it usually is. Raises Impossible.

    By default NICs, links and switches are those of the paper's simulations (section 7), ToRs have as much capacity up
    as down, and half of that fits through a PoD's uplinks.
    """

    train_pods: int
    gen_pods: int
    servers_per_pod: int
    gpus_per_server: int = 8
    nics_per_server: int = 8
    rails: int | None = None  # as many as NICs; with fewer, several NICs of a server are on one ToR
    servers_per_tor: int | None = None  # at most; as many as 32 ports of a ToR take
    tor_uplinks: int | None = None  # fibres of a ToR
    uplinks_per_pod: int = 1
    core_lanes: int | None = None  # of a PoD, over all of its uplinks
    response_lanes: int | None = None  # of each Gen PoD, kept for responses; 1 where Train PoDs keep half of theirs
    link_gbps: float = 200.0
    nic_gbps: float = 200.0
    agg_device: SwitchModel = DEVICES["piezo_polatis"]
    core_device: SwitchModel = DEVICES["piezo_polatis"]
    agg_switches: int | None = None  # of each PoD; as few as have the ports
    core_switches: int | None = None

    def __post_init__(self) -> None:
        faults = list(_out_of_bounds(self)) or list(_at_odds(self))
        if faults:
            raise ImpossibleSite(faults)

    @property
    def pods(self) -> int:
        return self.train_pods + self.gen_pods

    @property
    def rail_count(self) -> int:
        return self.nics_per_server if self.rails is None else self.rails

    @property
    def nics_per_rail(self) -> int:
        """Of one server."""
        return self.nics_per_server // self.rail_count

    @property
    def blocks(self) -> int:
        """Groups of a PoD's servers that share ToRs."""
        most = self.servers_per_tor or max(1, _TOR_NICS // self.nics_per_rail)
        return -(-self.servers_per_pod // most)

    @property
    def tor_fibres(self) -> int:
        most_servers = -(-self.servers_per_pod // self.blocks)
        return self.tor_uplinks or math.ceil(most_servers * self.nics_per_rail * self.nic_gbps / self.link_gbps)

    @property
    def uplinks(self) -> int:
        """Of each PoD. One PoD alone has no core."""
        return self.uplinks_per_pod if self.pods > 1 else 0

    @property
    def uplink_lanes(self) -> int:
        """Fibres of one uplink."""
        lanes = self.core_lanes or self.blocks * self.rail_count * self.tor_fibres // 2
        return max(1, lanes // self.uplinks_per_pod)


_LEAST = {
    "train_pods": 0,
    "gen_pods": 0,
    "servers_per_pod": 1,
    "gpus_per_server": 1,
    "nics_per_server": 1,
    "rails": 1,
    "servers_per_tor": 1,
    "tor_uplinks": 1,
    "uplinks_per_pod": 1,
    "core_lanes": 1,
    "response_lanes": 0,
    "agg_switches": 1,
    "core_switches": 1,
}


def _out_of_bounds(shape: SiteShape) -> Iterator[ShapeFault]:
    for name, least in _LEAST.items():
        value = getattr(shape, name)
        if value is not None and not least <= value <= MOST_GPUS:
            yield ShapeFault(name, f"must be >= {least} and <= {MOST_GPUS}", value)
    for name in ("link_gbps", "nic_gbps"):
        if not 0 < getattr(shape, name) <= MOST_GBPS:
            yield ShapeFault(name, f"must be > 0 and <= {MOST_GBPS:g}", getattr(shape, name))


def _at_odds(shape: SiteShape) -> Iterator[ShapeFault]:
    gpus, nics = shape.gpus_per_server, shape.nics_per_server
    if not shape.pods:
        yield ShapeFault("gen_pods", "there must be PoDs, of train_pods or gen_pods", shape.gen_pods)
    if gpus % nics and nics % gpus:
        yield ShapeFault("nics_per_server", f"must share {gpus} GPUs of a server evenly", nics)
    if nics % shape.rail_count:
        yield ShapeFault("rails", f"must divide the {nics} NICs of a server", shape.rail_count)
        return
    if shape.core_lanes is not None and shape.core_lanes % shape.uplinks_per_pod:
        message = f"must be a multiple of the {shape.uplinks_per_pod} uplinks of a PoD"
        yield ShapeFault("core_lanes", message, shape.core_lanes)
    total = shape.pods * shape.servers_per_pod * max(gpus, nics)
    if total > MOST_GPUS:
        yield ShapeFault(
            "servers_per_pod", f"all servers together have {total} GPUs or NICs, more than {MOST_GPUS}", total
        )
    fibres = shape.blocks * shape.rail_count * shape.tor_fibres + 2 * shape.uplinks * shape.uplink_lanes
    if shape.pods * fibres > MOST_FIBRES:
        worst = "tor_uplinks" if shape.tor_uplinks else "core_lanes" if shape.core_lanes else "servers_per_pod"
        message = f"all PoDs together have {shape.pods * fibres} fibres on switches, more than {MOST_FIBRES}"
        yield ShapeFault(worst, message, getattr(shape, worst))
