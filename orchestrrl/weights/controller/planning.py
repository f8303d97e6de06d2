"""Plan the transfer of a version from the peers that have it to the peers that need it: shards, waves and edges."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import ProblemFaults, few
from orchestrrl.weights.model import DTYPE_BYTES, HeldVersion, Peer, PeerRole, Range, ShardMap, StagedPart, VersionMap
from orchestrrl.weights.orders import CarryEdge, OpenVersion
from orchestrrl.weights.publication import Publication
from planner.model import PeerId
from planner.sync_tree.model import SyncPlan, Unreachable
from planner.sync_tree.network import ShardSegment, SyncNetwork, plan_flows, shard_segments, summed_by
from planner.sync_tree.parameters import Box, overlap
from planner.sync_tree.ranges import PeerFlow
from planner.sync_tree.reshard import ReshardedVersion, ShardSlice, reshard_boxes
from planner.sync_tree.shares import EngineShare, needed_boxes


@dataclass(frozen=True, slots=True)
class PlannedSync:
    """The planned transfer of a version to all peers that need it. `planned_s` maps each edge's id to the duration, in
    seconds, that the planner predicts for the edge."""

    map: VersionMap  # the whole version, for all peers
    opens: Mapping[PeerId, OpenVersion]  # for all holders and receivers; checksums are filled in later
    edges: tuple[CarryEdge, ...]
    planned_s: Mapping[str, float]  # by edge
    plan: SyncPlan
    # The peer that computes the checksums of each shard, one of its holders; empty if they are known.
    summed_by: Mapping[str, PeerId] = field(default_factory=dict)
    shares: Mapping[PeerId, EngineShare] = field(default_factory=dict)  # of all peers, at the time of planning
    held: Mapping[PeerId, HeldVersion] = field(default_factory=dict)  # bytes that peers had before


def plan_sync(
    version: int,
    publications: Sequence[Publication],
    peers: Iterable[Peer],
    network: SyncNetwork,
    settings: WeightSettings,
    *,
    name: str = "0",
) -> PlannedSync:
    """Plan the transfer of a version to all peers of engines. The sources are the parts that trainer ranks have staged.
    `name` is the prefix of the edge ids and must be unique among the plans for a version. Raises ProblemFaults if the
    input is inconsistent, and Unreachable if the network has no path to a receiver."""
    known = {peer.id: peer for peer in peers}
    if faults := list(_unknown_peers(publications, known, network)):
        raise ProblemFaults(faults)
    tensors = {tensor.name: tensor for each in publications for tensor in each.tensors}
    ids = sorted(known)
    parts = {peer: _parts(publications, peer) for peer in ids}
    having = {end: _having(parts[peer]) for end, peer in enumerate(ids)}
    shapes = tuple((name, meta.shape) for name, meta in tensors.items())
    needing = {
        end: _needed(known[peer].share, shapes)
        for end, peer in enumerate(ids)
        if known[peer].role is PeerRole.ENGINE or known[peer].engines
    }
    try:
        sharded = reshard_boxes(
            {name: (meta.shape, DTYPE_BYTES[meta.dtype]) for name, meta in tensors.items()}, having, needing
        )
    except ValueError as error:
        raise ProblemFaults([f"tensors.{error}"]) from None
    maps = {each.shard.id: ShardMap(each.shard.id, each.shard.bytes, each.slices) for each in sharded}
    whole = VersionMap(
        version, tuple(tensors[name] for name in sorted(tensors)), tuple(maps.values()), settings.chunk_bytes
    )
    own: dict[int, list[ReshardedVersion]] = defaultdict(list)
    for each in sharded:
        for end in (*each.shard.holders, *each.shard.receivers):
            own[end].append(each)
    opens = {
        peer: OpenVersion(
            _part_of(whole, tuple(maps[each.shard.id] for each in own[end]), parts[peer]),
            parts[peer],
            at_home=tuple(each.shard.id for each in own[end] if end in each.at_home),
        )
        for end, peer in enumerate(ids)
        if parts[peer] or own[end]
    }
    segments = []
    for shard in (each.shard for each in sharded):
        ends = (tuple(ids[end] for end in each) for each in (shard.holders, shard.receivers))
        segments.append(ShardSegment(shard.id, 0, shard.bytes, *ends))
    planned = _planned(whole, opens, segments, known, network, settings, name)
    return replace(planned, summed_by=summed_by(segments))


def plan_repair(
    fleet: VersionMap,
    receivers: Collection[PeerId],
    peers: Iterable[Peer],
    network: SyncNetwork,
    settings: WeightSettings,
    *,
    held: Mapping[PeerId, HeldVersion],
    name: str = "0",
) -> PlannedSync:
    """Plan the transfer of the bytes of a version that `receivers` lack. `held` has the bytes that each peer already
    stores. `fleet` is the map of the fleet's version, or of a version that an earlier attempt has brought to some
    peers. Only `receivers` are ordered to open the version. Raises ProblemFaults if a peer is not attached or the
    network does not contain it. Raises Unreachable if no peer stores a missing byte range or the network has no path to
    a receiver."""
    known = {peer.id: peer for peer in peers}
    faults = [f"receivers: must be attached, got {peer!r}" for peer in sorted(receivers) if peer not in known]
    faults += _unknown_peers((), known, network)
    if faults:
        raise ProblemFaults(faults)
    shapes = tuple((tensor.name, tensor.shape) for tensor in fleet.tensors)
    own = {peer: _touching(fleet, _needed(known[peer].share, shapes)) for peer in sorted(receivers)}
    missing = {peer: {shard.id: _lacks(shard, held.get(peer)) for shard in shards} for peer, shards in own.items()}
    segments: list[ShardSegment] = []
    for shard in fleet.shards:
        wanted = {peer: each[shard.id] for peer, each in missing.items() if each.get(shard.id)}
        there = {
            peer: missing.get(peer, {}).get(shard.id, each.missing.get(shard.id, ()))
            for peer, each in held.items()
            if peer in known and shard.id in each.shards
        }
        segments += shard_segments(shard.id, shard.bytes, wanted, there)
    if lost := [each for each in segments if not each.holders]:
        ranges = [f"{each.shard} from byte {each.offset} to {each.offset + each.bytes}" for each in lost]
        raise Unreachable(f"no attached peer has these bytes: {few(ranges, between=', ')}")
    opens = {peer: OpenVersion(_part_of(fleet, shards, ())) for peer, shards in own.items()}
    return replace(_planned(fleet, opens, segments, known, network, settings, name), held=held)


def _touching(fleet: VersionMap, needs: Mapping[str, tuple[Box, ...]]) -> tuple[ShardMap, ...]:
    """Return the shards of a version that overlap the needed boxes. `needs` has the boxes by tensor name."""

    def is_needed(piece: ShardSlice) -> bool:
        return any(overlap(piece.box, box) is not None for box in needs.get(piece.parameter, ()))

    return tuple(shard for shard in fleet.shards if any(map(is_needed, shard.slices)))


def _lacks(shard: ShardMap, held: HeldVersion | None) -> tuple[Range, ...]:
    if held is None or shard.id not in held.shards:
        return ((0, shard.bytes),)
    return held.missing.get(shard.id, ())


def _unknown_peers(
    publications: Sequence[Publication], known: Mapping[PeerId, Peer], network: SyncNetwork
) -> Iterator[str]:
    for place, each in enumerate(publications):
        if each.peer not in known:
            yield f"publications[{place}].peer: is not attached, got {each.peer!r}"
    for peer in known:
        if peer not in network.stations:
            yield f"peers.{peer}: has no station in the network: configure its location"


def _parts(publications: Sequence[Publication], peer: PeerId) -> tuple[StagedPart, ...]:
    own = sorted((each for each in publications if each.peer == peer), key=lambda each: each.rank)
    return tuple(StagedPart(each.rank, each.boxes) for each in own)


def _having(parts: Sequence[StagedPart]) -> Mapping[str, tuple[Box, ...]]:
    found: dict[str, dict[Box, None]] = defaultdict(dict)
    for part in parts:
        for name, boxes in part.boxes.items():
            found[name].update(dict.fromkeys(boxes))
    return {name: tuple(boxes) for name, boxes in found.items()}


@lru_cache(maxsize=64)  # peers with equal shares get the identical mapping, which `reshard_boxes` recognizes
def _needed(share: EngineShare, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Mapping[str, tuple[Box, ...]]:
    return needed_boxes(dict(shapes), share)


def _part_of(whole: VersionMap, shards: tuple[ShardMap, ...], parts: Iterable[StagedPart]) -> VersionMap:
    """Return the map of a version reduced to the given shards, their tensors and the tensors of the given parts."""
    names = {name for part in parts for name in part.boxes}
    names.update(piece.parameter for shard in shards for piece in shard.slices)
    return replace(whole, tensors=tuple(tensor for tensor in whole.tensors if tensor.name in names), shards=shards)


def _planned(
    whole: VersionMap,
    opens: Mapping[PeerId, OpenVersion],
    segments: Sequence[ShardSegment],
    known: Mapping[PeerId, Peer],
    network: SyncNetwork,
    settings: WeightSettings,
    name: str,
) -> PlannedSync:
    """Plan the transfer of the segments. Each planned flow becomes an edge with an id, a transport and a rate."""
    flows, plan = plan_flows(segments, network, settings)
    ways = _transports({(flow.src, flow.dst) for flow, _ in flows}, known, settings)
    is_held_back = settings.rate_share < 1 or bool(network.boundary_circuits or network.tor_circuits)
    is_held_back |= network.pairs is not None
    edges = tuple(
        edge_of(
            f"{name}.{number}",
            flow if is_held_back else replace(flow, rate_gbps=0.0),
            known[flow.dst],
            ways[flow.src, flow.dst],
        )
        for number, (flow, _) in enumerate(flows)
    )
    planned_s = {edge.id: seconds for edge, (_, seconds) in zip(edges, flows, strict=True)}
    return PlannedSync(whole, opens, edges, planned_s, plan, shares={id: peer.share for id, peer in known.items()})


def edge_of(id: str, flow: PeerFlow, receiver: Peer, transport: str) -> CarryEdge:
    return CarryEdge(**asdict(flow), id=id, transport=transport, address=receiver.transports[transport])


def common_transport(settings: WeightSettings, one: Peer, other: Peer) -> str | None:
    """Return the first transport, in the order of the settings, that both peers support, or None if they have no
    transport in common."""
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
                f"peers.{dst}.transports: must have one of {', '.join(settings.transports)} in common with {src},"
                f" got {', '.join(sorted(known[dst].transports)) or 'none'} and"
                f" {', '.join(sorted(known[src].transports)) or 'none'}"
            )
    if faults:
        raise ProblemFaults(faults)
    return found
