"""Plan a version's way from the peers that have it to those that need it: shards, waves and edges. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.model import (
    DTYPE_BYTES,
    EngineShare,
    HeldVersion,
    Peer,
    PeerRole,
    Range,
    ShardMap,
    StagedPart,
    TensorMeta,
    VersionMap,
)
from orchestrrl.weights.orders import CarryEdge, OpenVersion
from orchestrrl.weights.publication import Publication
from planner.model import PeerId
from planner.sync_tree.flows import plan_flows
from planner.sync_tree.model import Unreachable
from planner.sync_tree.network import SyncNetwork
from planner.sync_tree.parameters import Box
from planner.sync_tree.ranges import ByteRanges
from planner.sync_tree.reshard import ReshardedVersion, ShardSlice, reshard_boxes
from planner.sync_tree.segments import ShardSegment, shard_segments, summed_by
from planner.sync_tree.shares import needed_boxes


@dataclass(frozen=True, slots=True)
class PlannedSync:
    """The way of a version to all peers that need it. Each edge has its time by the plan's model."""

    version: int
    map: VersionMap  # all of it, whoever has to do with it
    bytes: int  # of the version, each byte once
    opens: Mapping[PeerId, OpenVersion]  # for all who hold or receive; sums are filled in when they are known
    summed_by: Mapping[str, PeerId]  # who is asked for a shard's sums: one of those who hold it
    edges: tuple[CarryEdge, ...]
    planned_s: Mapping[str, float]  # by edge
    estimate_s: float
    lower_bound_s: float
    naive_s: float
    waves: int


@dataclass(frozen=True, slots=True)
class PeerHolding:
    """The part of a version that a peer has, received or staged, by the map that it was opened with there."""

    map: VersionMap
    missing: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)  # by shard


def plan_sync(
    version: int,
    publications: Sequence[Publication],
    peers: Iterable[Peer],
    network: SyncNetwork,
    settings: WeightSettings,
    *,
    have: Mapping[PeerId, PeerHolding] | None = None,
    name: str = "0",
) -> PlannedSync:
    """Plan from the parts that trainers have staged, and what peers `have` since an earlier attempt, to all
    peers of engines. `name`: of the plan, in the ids of its edges: peers may know edges of another plan for the same
    version. Raises ProblemFaults for what does not fit together, and
    Unreachable where no way leads to somebody."""
    known = {peer.id: peer for peer in peers}
    if faults := list(_unknown_peers(publications, known, network)):
        raise ProblemFaults(faults)
    tensors = {tensor.name: tensor for each in publications for tensor in each.tensors}
    ids = sorted(known)
    parts = {peer: _parts(publications, peer) for peer in ids}
    having = {end: _having(parts[peer], (have or {}).get(peer), tensors) for end, peer in enumerate(ids)}
    needing = {end: _needing(known[peer], tensors) for end, peer in enumerate(ids) if _has_engines(known[peer])}
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
    opens = {
        peer: _opened(whole, parts[peer], end, sharded)
        for end, peer in enumerate(ids)
        if parts[peer] or any(end in (*each.shard.holders, *each.shard.receivers) for each in sharded)
    }
    segments = [
        ShardSegment(
            each.shard.id, 0, each.shard.bytes, _named(ids, each.shard.holders), _named(ids, each.shard.receivers)
        )
        for each in sharded
    ]
    planned = _planned(whole, opens, segments, known, network, settings, name)
    # What came in an earlier attempt is found by its sums, so these are of what trainers have staged.
    return replace(planned, summed_by=summed_by(_staged_alone(segments, whole, parts, have or {}, tensors)))


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
    """Plan what these peers lack of a version that is in the fleet already, from the peers that have it: `held`. Only
    receivers are told to open it. Raises ProblemFaults, and Unreachable where no peer has some of it or no way leads to
    a receiver."""
    known = {peer.id: peer for peer in peers}
    faults = [f"receivers: must be attached, got {peer!r}" for peer in sorted(receivers) if peer not in known]
    faults += _unknown_peers((), known, network)
    if faults:
        raise ProblemFaults(faults)
    tensors = {tensor.name: tensor for tensor in fleet.tensors}
    own = {peer: _touching(fleet, _needing(known[peer], tensors)) for peer in sorted(receivers)}
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
        told = [f"{each.shard} from byte {each.offset} to {each.offset + each.bytes}" for each in lost]
        more = f" and {len(told) - 8} more" if len(told) > 8 else ""
        raise Unreachable(f"nobody has {', '.join(told[:8])}{more}")
    opens = {peer: OpenVersion(_part_of(fleet, shards, ())) for peer, shards in own.items()}
    return _planned(fleet, opens, segments, known, network, settings, name)


