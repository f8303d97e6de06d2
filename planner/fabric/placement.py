"""Where each rank of an intent sends from: its server, the NIC that serves it, that NIC's ToR and PoD. Pure.

NVLink joins the GPUs of a server. Where ToRs are rail-aligned, a message for another rail is handed over NVLink to the
GPU of that rail first (NCCL calls it PXN), so that it stays on one rail's ToRs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.fabric.collectives import Ints
from planner.fabric.intent import Intent
from planner.fabric.model import EndpointId
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import Server, ServerId, Site

NONE = -1


@dataclass(frozen=True, slots=True)
class NicMask:
    """`stand_in`: which NIC of the server carries the traffic of each of its NICs, itself where it is healthy; a server
    that has none left is not there."""

    stand_in: Mapping[ServerId, tuple[int, ...]]
    failed_servers: frozenset[ServerId]
    notes: tuple[str, ...]


def mask_nics(site: Site, failures: FabricFailures) -> NicMask:
    """Traffic of a failed NIC goes over NVLink to a healthy one: one on the same ToR if there is, else the next one.

    Several failed ones do not share a stand-in as long as there is another.
    """
    stand_in: dict[ServerId, tuple[int, ...]] = {}
    notes: list[str] = []
    for server in site.servers:
        if server.id in failures.servers:
            continue
        failed = [nic for nic in range(len(server.tors)) if (server.id, nic) in failures.nics]
        found = _stand_ins(server, failed)
        if found is None:
            notes.append(f"{server.id}: all {len(failed)} NICs have failed, it is cut off")
            continue
        stand_in[server.id] = found
        notes += [f"{server.id}: NIC {nic} is relayed over NIC {found[nic]}" for nic in failed]
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
    """`server` and `nic` of each rank are NONE where it has none; `nic` is the one that stands in for its own. NICs are
    numbered over the site, those of a server in a row."""

    site: Site
    ranks: Ints  # sorted
    server: Ints  # [rank's place in `ranks`]
    nic: Ints  # [rank's place in `ranks`]
    nic_tor: Ints  # [nic], number of its ToR
    nic_rail: Ints  # [nic], of its ToR; NONE where it has none
    on_rail: Ints  # [server, rail], a NIC of the server on that rail that carries traffic, NONE: there is none

    @classmethod
    def of(cls, site: Site, intent: Intent, mask: NicMask) -> "RankPlacement":
        tors = {tor.id: number for number, tor in enumerate(site.tors)}
        nic_tor = np.array([tors[each] for server in site.servers for each in server.tors], dtype=np.int64)
        rails = np.array([NONE if each.rail is None else each.rail for each in site.tors], dtype=np.int64)
        nic_rail = rails[nic_tor]
        on_rail = np.full((len(site.servers), int(rails.max(initial=NONE)) + 1), NONE, dtype=np.int64)
        firsts: dict[ServerId, tuple[int, int]] = {}  # of each server its number and its first NIC
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
        """[rank's place], NONE without a NIC."""
        return np.where(self.nic == NONE, NONE, self.nic_tor[self.nic])

    @cached_property
    def rail(self) -> Ints:
        return np.where(self.nic == NONE, NONE, self.nic_rail[self.nic])

    @cached_property
    def pod(self) -> Ints:
        """[rank's place], number of its PoD."""
        return np.where(self.tor == NONE, NONE, self.tor_pod[self.tor])

    @cached_property
    def tor_pod(self) -> Ints:
        """[ToR], number of its PoD."""
        numbers = {pod.id: number for number, pod in enumerate(self.site.pods)}
        return np.array([numbers[tor.pod] for tor in self.site.tors], dtype=np.int64)

    def homeless(self) -> list[int]:
        """Ranks that are nowhere."""
        return [int(rank) for rank in self.ranks[self.server == NONE]]

    def pods(self) -> frozenset[EndpointId]:
        """In which there are ranks."""
        return frozenset(self.site.pods[number].id for number in np.unique(self.pod).tolist() if number != NONE)
