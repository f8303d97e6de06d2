"""Which rail a message takes where its own has no circuit that leads to its destination. Pure."""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.hosts import NO_NIC, Bools, Legs
from orchestrrl.lab.sim.net.fabrics.multipath import NO_WAY
from orchestrrl.lab.sim.net.model import Ints

LONGEST = 2  # circuits of a way on a message's own rail


@dataclass(frozen=True, eq=False)
class Rails:
    """NICs in the same place of their servers are of one rail."""

    rails: int
    tor_of: Ints  # [nic]
    works: Bools  # [nic]
    hops: Ints  # [tor, tor], circuits

    def lead(self, legs: Legs) -> Legs:
        """Legs that would take over two circuits go on the rails of their servers on which it is fewest; those that
        no rail leads, from any to any."""
        rails = np.arange(self.rails)
        legs = self._moved(legs, LONGEST, rails, rails)
        return self._moved(legs, NO_WAY - 1, np.repeat(rails, len(rails)), np.tile(rails, len(rails)))

    def _moved(self, legs: Legs, most: int, out: Ints, into: Ints) -> Legs:
        """Legs of over `most` circuits, spread over all [choice] with fewest; over NVLink at both ends."""
        tor_of, hops = self.tor_of, self.hops
        own = np.where(legs.src_nic == NO_NIC, 0, hops[tor_of[legs.src_nic], tor_of[legs.dst_nic]])
        far = np.flatnonzero(own > most)
        if not len(far):
            return legs
        start = (legs.src_nic[far] - legs.src_nic[far] % self.rails)[:, None] + out
        end = (legs.dst_nic[far] - legs.dst_nic[far] % self.rails)[:, None] + into
        apart = np.where(self.works[start] & self.works[end], hops[tor_of[start], tor_of[end]], NO_WAY)
        fewest = apart.min(axis=1)
        chosen = (apart == fewest[:, None]) & (fewest < own[far])[:, None]
        counts = np.ones(len(legs), np.int64)
        counts[far] = np.maximum(1, chosen.sum(axis=1))
        leg = np.repeat(np.arange(len(legs)), counts)
        moved = np.isin(leg, far[chosen.any(axis=1)])
        src_nic, dst_nic = legs.src_nic[leg], legs.dst_nic[leg]
        src_nic[moved], dst_nic[moved] = start[chosen], end[chosen]
        share = legs.share[leg] / counts[leg]
        return Legs(legs.flow[leg], share, legs.src[leg], legs.dst[leg], src_nic, dst_nic)
