"""Find engines that have several names: which ids of nodes name one server. Pure.

The configuration, agents and gateways each name engines by ids of their own. An id means one engine wherever it is
used. Two ids are one engine where their servers are the same, by either of:

- the server's own identity, which agents and gateways read from it (engines/vllm_info.py);
- the address in their URLs, where both are of one host or the address means the same on every host, and no identities
  contradict it. A loopback address alone proves nothing: two hosts have one each.

Where it is uncertain, two ids stay two engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrrl.core.addresses import ServerAddress, server_address
from orchestrrl.engines.base import EngineCapabilities
from planner.model import EngineId, NodeId

CONFIGURATION = NodeId("")  # the source of what the configuration and operators name
# A server that was started anew has another identity, which its nodes read at different times.
SETTLE_S = 120.0


@dataclass(slots=True)
class ServerClaim:
    """One id that a source uses, and what it reports of the server behind it."""

    source: NodeId
    engine: EngineId
    rank: int  # whose id is kept: 0 configuration, 1 agents, 2 gateways
    url: str
    host: str = ""  # whose loopback addresses the URL means; empty: unknown
    server: str = ""  # the server's identity; empty: unknown
    server_before: str = ""
    server_since_s: float = 0.0
    known_as: EngineId | None = None  # the id under which the source has the engine by now
    last_report_s: float = 0.0
    capabilities: EngineCapabilities | None = None  # as an agent reported them last

    @property
    def id(self) -> EngineId:
        return self.known_as or self.engine

    def follow(self, url: str, host: str, server: str, known_as: EngineId | None, now_s: float) -> bool:
        """Take over what the source reports now. Returns whether anything changed. An identity that cannot be read for
        once stays."""
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
    """The engine that each source means by each of its ids."""

    engines: frozenset[EngineId] = frozenset()  # ids that are kept
    # Where it is another id than the source's own.
    of: Mapping[NodeId, Mapping[EngineId, EngineId]] = field(default_factory=dict)

    def engine(self, source: NodeId, id: EngineId) -> EngineId:
        return self.of[source].get(id, id) if source in self.of else id

    @property
    def others(self) -> dict[EngineId, list[tuple[NodeId, EngineId]]]:
        """(source, id) of the other ids of engines that have any."""
        found: dict[EngineId, list[tuple[NodeId, EngineId]]] = {}
        for source, ids in self.of.items():
            for id, engine in ids.items():
                found.setdefault(engine, []).append((source, id))
        return found

    def is_other(self, id: EngineId) -> bool:
        """Whether the id is only another name of engines."""
        return id not in self.engines and any(id in ids for ids in self.of.values())

    def by_other_name(self, id: EngineId) -> EngineId | None:
        """The engine that nodes call so; None: there is none, or several are called so."""
        found = {ids[id] for ids in self.of.values() if id in ids}
        return found.pop() if len(found) == 1 and id not in self.engines else None


@dataclass(slots=True)
class _Engine:
    id: EngineId
    addresses: set[tuple[ServerAddress, str]] = field(default_factory=set)
    identities: frozenset[str] = frozenset()
    has_agent: bool = False


def find_names(claims: Iterable[ServerClaim], now_s: float) -> ServerNames:
    """Group the claims by server. The id of the lowest rank is kept, of several the one that was claimed first."""
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
            place, identities = None, frozenset()  # an id that may be used for two servers: nothing follows for others
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
    """The address, and the host that it is of where it means another server on each."""
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
    """The engine whose server is the same."""
    for identity in sorted(identities):
        engine = by_identity.get(identity)
        if engine is not None and not _apart(place, engine):
            return engine
    engine = None if place is None else at.get(place)
    if engine is not None and engine.identities and identities and not engine.identities & identities:
        return None
    return engine


def _apart(place: tuple[ServerAddress, str] | None, engine: _Engine) -> bool:
    """One host has two servers on two ports of its loopback addresses, whatever they say of themselves."""
    if place is None or not place[1]:
        return False
    beside = [address for address, host in engine.addresses if host == place[1]]
    return bool(beside) and all(address.port != place[0].port for address in beside)


def _extends(engine: _Engine, claim: ServerClaim, identities: frozenset[str]) -> bool:
    """Whether a claim that shares no more than the engine's id may say more of its server: the first agent may."""
    if engine.identities and identities:
        return False
    return not engine.addresses or (claim.rank == 1 and not engine.has_agent)