def _touching(fleet: VersionMap, needs: Mapping[str, tuple[Box, ...]]) -> tuple[ShardMap, ...]:
    """Return the shards of which some is needed."""

    def is_needed(piece: ShardSlice) -> bool:
        return any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(piece.box, box, strict=True))
            for box in needs.get(piece.parameter, ())
        )

    return tuple(shard for shard in fleet.shards if any(is_needed(piece) for piece in shard.slices))


def _lacks(shard: ShardMap, held: HeldVersion | None) -> tuple[Range, ...]:
    if held is None or shard.id not in held.shards:
        return ((0, shard.bytes),)
    return held.missing.get(shard.id, ())


def _has_engines(peer: Peer) -> bool:
    return peer.role is PeerRole.ENGINE or bool(peer.engines)


def _named(ids: Sequence[PeerId], ends: Iterable[int]) -> tuple[PeerId, ...]:
    return tuple(ids[end] for end in ends)


def _unknown_peers(
    publications: Sequence[Publication], known: Mapping[PeerId, Peer], network: SyncNetwork
) -> Iterator[str]:
    for place, each in enumerate(publications):
        if each.peer not in known:
            yield f"publications[{place}].peer: is not attached, got {each.peer!r}"
    for peer in known:
        if peer not in network.stations:
            yield f"peers.{peer}: is nowhere in the network, got no station"


def _parts(publications: Sequence[Publication], peer: PeerId) -> tuple[StagedPart, ...]:
    own = sorted((each for each in publications if each.peer == peer), key=lambda each: each.rank)
    return tuple(StagedPart(each.rank, each.boxes) for each in own)


def _having(
    parts: Sequence[StagedPart], holding: PeerHolding | None, tensors: Mapping[str, TensorMeta]
) -> Mapping[str, tuple[Box, ...]]:
    found: dict[str, dict[Box, None]] = defaultdict(dict)
    for part in parts:
        for name, boxes in part.boxes.items():
            found[name].update(dict.fromkeys(boxes))
    for name, box in _received(holding, tensors) if holding else ():
        found[name][box] = None
    return {name: tuple(boxes) for name, boxes in found.items()}


def _received(holding: PeerHolding, tensors: Mapping[str, TensorMeta]) -> Iterator[tuple[str, Box]]:
    """Boxes that are there whole; of one that is there in part, its whole rows."""
    for shard in holding.map.shards:
        there = ByteRanges(holding.missing.get(shard.id, ())).gaps(shard.bytes)
        for piece in shard.slices:
            if piece.parameter in tensors:
                for first, size in there:
                    start = max(first, piece.offset) - piece.offset
                    end = min(first + size, piece.offset + piece.bytes) - piece.offset
                    if start < end:
                        yield from ((piece.parameter, box) for box in _rows(piece, start, end))


