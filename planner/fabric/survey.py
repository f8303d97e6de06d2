"""Survey a site: the capacity of each level of a PoD, the ports of each switch, and warnings about missing parts and
unusual cabling."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from planner.fabric.model import EndpointId, OcsId
from planner.fabric.topology import RESPONSES, Pod, PodRole, Site, Switch, Tier


@dataclass(frozen=True, slots=True)
class PodCapacity:
    """The parts of one PoD, with their capacities in Gbps per direction. `hosts_gbps` is the capacity of its NICs,
    `tors_gbps` is that of the fibres from its ToRs to the switches, and `uplinks_gbps` is that of its lanes to the
    core."""

    pod: Pod
    servers: int
    gpus: int
    tors: int
    uplinks: int
    lanes: int
    hosts_gbps: float
    tors_gbps: float
    uplinks_gbps: float
    worst_tor: EndpointId | None  # the ToR whose NICs exceed its fibres most
    worst_tor_ratio: float  # its NIC capacity over its fibre capacity

    @property
    def tor_ratio(self) -> float:
        """The ratio of host capacity to ToR fibre capacity. If it is at most 1, the fibres can carry all host
        traffic."""
        return self.hosts_gbps / self.tors_gbps

    @property
    def uplink_ratio(self) -> float | None:
        """The ratio of host capacity to uplink capacity; None if the PoD has no uplinks."""
        return self.hosts_gbps / self.uplinks_gbps if self.uplinks_gbps else None


@dataclass(frozen=True, slots=True)
class SwitchPorts:
    switch: Switch
    fibred: int
    reserved: int  # of those fibred

    @property
    def spare(self) -> int:
        return self.switch.device.ports - self.fibred


@dataclass(frozen=True, slots=True)
class SiteSurvey:
    pods: tuple[PodCapacity, ...]
    switches: tuple[SwitchPorts, ...]
    warnings: tuple[str, ...]


def survey(site: Site) -> SiteSurvey:
    nics = Counter(tor for server in site.servers for tor in server.tors)
    lanes = Counter(site.pod_of[lane.uplink] for lane in site.lanes)
    pods = tuple(_capacity(site, pod, nics, lanes[pod.id]) for pod in site.pods)
    reserved = Counter(switch for switch, _ in site.reserved)
    switches = tuple(
        SwitchPorts(switch, sum(map(len, switch.ports.values())), reserved[switch.id]) for switch in site.switches
    )
    warnings = (*_oversubscribed(pods), *_idle(site, nics), *_strangers(site), *_without_responses(site))
    return SiteSurvey(pods, switches, warnings)


def _capacity(site: Site, pod: Pod, nics: Mapping[EndpointId, int], lanes: int) -> PodCapacity:
    tors, servers = site.tors_of[pod.id], site.servers_of[pod.id]
    fibres = {tor.id: len(site.fibres[Tier.AGG].get(tor.id, ())) for tor in tors}
    ratio = {tor: nics.get(tor, 0) * site.nic_gbps / (count * site.link_gbps) for tor, count in fibres.items() if count}
    worst = max(ratio, key=lambda tor: ratio[tor], default=None)
    return PodCapacity(
        pod=pod,
        servers=len(servers),
        gpus=sum(len(server.gpus) for server in servers),
        tors=len(tors),
        uplinks=len(site.uplinks_of[pod.id]),
        lanes=lanes,
        hosts_gbps=sum(len(server.tors) for server in servers) * site.nic_gbps,
        tors_gbps=sum(fibres.values()) * site.link_gbps,
        uplinks_gbps=lanes * site.link_gbps,
        worst_tor=worst,
        worst_tor_ratio=0.0 if worst is None else ratio[worst],
    )


def _oversubscribed(pods: tuple[PodCapacity, ...]) -> Iterator[str]:
    for each in pods:
        if each.worst_tor_ratio > 1:
            worst = f"{each.worst_tor} {each.worst_tor_ratio:.3g} times"
            yield f"{each.pod.id}: ToRs have more capacity to hosts than upwards; worst: {worst}"


def _idle(site: Site, nics: Mapping[EndpointId, int]) -> Iterator[str]:
    for pod in site.pods:
        if not site.servers_of[pod.id]:
            yield f"{pod.id}: has no servers"
            continue
        bare = [tor.id for tor in site.tors_of[pod.id] if not nics.get(tor.id)]
        if bare:
            yield f"{pod.id}: no server is connected to {_some(bare)}"
    for switch in site.switches:
        if len(switch.ports) < 2:
            yield f"{switch.id}: cannot form a circuit, as it has fibres of {len(switch.ports)} endpoints"
    for role in PodRole:
        if all(pod.role is not role for pod in site.pods):
            yield f"the site has no PoD of role {role}"


def _strangers(site: Site) -> Iterator[str]:
    """Yield a warning for each layer with two endpoints that no circuit can connect, because they share no switch.
    Pairs of uplinks of the same PoD are ignored, because they need no circuit."""
    uplinks = {uplink.id for uplink in site.uplinks}
    for layer, switches in (*site.agg_switches_of.items(), ("core", site.core_switches)):
        on: dict[EndpointId, set[OcsId]] = defaultdict(set)
        for switch in switches:
            for endpoint in set(site.cabling.ports[switch.id].values()):
                on[endpoint].add(switch.id)
        if apart := _apart(on, uplinks):
            yield f"{layer}: no switch has fibres of both {apart[0]} and {apart[1]}, so no circuit can connect them"


def _apart(
    on: Mapping[EndpointId, set[OcsId]], uplinks: Collection[EndpointId]
) -> tuple[EndpointId, EndpointId] | None:
    """Return the first two endpoints that share no switch; None if any two endpoints share one. `on` lists the switches
    of each endpoint. Pairs of uplinks are ignored. If several uplinks or several other endpoints are on the same
    switches, only one of them is checked."""
    alike: dict[tuple[bool, frozenset[OcsId]], EndpointId] = {}
    for endpoint in sorted(on):
        alike.setdefault((endpoint in uplinks, frozenset(on[endpoint])), endpoint)
    for ((is_uplink, ours), one), ((is_other_uplink, theirs), other) in combinations(alike.items(), 2):
        if not ours & theirs and not (is_uplink and is_other_uplink):
            return one, other
    return None


def _without_responses(site: Site) -> Iterator[str]:
    roles = {pod.role for pod in site.pods}
    if roles != set(PodRole):
        return
    kept = {
        site.cabling.endpoint(switch, port) for (switch, port), purpose in site.reserved.items() if purpose == RESPONSES
    }
    without = [pod.id for pod in site.pods if pod.role is PodRole.GEN and pod.id not in kept]
    if without:
        yield f"no lane is reserved for responses from {_some(without)}"


def _some(names: list[EndpointId]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
