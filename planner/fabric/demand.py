"""Convert an intent into bytes between ToRs (AggregateDemand of Algorithm 2 in the paper). Has no side effects.

A rank maps to its GPU, the GPU's NIC (or the NIC's stand-in) and the NIC's ToR. Traffic inside a server uses NVLink.
Traffic between servers of one ToR uses the ToR's packet switch. If ToRs are rail-aligned, a message for another rail
first crosses NVLink to the GPU of that rail (PXN in NCCL), so that it stays on the ToRs of one rail.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.fabric.collectives import TRANSFERS_AT_ONCE, Floats, Ints, RankTransfers, transfers_of
from planner.fabric.intent import Intent, Primitive, Traffic, TrafficOperation
from planner.fabric.model import EndpointId
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import RESPONSES, Server, ServerId, Site

GENERAL = ""  # the purpose of lanes that are not reserved
NAMED_AT_MOST = 5  # ranks listed in a note
NONE = -1


@dataclass(frozen=True, slots=True)
class NicMask:
    """The NICs in use. `stand_in` maps each NIC of a server to the NIC that carries its traffic. A healthy NIC carries
    its own traffic. A server without a healthy NIC is absent from `stand_in`."""

    stand_in: Mapping[ServerId, tuple[int, ...]]
    failed_servers: frozenset[ServerId]
    notes: tuple[str, ...]


def mask_nics(site: Site, failures: FabricFailures) -> NicMask:
    """Choose a stand-in for each failed NIC. The failed NIC's traffic crosses NVLink to the stand-in. A NIC on the same
    ToR is preferred, then the next healthy NIC of the server.

    Two failed NICs share a stand-in only if no other healthy NIC is left.
    """
    stand_in: dict[ServerId, tuple[int, ...]] = {}
    notes: list[str] = []
    for server in site.servers:
        if server.id in failures.servers:
            continue
        failed = [nic for nic in range(len(server.tors)) if (server.id, nic) in failures.nics]
        found = _stand_ins(server, failed)
        if found is None:
            notes.append(f"{server.id}: all {len(failed)} NICs have failed, so the server is unreachable")
            continue
        stand_in[server.id] = found
        notes += [f"{server.id}: traffic of NIC {nic} uses NIC {found[nic]}" for nic in failed]
    return NicMask(stand_in, failures.servers, tuple(notes))


def _stand_ins(server: Server, failed: list[int]) -> tuple[int, ...] | None:
    count = len(server.tors)
    if failed and len(failed) == count:
        return None
    found = list(range(count))
    extra = {nic: 0 for nic in range(count) if nic not in failed}
    for nic in failed:
        ranked = [
            (more, server.tors[other] != server.tors[nic], (other - nic) % count) for other, more in extra.items()
        ]
        found[nic] = (nic + min(ranked)[2]) % count
        extra[found[nic]] += 1
    return tuple(found)


@dataclass(frozen=True)
class RankPlacement:
    """The server and NIC of each rank. `server` and `nic` are NONE for a rank without a working server or NIC. `nic` is
    the stand-in if the rank's own NIC has failed. NICs are numbered over the site, server by server."""

    site: Site
    ranks: Ints  # sorted
    server: Ints  # [index in `ranks`]
    nic: Ints  # [index in `ranks`]
    nic_tor: Ints  # [nic], number of its ToR
    nic_rail: Ints  # [nic], rail of its ToR or NONE
    on_rail: Ints  # [server, rail], a working NIC of the server on that rail, or NONE

    @classmethod
    def of(cls, site: Site, intent: Intent, mask: NicMask) -> "RankPlacement":
        tors = {tor.id: number for number, tor in enumerate(site.tors)}
        nic_tor = np.array([tors[each] for server in site.servers for each in server.tors], dtype=np.int64)
        rails = np.array([NONE if each.rail is None else each.rail for each in site.tors], dtype=np.int64)
        nic_rail = rails[nic_tor]
        on_rail = np.full((len(site.servers), int(rails.max(initial=NONE)) + 1), NONE, dtype=np.int64)
        firsts: dict[ServerId, tuple[int, int]] = {}  # number and first NIC of each server
        first = 0
        for number, each in enumerate(site.servers):
            firsts[each.id] = number, first
            for one in reversed(mask.stand_in.get(each.id, ())):  # the first NIC of a rail wins
                if nic_rail[first + one] != NONE:
                    on_rail[number, nic_rail[first + one]] = first + one
            first += len(each.tors)
        ranks = np.array(sorted(intent.ranks), dtype=np.int64)
        server = np.full(len(ranks), NONE, dtype=np.int64)
        nic = np.full(len(ranks), NONE, dtype=np.int64)
        for place, rank in enumerate(ranks.tolist()):
            gpu = intent.gpu(rank)
            there = site.server_of.get(gpu)
            if there is None or there.id in mask.failed_servers:
                continue
            server[place], first = firsts[there.id]
            if there.id in mask.stand_in and there.tors:
                nic[place] = first + mask.stand_in[there.id][there.nic(gpu)]
        return cls(site, ranks, server, nic, nic_tor, nic_rail, on_rail)

    def places(self, ranks: Ints) -> Ints:
        return np.searchsorted(self.ranks, ranks)

    @cached_property
    def tor(self) -> Ints:
        """The ToR number of each rank, in the order of `ranks`; NONE if the rank has no NIC."""
        return np.where(self.nic == NONE, NONE, self.nic_tor[self.nic])

    @cached_property
    def rail(self) -> Ints:
        return np.where(self.nic == NONE, NONE, self.nic_rail[self.nic])

    @cached_property
    def pod(self) -> Ints:
        """The PoD number of each rank, in the order of `ranks`; NONE if the rank has no NIC."""
        return np.where(self.tor == NONE, NONE, self.tor_pod[self.tor])

    @cached_property
    def tor_pod(self) -> Ints:
        """The PoD number of each ToR, as an array indexed by ToR."""
        numbers = {pod.id: number for number, pod in enumerate(self.site.pods)}
        return np.array([numbers[tor.pod] for tor in self.site.tors], dtype=np.int64)

    def homeless(self) -> list[int]:
        """Return the ranks that are not on any working server."""
        return [int(rank) for rank in self.ranks[self.server == NONE]]

    def pods(self) -> frozenset[EndpointId]:
        """Return the PoDs that contain at least one rank with a working NIC."""
        return frozenset(self.site.pods[number].id for number in np.unique(self.pod).tolist() if number != NONE)