def _rows(piece: ShardSlice, start: int, end: int) -> Iterator[Box]:
    """Yield the part of a slice between two of its bytes, in whole rows along its first axis longer than one."""
    box = piece.box
    axis = next((axis for axis, (first, last) in enumerate(box) if last - first > 1), None)
    if axis is None:
        if (start, end) == (0, piece.bytes):
            yield box
        return
    row = piece.bytes // (box[axis][1] - box[axis][0])
    first, last = box[axis][0] + -(-start // row), box[axis][0] + end // row
    if first < last:
        yield (*box[:axis], (first, last), *box[axis + 1 :])


def _needing(peer: Peer, tensors: Mapping[str, TensorMeta]) -> Mapping[str, tuple[Box, ...]]:
    return _needed(peer.share, tuple((name, meta.shape) for name, meta in tensors.items()))


@lru_cache(maxsize=64)  # peers with the same share are one to `reshard_boxes`
def _needed(share: EngineShare, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Mapping[str, tuple[Box, ...]]:
    return needed_boxes(
        dict(shapes),
        tp=share.tp,
        tp_ranks=share.tp_ranks,
        pp=share.pp,
        pp_ranks=share.pp_ranks,
        ep=share.ep,
        ep_ranks=share.ep_ranks,
    )


def _opened(
    whole: VersionMap, parts: tuple[StagedPart, ...], end: int, sharded: Sequence[ReshardedVersion]
) -> OpenVersion:
    own = [each for each in sharded if end in each.shard.holders or end in each.shard.receivers]
    maps = {shard.id: shard for shard in whole.shards}
    return OpenVersion(
        _part_of(whole, tuple(maps[each.shard.id] for each in own), parts),
        parts,
        at_home=tuple(each.shard.id for each in own if end in each.at_home),
    )


def _part_of(whole: VersionMap, shards: tuple[ShardMap, ...], parts: Iterable[StagedPart]) -> VersionMap:
    """Return the map of these shards, with their tensors and those of the parts."""
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
    """Plan the flows of segments; each flow is an edge with an id, a transport and a rate."""
    plan = plan_flows(segments, network, settings)
    ways = _transports({(flow.src, flow.dst) for flow in plan.flows}, known, settings)
    is_held_back = settings.rate_share < 1 or bool(network.boundary_circuits or network.tor_circuits)
    is_held_back |= network.pairs is not None
    edges = tuple(
        CarryEdge(
            id=f"{name}.{number}",
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
        for number, flow in enumerate(plan.flows)
    )
    return PlannedSync(
        version=whole.version,
        map=whole,
        bytes=sum(tensor.bytes for tensor in whole.tensors),
        opens=opens,
        summed_by=summed_by(segments),
        edges=edges,
        planned_s={edge.id: flow.seconds for edge, flow in zip(edges, plan.flows, strict=True)},
        estimate_s=plan.estimate_s,
        lower_bound_s=plan.lower_bound_s,
        naive_s=plan.naive_s,
        waves=plan.waves,
    )


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


def _staged_alone(
    segments: Iterable[ShardSegment],
    whole: VersionMap,
    parts: Mapping[PeerId, Sequence[StagedPart]],
    have: Mapping[PeerId, PeerHolding],
    tensors: Mapping[str, TensorMeta],
) -> Iterator[ShardSegment]:
    """Without those holders that have received some of it."""
    shards = {shard.id: shard for shard in whole.shards}
    for each in segments:
        staged = [peer for peer in each.holders if parts[peer]]
        staged = [peer for peer in staged if peer not in have or _is_staged(shards[each.shard], parts[peer], tensors)]
        yield replace(each, holders=tuple(staged))


def _is_staged(shard: ShardMap, parts: Sequence[StagedPart], tensors: Mapping[str, TensorMeta]) -> bool:
    """Return whether parts have all of a shard."""
    needed: dict[str, list[Box]] = defaultdict(list)
    for piece in shard.slices:
        needed[piece.parameter].append(piece.box)
    shapes = {name: (tensors[name].shape, DTYPE_BYTES[tensors[name].dtype]) for name in needed}
    try:
        reshard_boxes(shapes, {0: _having(parts, None, tensors)}, {1: needed})
    except ValueError:
        return False
    return True
