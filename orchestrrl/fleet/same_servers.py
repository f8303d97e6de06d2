"""Find engines that have several names: group, by server, the ids that nodes use for engines. This module performs no
I/O.

The configuration, agents and gateways each choose their own ids for engines. The same id always refers to the same
engine. Two different ids refer to the same engine if either of these matches:

- the server's own identity, which agents and gateways read from it (engines/vllm_info.py);
- the address in their URLs, if both belong to one host or the address means the same on every host, and no identities
  contradict it.

A loopback address alone does not identify a server, since every host has the same loopback addresses. If it is
uncertain whether two ids refer to the same engine, they remain two engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrrl.core.addresses import ServerAddress, server_address
from orchestrrl.engines.base import EngineCapabilities
from planner.model import EngineId, NodeId

CONFIGURATION = NodeId("")  # the source of engines named by the configuration and by operators
# A restarted server has a new identity, which its nodes read at different times.
SETTLE_S = 120.0


@dataclass(slots=True)
class ServerClaim:
    """One id that a source uses for an engine, and what the source reports about the engine's server."""

    source: NodeId
    engine: EngineId
    rank: int  # the lowest rank's id is kept: 0 configuration, 1 agents, 2 gateways
    url: str
    host: str = ""  # the host of a loopback URL; empty: unknown
    server: str = ""  # the server's identity; empty: unknown
    server_before: str = ""
    server_since_s: float = 0.0
    known_as: EngineId | None = None  # the id that the source uses for the engine now
    last_report_s: float = 0.0
    capabilities: EngineCapabilities | None = None  # as last reported by an agent

    @property
    def id(self) -> EngineId:
        return self.known_as or self.engine

    def follow(self, url: str, host: str, server: str, known_as: EngineId | None, now_s: float) -> bool:
        """Update the claim with the source's latest report and return whether anything changed. If no identity could be
        read and the URL is unchanged, the previous identity is kept."""
        server = server or (self.server if url == self.url else "")
        if (url, host, server, known_as) == (self.url, self.host, self.server, self.known_as):
            return False
        if server != self.server:
            self.server_before, self.server_since_s = self.server, now_s
        self.url, self.host, self.server, self.known_as = url, host, server, known_as
        return True

    def identities(self, now_s: float) -> frozenset[str]:
        settling = now_s - self.server_since_s < SETTLE_S
        return frozenset(filter(None, (self.server, self.server_before if settling else "")))


@dataclass(frozen=True, slots=True)
class ServerNames:
    """The mapping from the ids that each source uses to engines."""

    engines: frozenset[EngineId] = frozenset()  # ids that are kept
    # Only ids that differ from the source's own.
    of: Mapping[NodeId, Mapping[EngineId, EngineId]] = field(default_factory=dict)

    def engine(self, source: NodeId, id: EngineId) -> EngineId:
        return self.of[source].get(id, id) if source in self.of else id

    @property
    def others(self) -> dict[EngineId, list[tuple[NodeId, EngineId]]]:
        """Return the aliases of each engine as (source, id) pairs. Engines without aliases are left out."""
        found: dict[EngineId, list[tuple[NodeId, EngineId]]] = {}
        for source, ids in self.of.items():
            for id, engine in ids.items():
                found.setdefault(engine, []).append((source, id))
        return found

    def is_other(self, id: EngineId) -> bool:
        """Return whether the id is only an alias, and not the canonical id of an engine."""
        return id not in self.engines and any(id in ids for ids in self.of.values())

    def by_other_name(self, id: EngineId) -> EngineId | None:
        """Return the engine with this alias, or None if no engine or more than one engine has it."""
        found = {ids[id] for ids in self.of.values() if id in ids}
        return found.pop() if len(found) == 1 and id not in self.engines else None


@dataclass(slots=True)
class _Engine:
    id: EngineId
    addresses: set[tuple[ServerAddress, str]] = field(default_factory=set)
    identities: frozenset[str] = frozenset()
    has_agent: bool = False


def find_names(claims: Iterable[ServerClaim], now_s: float) -> ServerNames:
    """Group the claims by server and return the engine of each id. If a server has several ids, its canonical id is the
    id from the claim with the lowest `rank` or, if several claims have this rank, from the first of these claims."""
    engines: dict[EngineId, _Engine] = {}
    at: dict[tuple[ServerAddress, str], _Engine] = {}
    by_identity: dict[str, _Engine] = {}
    of: dict[NodeId, dict[EngineId, EngineId]] = {}
    for claim in sorted(claims, key=lambda claim: claim.rank):  # stable
        place, identities = _place(claim), claim.identities(now_s)
        engine = engines.get(claim.id)
        linked = _linked(place, identities, at, by_identity) if claim.rank else None
        if engine is None:
            engine = linked or engines.setdefault(claim.id, _Engine(claim.id))
        elif linked is not engine and not _extends(engine, claim, identities):
            place, identities = None, frozenset()  # the id may mean two servers: infer nothing from it
        if engine.id != claim.engine:
            of.setdefault(claim.source, {})[claim.engine] = engine.id
        if place is not None and place not in at:
            at[place] = engine
            engine.addresses.add(place)
        for identity in identities:
            by_identity.setdefault(identity, engine)
        engine.identities = engine.identities or identities
        engine.has_agent = engine.has_agent or claim.rank == 1
    return ServerNames(frozenset(engines), of)


def _place(claim: ServerClaim) -> tuple[ServerAddress, str] | None:
    """Return the server's address and host. The host is empty unless the address is a loopback address. Return None if
    the URL has no usable address, or if the host of a loopback address is unknown."""
    address = server_address(claim.url)
    if address is None or (address.local and not claim.host):
        return None
    return address, claim.host if address.local else ""


def _linked(
    place: tuple[ServerAddress, str] | None,
    identities: frozenset[str],
    at: Mapping[tuple[ServerAddress, str], _Engine],
    by_identity: Mapping[str, _Engine],
) -> _Engine | None:
    """Return the engine with the same server identity or the same place, or None if no engine matches."""
    for identity in sorted(identities):
        engine = by_identity.get(identity)
        if engine is not None and not _apart(place, engine):
            return engine
    engine = None if place is None else at.get(place)
    if engine is not None and engine.identities and identities and not engine.identities & identities:
        return None
    return engine


def _apart(place: tuple[ServerAddress, str] | None, engine: _Engine) -> bool:
    """Return whether `place` is a loopback address on the engine's host with a different port. Such an address belongs
    to another server, even if the identities are equal."""
    if place is None or not place[1]:
        return False
    others = [address for address, host in engine.addresses if host == place[1]]
    return bool(others) and all(address.port != place[0].port for address in others)


def _extends(engine: _Engine, claim: ServerClaim, identities: frozenset[str]) -> bool:
    """Return whether a claim that shares only the id with the engine may add facts about the engine's server. It may do
    so if no address of the server is known yet, or if it is the first claim of an agent. In both cases, it may not do
    so if the claim and the engine both have identities."""
    if engine.identities and identities:
        return False
    return not engine.addresses or (claim.rank == 1 and not engine.has_agent)