@dataclass(frozen=True, slots=True)
class IntentFlows:
    """The traffic of an intent, by the level of the network that carries it. `tors` includes pairs of ToRs in different
    PoDs."""

    tors: Mapping[str, Mapping[tuple[EndpointId, EndpointId], float]]  # by purpose, bytes from a ToR to another
    pods: frozenset[EndpointId]  # PoDs that have ranks
    nvlink_bytes: float
    below_tor_bytes: float
    dropped_bytes: float  # no GPU or NIC at one end
    notes: tuple[str, ...]


def flows_of(intent: Intent, site: Site, failures: FabricFailures) -> IntentFlows:
    """Return the traffic of an intent. If the site reserves lanes for responses, response traffic is counted
    separately."""
    mask = mask_nics(site, failures)
    placement = RankPlacement.of(site, intent, mask)
    reserved = {each.purpose for each in site.reservations}
    tallies = {GENERAL: _Tally(placement)}
    for traffic in intent.traffic:
        streams = traffic.operation is TrafficOperation.RESPONSES and RESPONSES in reserved
        tally = tallies.setdefault(RESPONSES if streams else GENERAL, _Tally(placement))
        if traffic.primitive is Primitive.BROADCAST:
            tally.add(broadcasts_of(traffic, placement))
        else:
            for transfers in transfers_of(traffic):
                tally.add(transfers)
    for tally in tallies.values():
        tally.flush()
    dropped_bytes = sum(tally.dropped_bytes for tally in tallies.values())
    return IntentFlows(
        tors={purpose: tally.between_tors() for purpose, tally in tallies.items()},
        pods=placement.pods(),
        nvlink_bytes=sum(tally.nvlink_bytes for tally in tallies.values()),
        below_tor_bytes=sum(tally.below_tor_bytes for tally in tallies.values()),
        dropped_bytes=dropped_bytes,
        notes=(*mask.notes, *_homeless(placement, dropped_bytes)),
    )


