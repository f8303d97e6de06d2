"""Flows of a plan as the edges that peers are ordered to carry, each with its transport and rate. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.model import Peer
from orchestrrl.weights.orders import CarryEdge
from planner.model import PeerId
from planner.sync_tree.flows import PeerFlow
from planner.sync_tree.network import SyncNetwork


def edges_of(
    flows: Sequence[PeerFlow],
    known: Mapping[PeerId, Peer],
    network: SyncNetwork,
    settings: WeightSettings,
    attempt: int,
) -> tuple[tuple[CarryEdge, ...], dict[str, float]]:
    """Return an edge for each flow, and the seconds of each by the plan's model.

    Raises ProblemFaults where two peers have no transport in common.
    """
    ways = _transports({(flow.src, flow.dst) for flow in flows}, known, settings)
    is_held_back = settings.rate_share < 1 or bool(network.boundary_circuits or network.tor_circuits)
    is_held_back |= network.pairs is not None
    edges = tuple(
        CarryEdge(
            id=f"{attempt}.{number}",
            shard=flow.shard,
            offset=flow.offset,
            bytes=flow.bytes,
            src=flow.src,
            dst=flow.dst,
            transport=ways[flow.src, flow.dst],
            address=known[flow.dst].transports[ways[flow.src, flow.dst]],
            wave=flow.wave,
            phase=flow.phase,
            rate_gbps=flow.rate_gbps if is_held_back else 0.0,
        )
        for number, flow in enumerate(flows)
    )
    return edges, {edge.id: flow.seconds for edge, flow in zip(edges, flows, strict=True)}


def common_transport(settings: WeightSettings, one: Peer, other: Peer) -> str | None:
    """Return the first transport by the settings' order that both peers have."""
    return next((name for name in settings.transports if name in one.transports and name in other.transports), None)


def _transports(
    pairs: Iterable[tuple[PeerId, PeerId]], known: Mapping[PeerId, Peer], settings: WeightSettings
) -> dict[tuple[PeerId, PeerId], str]:
    found: dict[tuple[PeerId, PeerId], str] = {}
    faults = []
    for src, dst in sorted(pairs):
        if transport := common_transport(settings, known[src], known[dst]):
            found[src, dst] = transport
        else:
            faults.append(
                f"peers.{dst}.transports: has none of {', '.join(settings.transports)} in common with {src},"
                f" got {', '.join(sorted(known[dst].transports)) or 'none'} and"
                f" {', '.join(sorted(known[src].transports)) or 'none'}"
            )
    if faults:
        raise ProblemFaults(faults)
    return found
