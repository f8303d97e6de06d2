"""From an intent to bytes between ToRs, and from those to bytes between endpoints of each PoD and of the core. Pure.

Rank -> GPU -> its NIC (or the one that stands in for it) -> ToR. What stays in a server goes over NVLink, what stays
below one ToR over its packet switch. Between PoDs: ToR -> uplinks of its PoD, PoD -> PoD, uplinks -> ToR; the uplinks
of a PoD share by their healthy lanes. AggregateDemand of Algorithm 2 in the paper.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from planner.fabric.broadcast import broadcasts_of
from planner.fabric.collectives import TRANSFERS_AT_ONCE, Floats, Ints, RankTransfers, transfers_of
from planner.fabric.intent import Intent, Primitive, TrafficOperation
from planner.fabric.masks import failed_ports, healthy_lanes, mask_nics
from planner.fabric.model import EndpointId
from planner.fabric.placement import NONE, Nics, RankPlacement
from planner.fabric.plan import FabricDemand, FabricFailures
from planner.fabric.topology import RESPONSES, Site

GENERAL = ""  # the purpose of lanes that are not reserved
NAMED_AT_MOST = 5  # ranks in a note


@dataclass(frozen=True, slots=True)
class IntentFlows:
    """What an intent sends. ToRs of a pair may be of different PoDs."""

    tors: Mapping[str, Mapping[tuple[EndpointId, EndpointId], float]]  # by purpose, bytes from ToR to another ToR
    pods: frozenset[EndpointId]  # in which there are ranks
    nvlink_bytes: float
    below_tor_bytes: float
    dropped_bytes: float  # no GPU or no NIC to send from or to
    busiest_nic_bytes: float  # the more loaded direction of the most loaded NIC
    notes: tuple[str, ...]

    @property
    def local_bytes(self) -> float:
        return self.nvlink_bytes + self.below_tor_bytes


def flows_of(intent: Intent, site: Site, failures: FabricFailures) -> IntentFlows:
    """Traffic for a reserved purpose is kept apart if the site reserves anything for it."""
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
    out_bytes = np.sum([tally.nic_out_bytes for tally in tallies.values()], axis=0)
    in_bytes = np.sum([tally.nic_in_bytes for tally in tallies.values()], axis=0)
    dropped_bytes = sum(tally.dropped_bytes for tally in tallies.values())
    return IntentFlows(
        tors={purpose: tally.between_tors() for purpose, tally in tallies.items()},
        pods=placement.pods(),
        nvlink_bytes=sum(tally.nvlink_bytes for tally in tallies.values()),
        below_tor_bytes=sum(tally.below_tor_bytes for tally in tallies.values()),
        dropped_bytes=dropped_bytes,
        busiest_nic_bytes=float(max(out_bytes.max(initial=0.0), in_bytes.max(initial=0.0))),
        notes=(*mask.notes, *_homeless(placement, dropped_bytes)),
    )


def demand_of(intent: Intent, site: Site, failures: FabricFailures) -> FabricDemand:
    """Bytes between ToRs and uplinks in each PoD, and between PoDs."""
    flows = flows_of(intent, site, failures)
    agg: dict[EndpointId, dict[tuple[EndpointId, EndpointId], float]] = defaultdict(lambda: defaultdict(float))
    core: dict[tuple[EndpointId, EndpointId], float] = defaultdict(float)
    notes = list(flows.notes)
    for purpose in sorted(flows.tors):
        shares = uplink_shares(site, failures, purpose)
        cut_off: set[EndpointId] = set()
        for (source, destination), sent_bytes in flows.tors[purpose].items():
            there, here = site.pod_of[destination], site.pod_of[source]
            if here == there:
                agg[here][source, destination] += sent_bytes
                continue
            core[here, there] += sent_bytes
            for uplink, share in shares.get(here, {}).items():
                agg[here][source, uplink] += share * sent_bytes
            for uplink, share in shares.get(there, {}).items():
                agg[there][uplink, destination] += share * sent_bytes
            cut_off |= {here, there} - shares.keys()
        lanes = f"lane kept for {purpose}" if purpose else "lane"
        notes += [f"{pod}: no {lanes} to the core is left" for pod in sorted(cut_off)]
    return FabricDemand(
        agg={pod: dict(sorted(agg[pod].items())) for pod in sorted(agg)},
        core=dict(sorted(core.items())),
        local_bytes=flows.local_bytes,
        notes=tuple(notes),
    )


def uplink_shares(
    site: Site, failures: FabricFailures, purpose: str
) -> Mapping[EndpointId, Mapping[EndpointId, float]]:
    """Of each PoD, by how many of its lanes for this purpose are healthy. A PoD without any is not there."""
    lanes: dict[EndpointId, dict[EndpointId, int]] = defaultdict(lambda: defaultdict(int))
    for lane in healthy_lanes(site, failed_ports(site, failures)):
        if site.reserved.get((lane.core, lane.core_port), GENERAL) == purpose:
            lanes[site.pod_of[lane.uplink]][lane.uplink] += 1
    return {
        pod: {uplink: count / sum(counts.values()) for uplink, count in sorted(counts.items())}
        for pod, counts in sorted(lanes.items())
    }


class _Tally:
    """Bytes as they are counted, transfer by transfer."""

    def __init__(self, placement: RankPlacement) -> None:
        self._placement = placement
        self._tors = len(placement.site.tors)
        self._between: Floats = np.zeros(self._tors * self._tors)
        self.nic_out_bytes: Floats = np.zeros(len(placement.nics.tor))
        self.nic_in_bytes: Floats = np.zeros(len(placement.nics.tor))
        self.nvlink_bytes = 0.0
        self.below_tor_bytes = 0.0
        self.dropped_bytes = 0.0
        self._waiting: list[RankTransfers] = []
        self._waiting_count = 0

    def add(self, transfers: RankTransfers) -> None:
        """Many small ones are counted together: see `flush`."""
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
        placement, nics = self._placement, self._placement.nics
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
        source, destination = _on_one_rail(nics, source, destination, servers, placement.server[destinations[out]])
        self.nic_out_bytes += np.bincount(source, sent_bytes, minlength=len(self.nic_out_bytes))
        self.nic_in_bytes += np.bincount(destination, sent_bytes, minlength=len(self.nic_in_bytes))
        one, other = nics.tor[source], nics.tor[destination]
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
    nics: Nics, source: Ints, destination: Ints, source_server: Ints, destination_server: Ints
) -> tuple[Ints, Ints]:
    """The NICs that messages leave and arrive by: handed over before they leave, or, where the source has no NIC on
    that rail, after they have arrived."""
    if not nics.on_rail.shape[1]:
        return source, destination
    one, other = nics.rail[source], nics.rail[destination]
    apart = (one != other) & (one != NONE) & (other != NONE)
    before = np.where(apart, nics.on_rail[source_server, other], NONE)
    after = np.where(apart & (before == NONE), nics.on_rail[destination_server, one], NONE)
    return np.where(before != NONE, before, source), np.where(after != NONE, after, destination)


def _homeless(placement: RankPlacement, dropped_bytes: float) -> Iterator[str]:
    ranks = placement.homeless()
    if ranks:
        named = ", ".join(map(str, ranks[:NAMED_AT_MOST])) + (", ..." if len(ranks) > NAMED_AT_MOST else "")
        are = "1 rank is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
        yield f"{are} on no server of the site that works ({named})"
    if dropped_bytes:
        yield f"{dropped_bytes:.4g} bytes have no place to go from or to"
