"""Assign engines to peers as engines join and leave, and send each peer its assignment.

A peer lists the hosts whose engines it can serve. An engine stays with the peer that has it. An engine without a peer
is assigned to the suitable peer with the first id in sorted order. An engine on a peer's command line always belongs to
that peer. No engine belongs to two peers.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from orchestrrl.core.addresses import server_address
from orchestrrl.core.clock import Clock, stop, until_set
from orchestrrl.weights.controller.peer_hub import Heard, PeerHub, PeerState
from orchestrrl.weights.controller.state import EngineNow
from orchestrrl.weights.model import host_name
from orchestrrl.weights.orders import ServeEngines
from planner.model import EngineId, PeerId

logger = logging.getLogger(__name__)

TURN_S = 0.5  # interval of updates of the assignment
ANSWER_S = 30.0
AGAIN_S = 2.0  # delay after a peer did not accept its assignment
# A daemon does not have all engines right after its start: peers keep their unknown engines for this time.
UNKNOWN_FOR_S = 60.0


@dataclass(frozen=True, slots=True)
class AssignedEngines:
    """An assignment of engines to peers. `wanted` maps each peer that accepts assignments to the URLs of its engines,
    keyed by engine id."""

    wanted: Mapping[PeerId, Mapping[EngineId, str]]
    unserved: Mapping[EngineId, str] = field(default_factory=dict)  # engines that no peer serves, with the remedy


def served(
    engines: Mapping[EngineId, EngineNow],
    peers: Mapping[PeerId, PeerState],
    now_s: float,
    patience_s: float,
    *,
    gone: Collection[EngineId] | None = None,
) -> AssignedEngines:
    """Return the assignment of engines to peers. A peer that detached less than `patience_s` ago keeps its engines. A
    peer's engine that is missing in `engines` is no longer assigned to the peer. If `gone` is given, this applies only
    to engines in `gone`, and peers keep their other missing engines. Has no side effects."""
    there = {
        id: state for id, state in sorted(peers.items()) if state.attached or now_s - state.last_report_s < patience_s
    }
    wanted: dict[PeerId, dict[EngineId, str]] = {id: {} for id, state in there.items() if state.peer.serves}
    unserved: dict[EngineId, str] = {}
    by_host: dict[str, list[PeerId]] = {}
    for id in wanted:
        for host in there[id].peer.serves:
            by_host.setdefault(host_name(host), []).append(id)
    started_with = {each.engine: id for id, state in there.items() for each in state.peer.engines if not each.given}
    given = [(id, each) for id, state in there.items() for each in state.peer.engines if each.given]
    told_of: dict[EngineId, list[PeerId]] = {}
    for id, each in given:
        told_of.setdefault(each.engine, []).append(id)
    for engine, now in sorted(engines.items()):
        if engine in started_with:
            if not there[started_with[engine]].attached:
                unserved[engine] = f"its peer {started_with[engine]} is not attached"
            continue
        address = server_address(now.url)
        could = by_host.get(host_name(address.host), []) if address is not None else []
        if not could:
            unserved[engine] = _what_to_do(engine, now.url)
            continue
        has = told_of.get(engine, [])
        holder = next((id for id in has if id in could), could[0])
        if not there[holder].attached:
            unserved[engine] = f"its peer {holder} is not attached"
        if all(id == holder for id in has):  # another peer must drop the engine first
            wanted[holder][engine] = now.url
    if gone is not None:
        for id, each in given:
            if id in wanted and each.engine not in engines and each.engine not in gone:
                wanted[id][each.engine] = each.url
    return AssignedEngines(wanted, unserved)


def _what_to_do(engine: EngineId, url: str) -> str:
    if not url:
        return (
            "its URL is unknown, so it cannot be assigned to a peer: start an agent on its host, or"
            f" `orchestrrl sync peer --engine {engine}=URL`"
        )
    host = urlsplit(url).hostname
    return (
        f"no attached peer serves {host}: start `orchestrrl sync peer --engines-here` on that host, or a peer with"
        f" --engine {engine}={url}"
    )


class PeerAssignments:
    """The component that sends the peers of one daemon their assignments. The caller runs `run` in a task."""

    def __init__(
        self, hub: PeerHub, clock: Clock, patience_s: float, engines: Callable[[], Mapping[EngineId, EngineNow]]
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._patience_s = patience_s
        self._known_engines = engines
        self.seen: set[EngineId] = set()  # every engine that this daemon has known
        self._began_s = clock.now_s()
        self._now = AssignedEngines({})
        self._sent: dict[PeerId, Mapping[EngineId, str]] = {}  # accepted by each peer since it attached
        self._again_s: dict[PeerId, float] = {}
        self._sending: dict[PeerId, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        hub.listen(self._on_news)

    async def run(self) -> None:
        try:
            while True:
                self._news.clear()
                self.update()
                await until_set(self._clock, self._news, TURN_S)
        finally:
            await stop(*self._sending.values())

    def update(self) -> None:
        """Update the assignment, and send it to each attached peer that has not accepted it yet."""
        now_s = self._clock.now_s()
        self._now = self._served(now_s)
        peers = self._hub.peers
        for id, engines in self._now.wanted.items():
            due = now_s >= self._again_s.get(id, 0.0) and id not in self._sending
            if peers[id].attached and due and self._sent.get(id) != engines:
                self._sending[id] = asyncio.ensure_future(self._send(id, engines))

    def why_not(self, engine: EngineId) -> str:
        """Return the reason why no peer installs versions into an engine, and the remedy if one is known."""
        return self._now.unserved.get(engine, "no peer that installs into it is attached")

    def engines(self) -> Mapping[EngineId, EngineNow]:
        engines = self._known_engines()
        self.seen.update(engines)
        return engines

    def is_settled(self) -> bool:
        """Return whether every attached peer has accepted its current assignment."""
        peers, self._now = self._hub.peers, self._served(self._clock.now_s())
        for id, engines in self._now.wanted.items():
            has = {each.engine: each.url for each in peers[id].peer.engines if each.given}
            if peers[id].attached and not engines.items() <= has.items():
                return False
        return True

    # --- inside

    def _served(self, now_s: float) -> AssignedEngines:
        gone = self.seen if now_s - self._began_s < UNKNOWN_FOR_S else None
        return served(self.engines(), self._hub.peers, now_s, self._patience_s, gone=gone)

    async def _send(self, peer: PeerId, engines: Mapping[EngineId, str]) -> None:
        try:
            why = await self._hub.try_order(peer, ServeEngines(engines), ANSWER_S)
        finally:
            self._sending.pop(peer, None)
        if why:
            self._again_s[peer] = self._clock.now_s() + AGAIN_S
            logger.warning("peer %s did not accept its engines: %s", peer, why)
            return
        self._sent[peer] = engines
        logger.info("peer %s serves %s", peer, ", ".join(sorted(engines)) or "no engine")
        self._news.set()

    def _on_news(self, peer: PeerId, news: Heard) -> None:
        if news is None:  # a peer that attaches again receives its assignment again
            self._sent.pop(peer, None)
        self._news.set()
