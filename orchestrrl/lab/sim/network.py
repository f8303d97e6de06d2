"""Model the NICs of simulated nodes. On each node, moved KV cache, new weights and the traffic of engines share the
NICs' bandwidth.

The model is fluid: every flow through a node's NICs gets its demand while the sum of demands fits, and is scaled down
in proportion otherwise. A transfer needs two simulator events, however long it takes.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrrl.core.clock import Clock
from planner.sync_tree.network import LeftForMoves

Node = int
Cargo = Literal["moves", "weight sync"]
# Smaller remainders are rounding errors.
LAST_GBIT = 1e-6


@dataclass(slots=True, eq=False)
class _Flow:
    nodes: tuple[Node, ...]  # the nodes whose NICs it uses; empty inside a node
    wish_gbps: float
    left_gbit: float
    done: asyncio.Future[None]
    cargo: Cargo
    gbps: float = 0.0


class NodeNetwork:
    """The NICs of the simulated nodes. If `share` is false, flows do not slow each other down. Two runs, one with
    `share` and one without, therefore show how much time is lost by sharing the NICs. `changed` is called when loads
    change."""

    def __init__(self, clock: Clock, nic_gbps: float, share: bool, changed: Callable[[], None]) -> None:
        self._clock = clock
        self._nic_gbps = nic_gbps
        self._share = share
        self._changed = changed
        self._flows: list[_Flow] = []
        self._engines_gbps: dict[Node, float] = {}
        self._settled_s = clock.now_s()
        self._next: asyncio.Task[None] | None = None

    async def transfer(self, nodes: tuple[Node, ...], wish_gbps: float, gbytes: float, cargo: Cargo = "moves") -> None:
        """Transfer `gbytes` gigabytes through the NICs of `nodes`, at `wish_gbps` or less, and return after they have
        arrived."""
        flow = _Flow(nodes, wish_gbps, gbytes * 8, asyncio.get_running_loop().create_future(), cargo)
        self._settle()
        self._flows.append(flow)
        self._replan()
        try:
            await flow.done
        finally:
            if flow in self._flows:
                self._settle()
                self._flows.remove(flow)
                self._replan()

    def engines_send(self, gbps: Mapping[Node, float]) -> None:
        """Set the traffic that decoding engines send over each node's NICs from now on."""
        if gbps == self._engines_gbps:
            return
        self._settle()
        self._engines_gbps = dict(gbps)
        self._replan()

    def crowding(self, node: Node) -> float:
        """Return the demand on a node's NICs divided by their capacity. All demands are met if the result is at most
        1."""
        if not self._share:
            return 0.0
        wishes = sum(flow.wish_gbps for flow in self._flows if node in flow.nodes)
        return (wishes + self._engines_gbps.get(node, 0.0)) / self._nic_gbps

    def left_for_moves(self) -> LeftForMoves:
        """Return the fraction of the NICs' bandwidth that remains for moves on the node with the most other traffic,
        and the names of the types of this other traffic."""
        nodes = {node for flow in self._flows for node in flow.nodes} | set(self._engines_gbps)
        takers = [
            {
                "weight sync": sum(f.wish_gbps for f in self._flows if node in f.nodes and f.cargo == "weight sync"),
                "engines' own traffic": self._engines_gbps.get(node, 0.0),
            }
            for node in (sorted(nodes) if self._share else ())
        ]
        most = max(takers, key=lambda gbps: sum(gbps.values()), default={})
        named = sorted((name for name in most if most[name]), key=lambda name: (-most[name], name))
        return LeftForMoves(1 / (1 + sum(most.values()) / self._nic_gbps), tuple(named))

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _settle(self) -> None:
        """Subtract the bytes that each flow has transferred since the last call from the flow's remaining bytes."""
        now_s = self._clock.now_s()
        for flow in self._flows:
            flow.left_gbit -= flow.gbps * (now_s - self._settled_s)
        self._settled_s = now_s

    def _replan(self) -> None:
        """Set new rates for all flows, and a timer for the end of the first flow that ends at these rates."""
        crowding = {node: self.crowding(node) for flow in self._flows for node in flow.nodes}
        for flow in self._flows:
            flow.gbps = flow.wish_gbps / max([1.0, *(crowding[node] for node in flow.nodes)])
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._flows:
            first_s = min(flow.left_gbit / flow.gbps for flow in self._flows)
            self._next = asyncio.create_task(self._end_first(max(0.0, first_s)))
        self._changed()

    async def _end_first(self, after_s: float) -> None:
        await self._clock.sleep(after_s)
        self._settle()
        self._next = None
        ended = [flow for flow in self._flows if flow.left_gbit <= LAST_GBIT]
        for flow in ended:
            self._flows.remove(flow)
            flow.done.set_result(None)
        self._replan()
