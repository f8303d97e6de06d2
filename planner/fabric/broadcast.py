"""The two-level tree of a broadcast: into each PoD once, from ToR to ToR there, then below each ToR and in each server.

Section 5.2 and appendix E of the paper: phase A from a holder to a seed in every other PoD, phase B from the seed to
the rest of its PoD. A message crosses into a PoD, to a ToR and to a server once each. Pure.
"""

from collections.abc import Iterator

import numpy as np

from planner.fabric.collectives import Ints, RankTransfers
from planner.fabric.intent import Traffic
from planner.fabric.placement import NONE, RankPlacement


def broadcasts_of(traffic: Traffic, placement: RankPlacement) -> RankTransfers:
    """Of BROADCAST: the whole message from the first rank of each group to its receivers, or to the rest of it.

    Seeds change from group to group, so that many shards make a forest over different ToRs.
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
    """Ranks and those that they hand the message on to."""
    root_place = int(placement.places(np.array([root]))[0])
    places = placement.places(receivers)
    beside = (placement.server[places] == placement.server[root_place]) & (placement.server[places] != NONE)
    lost = ~beside & ((placement.nic[places] == NONE) | (placement.nic[root_place] == NONE))
    yield np.full(int(lost.sum()), root), receivers[lost]  # whoever counts finds that it cannot be sent
    receivers, places = receivers[~lost], places[~lost]
    if not len(receivers):
        return
    # One head per server, on the rail of the root if there is one; the root is the head of its own.
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
    """From the seed along a binary tree of ToRs, and from the first below each ToR to its others."""
    others, first = np.unique(tors, return_index=True)
    away = others != seed_tor
    relays = np.concatenate([[seed], heads[first[away]]]).astype(np.int64)  # one per ToR, the seed's first
    if len(relays) > 1:
        children = np.arange(1, len(relays))
        yield relays[(children - 1) // 2], relays[children]
    number = {tor: place for place, tor in enumerate([seed_tor, *others[away].tolist()])}
    relay = relays[[number[tor] for tor in tors.tolist()]]
    below = relay != heads
    yield relay[below], heads[below]