class _Tally:
    """A counter of the bytes that each level of the network carries."""

    def __init__(self, placement: RankPlacement) -> None:
        self._placement = placement
        self._tors = len(placement.site.tors)
        self._between: Floats = np.zeros(self._tors * self._tors)
        self.nvlink_bytes = 0.0
        self.below_tor_bytes = 0.0
        self.dropped_bytes = 0.0
        self._waiting: list[RankTransfers] = []
        self._waiting_count = 0

    def add(self, transfers: RankTransfers) -> None:
        """Add transfers to the counts; small batches are queued and counted together in `flush`."""
        self._waiting.append(transfers)
        self._waiting_count += len(transfers.sources)
        if self._waiting_count >= TRANSFERS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._waiting_count = self._waiting, [], 0
            self._count(
                RankTransfers(
                    np.concatenate([each.sources for each in waiting]),
                    np.concatenate([each.destinations for each in waiting]),
                    np.concatenate([each.sent_bytes for each in waiting]),
                )
            )

    def _count(self, transfers: RankTransfers) -> None:
        placement = self._placement
        sources, destinations = placement.places(transfers.sources), placement.places(transfers.destinations)
        servers = placement.server[sources]
        homeless = (servers == NONE) | (placement.server[destinations] == NONE)
        inside = ~homeless & (servers == placement.server[destinations])
        lost = ~inside & (homeless | (placement.nic[sources] == NONE) | (placement.nic[destinations] == NONE))
        self.nvlink_bytes += float(transfers.sent_bytes[inside].sum())
        self.dropped_bytes += float(transfers.sent_bytes[lost].sum())
        out = ~(inside | lost)
        sent_bytes, servers = transfers.sent_bytes[out], servers[out]
        source, destination = placement.nic[sources[out]], placement.nic[destinations[out]]
        source, destination = _on_one_rail(placement, source, destination, servers, placement.server[destinations[out]])
        one, other = placement.nic_tor[source], placement.nic_tor[destination]
        below = one == other
        self.below_tor_bytes += float(sent_bytes[below].sum())
        codes = one[~below] * self._tors + other[~below]
        self._between += np.bincount(codes, sent_bytes[~below], minlength=len(self._between))

    def between_tors(self) -> dict[tuple[EndpointId, EndpointId], float]:
        tors = self._placement.site.tors
        found = np.flatnonzero(self._between)
        pairs = ((tors[code // self._tors].id, tors[code % self._tors].id) for code in found.tolist())
        return dict(sorted(zip(pairs, self._between[found].tolist(), strict=True)))


def _on_one_rail(
    placement: RankPlacement, source: Ints, destination: Ints, source_server: Ints, destination_server: Ints
) -> tuple[Ints, Ints]:
    """Return the NIC that sends each message and the NIC that receives it. A message between two rails changes rail
    before it is sent. If the source has no NIC on the destination's rail, the message changes rail after it has
    arrived."""
    on_rail = placement.on_rail
    if not on_rail.shape[1]:
        return source, destination
    one, other = placement.nic_rail[source], placement.nic_rail[destination]
    apart = (one != other) & (one != NONE) & (other != NONE)
    before = np.where(apart, on_rail[source_server, other], NONE)
    after = np.where(apart & (before == NONE), on_rail[destination_server, one], NONE)
    return np.where(before != NONE, before, source), np.where(after != NONE, after, destination)


def _homeless(placement: RankPlacement, dropped_bytes: float) -> Iterator[str]:
    ranks = placement.homeless()
    if ranks:
        named = ", ".join(map(str, ranks[:NAMED_AT_MOST])) + (", ..." if len(ranks) > NAMED_AT_MOST else "")
        are = "1 rank is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
        yield f"{are} on no working server of the site ({named})"
    if dropped_bytes:
        yield f"{dropped_bytes:.4g} bytes have no GPU or NIC at one end"


def broadcasts_of(traffic: Traffic, placement: RankPlacement) -> RankTransfers:
    """Return the transfers of a BROADCAST: the whole message from the first rank of each group to its receivers, or to
    all other ranks of the group if it has no receivers.

    The message follows a tree of two levels (section 5.2 and appendix E of the paper). Phase A sends from the root to a
    seed in every other PoD. Phase B sends from the seed to the other ranks of its PoD: from ToR to ToR, then to the
    servers below each ToR, then inside each server. A message enters each PoD, ToR and server once. Seeds vary from
    group to group, so that the trees of many shards use different ToRs.
    """
    sources: list[Ints] = [np.zeros(0, dtype=np.int64)]
    destinations: list[Ints] = [np.zeros(0, dtype=np.int64)]
    for number, group in enumerate(traffic.groups):
        if not group:
            continue
        receivers = traffic.receivers[number] if traffic.receivers else group[1:]
        rest = np.array([rank for rank in dict.fromkeys(receivers) if rank != group[0]], dtype=np.int64)
        if len(rest):
            for parents, children in _edges(placement, number, group[0], rest):
                sources.append(parents)
                destinations.append(children)
    source, destination = np.concatenate(sources), np.concatenate(destinations)
    return RankTransfers(source, destination, np.full(len(source), traffic.bytes_per_rank * traffic.times))


def _edges(placement: RankPlacement, number: int, root: int, receivers: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the edges of the broadcast tree from `root` to `receivers`, for the group with index `number`. Each item is
    an array of sending ranks and an equally long array of receiving ranks."""
    root_place = int(placement.places(np.array([root]))[0])
    places = placement.places(receivers)
    beside = (placement.server[places] == placement.server[root_place]) & (placement.server[places] != NONE)
    lost = ~beside & ((placement.nic[places] == NONE) | (placement.nic[root_place] == NONE))
    yield np.full(int(lost.sum()), root), receivers[lost]  # these are counted as dropped later
    receivers, places = receivers[~lost], places[~lost]
    if not len(receivers):
        return
    # One head per server, on the rail of the root if possible; the root is the head of its own server.
    order = np.lexsort((receivers, placement.rail[places] != placement.rail[root_place], placement.server[places]))
    receivers, places = receivers[order], places[order]
    servers, first, member = np.unique(placement.server[places], return_index=True, return_inverse=True)
    heads, head_places = receivers[first], places[first]
    own = servers == placement.server[root_place]
    heads, head_places = np.where(own, root, heads), np.where(own, root_place, head_places)
    below = receivers != heads[member]
    yield heads[member][below], receivers[below]
    heads, head_places = heads[~own], head_places[~own]
    if not len(heads):
        return
    root_pod = placement.pod[root_place]
    for pod in np.unique(placement.pod[head_places]).tolist():
        inside = placement.pod[head_places] == pod
        some, some_places = heads[inside], head_places[inside]
        if pod == root_pod:
            seed, seed_place = root, root_place
        else:
            chosen = number % len(some)
            seed, seed_place = int(some[chosen]), int(some_places[chosen])
            yield np.array([root]), np.array([seed])
        yield from _fan_out(seed, int(placement.tor[seed_place]), some, placement.tor[some_places])


def _fan_out(seed: int, seed_tor: int, heads: Ints, tors: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the edges that lead from the seed to `heads`, which are one rank per server. `tors` has the ToR of each
    head. First, a binary tree that begins at the seed reaches the first head below each ToR. Then each of these heads
    sends to the other heads below its ToR."""
    others, first = np.unique(tors, return_index=True)
    away = others != seed_tor
    relays = np.concatenate([[seed], heads[first[away]]]).astype(np.int64)  # one per ToR, the seed first
    if len(relays) > 1:
        children = np.arange(1, len(relays))
        yield relays[(children - 1) // 2], relays[children]
    number = {tor: place for place, tor in enumerate([seed_tor, *others[away].tolist()])}
    relay = relays[[number[tor] for tor in tors.tolist()]]
    below = relay != heads
    yield relay[below], heads[below]
