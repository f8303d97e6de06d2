"""What a weight sync leaves of engine hosts' NICs to moves of KV, which the balancer prices with it. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from planner.model import PeerId
from planner.sync_tree.network import NetworkStation


@dataclass(frozen=True, slots=True)
class LeftForMoves:
    """Of an engine host's NIC, where least is left: what a move of KV gets; and who has the rest."""

    share: float = 1.0
    taken_by: tuple[str, ...] = ()


def left_for_moves(
    running: Iterable[tuple[PeerId, PeerId, float]],
    stations: Mapping[PeerId, NetworkStation],
    among: Collection[PeerId],
) -> LeftForMoves:
    """Return what edges (source, destination, Gb/s) leave at the peers whose hosts KV moves between (`among`).

    An edge of 0 Gb/s is not held back and wants all that both of its ends have. A NIC shares out evenly among those
    that would fill it, in each direction by itself.
    """
    wished: defaultdict[tuple[PeerId, str], float] = defaultdict(float)
    for src, dst, rate_gbps in running:
        ends = [stations[end].nic_gbps for end in (src, dst) if end in stations]
        wish_gbps = min([rate_gbps or inf, *ends])
        wished[src, "out"] += wish_gbps
        wished[dst, "in"] += wish_gbps
    most = max(
        (gbps / stations[peer].nic_gbps for (peer, _), gbps in wished.items() if peer in among and peer in stations),
        default=0.0,
    )
    return LeftForMoves(1 / (1 + most), ("weight sync",)) if most > 0 else LeftForMoves()
