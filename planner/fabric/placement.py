"""Where each rank of an intent sends from: its server, the NIC that serves it, that NIC's ToR and PoD. Pure.

NVLink joins the GPUs of a server. Where ToRs are rail-aligned, a message for another rail is handed over NVLink to the
GPU of that rail first (NCCL calls it PXN), so that it stays on one rail's ToRs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.fabric.collectives import Ints
from planner.fabric.intent import Intent
from planner.fabric.masks import NicMask
from planner.fabric.model import EndpointId
from planner.fabric.topology import ServerId, Site

NONE = -1


@dataclass(frozen=True)
class Nics:
    """All NICs of a site by number, those of a server in a row."""

    owners: tuple[tuple[ServerId, int], ...]  # [nic]
    tor: Ints  # [nic], number of its ToR
    rail: Ints  # [nic], of its ToR; NONE where it has none
    on_rail: Ints  # [server, rail], a NIC of the server on that rail that carries traffic, NONE: there is none

    @classmethod
    def of(cls, site: Site, mask: NicMask) -> "Nics":
        tors = {tor.id: number for number, tor in enumerate(site.tors)}
        owners = tuple((server.id, nic) for server in site.servers for nic in range(len(server.tors)))
        tor = np.array([tors[each] for server in site.servers for each in server.tors], dtype=np.int64)
        rails = np.array([NONE if each.rail is None else each.rail for each in site.tors], dtype=np.int64)
        rail = rails[tor] if len(tor) else tor
        on_rail = np.full((len(site.servers), int(rails.max(initial=NONE)) + 1), NONE, dtype=np.int64)
        first = 0
        for number, server in enumerate(site.servers):
            for nic in reversed(mask.stand_in.get(server.id, ())):  # the first NIC of a rail wins
                if rail[first + nic] != NONE:
                    on_rail[number, rail[first + nic]] = first + nic
            first += len(server.tors)
        return cls(owners, tor, rail, on_rail)


@dataclass(frozen=True)
class RankPlacement:
    """`server` and `nic` of each rank are NONE where it has none; `nic` is the one that stands in for its own."""

    site: Site
    nics: Nics
    ranks: Ints  # sorted
    server: Ints  # [rank's place in `ranks`]
    nic: Ints  # [rank's place in `ranks`]

    @classmethod
    def of(cls, site: Site, intent: Intent, mask: NicMask) -> "RankPlacement":
        ranks = np.array(sorted(intent.ranks), dtype=np.int64)
        numbers: dict[ServerId, int] = {}
        firsts: dict[ServerId, int] = {}
        first = 0
        for number, each in enumerate(site.servers):
            numbers[each.id], firsts[each.id] = number, first
            first += len(each.tors)
        server = np.full(len(ranks), NONE, dtype=np.int64)
        nic = np.full(len(ranks), NONE, dtype=np.int64)
        for place, rank in enumerate(ranks.tolist()):
            gpu = intent.gpu(rank)
            there = site.server_of.get(gpu)
            if there is None or there.id in mask.failed_servers:
                continue
            server[place] = numbers[there.id]
            if there.id in mask.stand_in and there.tors:
                nic[place] = firsts[there.id] + mask.stand_in[there.id][there.nic(gpu)]
        return cls(site, Nics.of(site, mask), ranks, server, nic)

    def places(self, ranks: Ints) -> Ints:
        return np.searchsorted(self.ranks, ranks)

    @cached_property
    def tor(self) -> Ints:
        """[rank's place], NONE without a NIC."""
        return np.where(self.nic == NONE, NONE, self.nics.tor[self.nic])

    @cached_property
    def rail(self) -> Ints:
        return np.where(self.nic == NONE, NONE, self.nics.rail[self.nic])

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
