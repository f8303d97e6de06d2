"""Tests of which ids name one server: two servers are never merged, and one server is recognized if anything proves
it."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fleet.same_servers import CONFIGURATION, SETTLE_S, ServerClaim, ServerNames, find_names
from planner.model import EngineId, NodeId

RANKS = {"configuration": 0, "agent": 1, "gateway": 2}


def claim(
    source: str, engine: str, url: str, host: str = "", server: str = "", known_as: str = "", rank: int | None = None
) -> ServerClaim:
    """Return a claim of a source, e.g. agent-1; the word before the dash is the kind of source."""
    kind = source.partition("-")[0]
    node = CONFIGURATION if kind == "configuration" else NodeId(source)
    return ServerClaim(
        node,
        EngineId(engine),
        RANKS[kind] if rank is None else rank,
        url,
        host,
        server,
        known_as=EngineId(known_as) if known_as else None,
    )


def names(*claims: ServerClaim, now_s: float = 1000.0) -> ServerNames:
    return find_names(claims, now_s)


def kept(*claims: ServerClaim) -> list[str]:
    return sorted(names(*claims).engines)


AGENT = claim("agent-1", "e0", "http://127.0.0.1:8001", "A", "s1")


@pytest.mark.parametrize(
    "other",
    [
        claim("gateway-1", "a", "http://localhost:8001/", "A"),
        claim("gateway-1", "a", "http://[::1]:8001", "A", "s1"),
        claim("gateway-1", "a", "http://gpu7:8001", "A", "s1"),  # by the server's own identity
        claim("gateway-1", "a", "http://gpu7:8001", "B", "s1"),
        claim("gateway-1", "a", "http://gpu7:30001", "B", "s1"),  # a forwarded port
        claim("gateway-1", "a", "http://nowhere", "B", "", "e0"),  # it uses the daemon's id now
        claim("agent-2", "a", "http://localhost:8001", "A"),
    ],
)
def test_two_names_of_one_server_are_one_engine(other: ServerClaim) -> None:
    found = names(AGENT, other)
    assert sorted(found.engines) == ["e0"]
    assert found.engine(other.source, EngineId("a")) == "e0"
    assert found.engine(other.source, EngineId("b")) == "b"
    assert found.others == {"e0": [(other.source, "a")]}
    assert found.by_other_name(EngineId("a")) == "e0"
    assert found.is_other(EngineId("a"))


@pytest.mark.parametrize(
    "other",
    [
        claim("gateway-1", "a", "http://127.0.0.1:8001", "B"),  # another host's loopback
        claim("gateway-1", "a", "http://127.0.0.1:8001", ""),  # an unknown host's loopback
        claim("gateway-1", "a", "http://127.0.0.1:8001", "A", "s2"),  # the identity at this address is another
        claim("gateway-1", "a", "http://127.0.0.1:8002", "A"),
        claim("gateway-1", "a", "http://127.0.0.1:8002", "A", "s1"),  # two ports of one host, with equal start times
        claim("gateway-1", "a", "http://127.0.0.2:8001", "A"),
        claim("gateway-1", "a", "http://[::1]:8001", "A"),  # perhaps another server's
        claim("gateway-1", "a", "http://gpu7:8001", "A"),
        claim("gateway-1", "a", "", "A"),
        claim("agent-2", "a", "http://127.0.0.1:8001", "B", "s2"),
    ],
)
def test_two_servers_are_two_engines(other: ServerClaim) -> None:
    found = names(AGENT, other)
    assert sorted(found.engines) == ["a", "e0"]
    assert not found.of


def test_equal_loopback_urls_of_two_hosts_are_two_servers() -> None:
    agents = [claim(f"agent-{h}", f"e{h}", "http://127.0.0.1:8001", h, f"s{h}") for h in "AB"]
    gateways = [claim(f"gateway-{h}", "local", "http://localhost:8001", h, f"s{h}") for h in "AB"]
    found = names(*agents, *gateways)
    assert sorted(found.engines) == ["eA", "eB"]
    for host in "AB":
        assert found.engine(NodeId(f"gateway-{host}"), EngineId("local")) == f"e{host}"
    assert found.by_other_name(EngineId("local")) is None  # ambiguous: either of the two


def test_agents_default_id_is_replaced_by_the_configured_one() -> None:
    found = names(
        claim("configuration", "e0", "http://127.0.0.1:8001", "A"),
        claim("agent-1", "localhost:8001", "http://localhost:8001", "A", "s1"),
        claim("gateway-1", "a", "http://gpu7:8001", "B", "s1"),  # recognized by the identity that the agent reads
    )
    assert sorted(found.engines) == ["e0"]
    assert found.engine(NodeId("gateway-1"), EngineId("a")) == "e0"


def test_id_means_one_engine_even_with_different_servers() -> None:
    assert kept(AGENT, claim("gateway-1", "e0", "http://elsewhere:1", "B", "s9")) == ["e0"]
    # Its server elsewhere proves nothing about others.
    found = names(
        AGENT,
        claim("agent-2", "e0", "http://127.0.0.1:8001", "B", "s2"),
        claim("gateway-1", "b", "http://localhost:8001", "B", "s2"),
    )
    assert sorted(found.engines) == ["b", "e0"]


def test_restarted_server_stays_one_engine_while_nodes_read_the_new_identity() -> None:
    agent, gateway = AGENT, claim("gateway-1", "a", "http://gpu7:8001", "A", "s1")
    agent = claim("agent-1", "e0", agent.url, "A", "s1")
    agent.follow(agent.url, "A", "s1'", None, 2000.0)
    assert sorted(names(agent, gateway, now_s=2000.0).engines) == ["e0"]
    later = names(agent, gateway, now_s=2000.0 + SETTLE_S)
    assert sorted(later.engines) == ["a", "e0"]
    gateway.follow(gateway.url, "A", "s1'", None, 2030.0)
    assert sorted(names(agent, gateway, now_s=2000.0 + SETTLE_S).engines) == ["e0"]


def test_unreadable_identity_is_kept_except_at_another_url() -> None:
    held = claim("agent-1", "e0", "http://h:1", "A", "s1")
    assert not held.follow("http://h:1", "A", "", None, 5.0)
    assert held.server == "s1"
    assert held.follow("http://h:2", "A", "", None, 6.0)
    assert held.server == ""


# --- any fleet


@dataclass(frozen=True)
class Server:
    host: str
    port: int

    @property
    def identity(self) -> str:
        return f"{self.host}:{self.port}"

    def urls(self, host: str) -> list[str]:
        near = [f"http://localhost:{self.port}", f"http://127.0.0.1:{self.port}/", f"http://[::1]:{self.port}"]
        return [f"http://{self.host}:{self.port}", *(near if host == self.host else [])]


servers = st.builds(Server, st.sampled_from(["A", "B", "C"]), st.sampled_from([1, 2, 3]))


@st.composite
def claims_on(draw: st.DrawFn) -> list[tuple[ServerClaim, Server]]:
    """Generate nodes with their own ids for servers; each id is used for one server only."""
    found = []
    for number in range(draw(st.integers(1, 12))):
        server = draw(servers)
        host = draw(st.sampled_from(["A", "B", "C"]))
        kind = draw(st.sampled_from(["configuration", "agent", "gateway"]))
        ids = [f"{server.identity}/{n}" for n in range(2)]
        identity = draw(st.sampled_from(["", server.identity])) if kind != "configuration" else ""
        url = draw(st.sampled_from(server.urls(host)))
        made = claim(f"{kind}-{number}", draw(st.sampled_from(ids)), url, draw(st.sampled_from(["", host])), identity)
        if kind == "configuration" and any(c.rank == 0 and c.engine == made.engine for c, _ in found):
            continue
        found.append((made, server))
    return found


@given(fleet=claims_on())
def test_two_servers_are_never_one_engine(fleet: list[tuple[ServerClaim, Server]]) -> None:
    found = find_names([claim for claim, _ in fleet], 1000.0)
    behind: dict[str, set[Server]] = {}
    for made, server in fleet:
        behind.setdefault(found.engine(made.source, made.engine), set()).add(server)
    assert all(len(servers) == 1 for servers in behind.values())


@given(fleet=claims_on(), data=st.data())
def test_all_sources_that_read_an_identity_agree_on_the_engine(
    fleet: list[tuple[ServerClaim, Server]], data: st.DataObject
) -> None:
    reading = [(made, server) for made, server in fleet if made.server and made.rank]
    found = find_names([made for made, _ in data.draw(st.permutations(reading))], 1000.0)
    assert len(found.engines) == len({server for _, server in reading})
