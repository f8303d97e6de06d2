"""What a weight sync leaves of engine hosts' NICs to moves of KV, which the balancer prices with it. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from orchestrrl.weights.controller.planning import NetworkStation
from orchestrrl.weights.model import PeerId
from orchestrrl.weights.orders import CarryEdge


@dataclass(frozen=True, slots=True)
class LeftForMoves:
    """Of an engine host's NIC, where least is left: what a move of KV gets; and who has the rest."""

    share: float = 1.0
    taken_by: tuple[str, ...] = ()


def left_for_moves(
    running: Iterable[CarryEdge], stations: Mapping[PeerId, NetworkStation], among: Collection[PeerId]
) -> LeftForMoves:
    """Beside these edges, at the peers whose hosts KV moves between (`among`). An edge that is not held back wants all
    that both of its ends have; a NIC shares out evenly among those who would fill it, in each direction by itself."""
    wished: defaultdict[tuple[PeerId, str], float] = defaultdict(float)
    for edge in running:
        ends = [stations[end].nic_gbps for end in (edge.src, edge.dst) if end in stations]
        wish_gbps = min([edge.rate_gbps or inf, *ends])
        wished[edge.src, "out"] += wish_gbps
        wished[edge.dst, "in"] += wish_gbps
    most = max(
        (gbps / stations[peer].nic_gbps for (peer, _), gbps in wished.items() if peer in among and peer in stations),
        default=0.0,
    )
    return LeftForMoves(1 / (1 + most), ("weight sync",)) if most > 0 else LeftForMoves()
