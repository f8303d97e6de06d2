"""Small sites, intents and failures for tests of circuit plans: fixed and random."""

from collections.abc import Iterable

from hypothesis import strategies as st

from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import PodRole, Site

GB = 1e9


def small_site(
    train_pods: int = 2,
    gen_pods: int = 2,
    servers_per_pod: int = 4,
    servers_per_tor: int = 2,
    rails: int | None = None,
    tor_uplinks: int = 8,
    core_lanes: int = 16,
    response_lanes: int = 1,
    agg_switches: int | None = None,
    uplinks_per_pod: int = 2,
) -> Site:
    """Return a site of servers with four GPUs and four NICs."""
    return regular_site(
        SiteShape(
            train_pods=train_pods,
            gen_pods=gen_pods,
            servers_per_pod=servers_per_pod,
            gpus_per_server=4,
            nics_per_server=4,
            rails=rails,
            servers_per_tor=servers_per_tor,
            tor_uplinks=tor_uplinks,
            uplinks_per_pod=uplinks_per_pod,
            core_lanes=core_lanes,
            response_lanes=response_lanes,
            agg_switches=agg_switches,
        )
    )


def gpus_of(site: Site, role: PodRole) -> tuple[int, ...]:
    return tuple(gpu for server in site.servers if site.pod[server.pod].role is role for gpu in server.gpus)


@st.composite
def sites(draw: st.DrawFn) -> Site:
    return small_site(
        train_pods=draw(st.integers(1, 2)),
        gen_pods=draw(st.integers(1, 3)),
        servers_per_pod=draw(st.sampled_from([2, 4])),
        servers_per_tor=draw(st.sampled_from([1, 2])),
        rails=draw(st.sampled_from([None, 2, 1])),
        tor_uplinks=draw(st.sampled_from([4, 6])),
        core_lanes=draw(st.sampled_from([8, 12])),
        response_lanes=draw(st.integers(0, 1)),
        agg_switches=draw(st.sampled_from([None, 2])),
    )


@st.composite
def traffic(draw: st.DrawFn, ranks: tuple[int, ...]) -> Traffic:
    """Draw traffic of random disjoint groups."""
    primitive = draw(st.sampled_from(Primitive))
    order = draw(st.permutations(ranks))
    size = draw(st.integers(2, min(9, len(ranks))))
    groups = tuple(tuple(order[first : first + size]) for first in range(0, len(order) - size + 1, size))
    receivers: tuple[tuple[int, ...], ...] = ()
    if primitive is Primitive.BIPARTITE or (primitive is Primitive.BROADCAST and draw(st.booleans())):
        cut = draw(st.integers(1, size - 1))
        groups, receivers = tuple(group[:cut] for group in groups), tuple(group[cut:] for group in groups)
    return Traffic(
        operation=draw(st.sampled_from([TrafficOperation.DP, TrafficOperation.EP, TrafficOperation.RESPONSES])),
        primitive=primitive,
        groups=groups,
        bytes_per_rank=draw(st.sampled_from([1.0, 3e6, GB])),
        times=draw(st.sampled_from([1.0, 2.5])),
        receivers=receivers,
        both_ways=primitive is Primitive.BIPARTITE and draw(st.booleans()),
    )


@st.composite
def intents(draw: st.DrawFn, site: Site, stages: Iterable[Stage] = Stage) -> Intent:
    stage = draw(st.sampled_from(sorted(stages)))
    ranks = tuple(int(gpu) for server in site.servers for gpu in server.gpus)
    if stage is not Stage.WEIGHT_SYNC:
        ranks = gpus_of(site, PodRole.TRAIN if stage is Stage.TRAIN else PodRole.GEN)
    found = draw(st.lists(traffic(tuple(map(int, ranks))), min_size=1, max_size=3))
    return Intent("any", stage, tuple(found))


@st.composite
def failures(draw: st.DrawFn, site: Site) -> FabricFailures:
    ports = [(switch.id, port) for switch in site.switches for ports in switch.ports.values() for port in ports]
    nics = [(server.id, nic) for server in site.servers for nic in range(len(server.tors))]
    return FabricFailures(
        ports=frozenset(draw(st.lists(st.sampled_from(ports), max_size=6))),
        switches=frozenset(draw(st.lists(st.sampled_from([switch.id for switch in site.switches]), max_size=1))),
        nics=frozenset(draw(st.lists(st.sampled_from(nics), max_size=5))),
        servers=frozenset(draw(st.lists(st.sampled_from([server.id for server in site.servers]), max_size=1))),
    )
