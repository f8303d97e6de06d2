"""Tests of the control plane with nodes that share ids, report late, or use several names for one server."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from builders import engine_report, gateway_hello, gateway_report, request, sample

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import LimitReached, Permanent, ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import Attachment, GatewayEngine, NodeHello, NodeKind, NodeRegistry
from orchestrrl.core.operations import MoveRequests, OperationItemResult, OperationResult, SetRoutes, status_of
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.reports import EngineReport, GatewayReport, SendTimes
from orchestrrl.fleet.state import NAMES_LAST_S, EngineFacts, FleetState
from orchestrrl.rpc.codecs.control import status_to_pb, worker_to_pb
from planner.model import EngineId, EngineView, NodeId, RequestId

CONFIG = """
mode: act
fast: {interval_s: 1, theta: 0.0001, stale_after_s: 5}
slow: {interval_s: 10, epsilon_s: 1, stale_after_s: 5}
fleet:
  gpus: {count: 4}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 4,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
  engines:
    - {id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1]}
    - {id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3]}
"""
E0, E1 = EngineId("e0"), EngineId("e1")
EVERY_S = 0.25


class Harness:
    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.clock = VirtualClock(1000.0)
        self.journal = Journal(folder / "journal.sqlite", self.clock.now_s())
        self.parts = build_daemon(parse_config(config), self.journal, self.clock)
        self.plane = self.parts.control_plane
        self.sequence = 0

    def engine(self, id: str) -> EngineView:
        return next(view for view in self.plane.fleet.state.engines(self.clock.now_s()) if view.id == id)

    def ids(self) -> list[str]:
        return [view.id for view in self.plane.fleet.state.engines(self.clock.now_s())]

    def report(self, engine: str = "e0", stream: int = 1, **more: object) -> None:
        self.sequence += 1
        report = replace(engine_report(engine, self.sequence, sample(self.clock.now_s())), **more)  # type: ignore[arg-type]
        self.plane.fleet.engine_reported(report, stream)

    def noted(self, kind: EntryKind) -> list[tuple[str, dict[str, object]]]:
        return [(entry.subject, dict(entry.body)) for entry in self.journal.since(0, [kind])]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.journal.close()


# --- several agents


@pytest.mark.parametrize("incarnations", [("", ""), ("p", "q"), ("p", "")])
@pytest.mark.parametrize("agents", [("agent", "agent"), ("agent", "other")])
@pytest.mark.parametrize(("first_s", "second_s"), [((0, 90), (10, 30)), ((0, 30), (10, 90)), ((0, 90), (10, 90))])
async def test_telemetry_stays_fresh_while_agents_start_and_stop(
    harness: Harness,
    incarnations: tuple[str, str],
    agents: tuple[str, str],
    first_s: tuple[float, float],
    second_s: tuple[float, float],
) -> None:
    message = set()
    for turn in range(int(90 / EVERY_S)):
        at_s = turn * EVERY_S
        for index, (from_s, to_s) in enumerate((first_s, second_s)):
            if from_s <= at_s < to_s:
                names = {"agent": NodeId(agents[index]), "incarnation": incarnations[index]}
                harness.report(stream=index + 1, **names)
        if turn % 4 == 0:
            harness.plane.fast_tick()
        view = harness.engine("e0")
        assert (view.health, view.age_s is not None and view.age_s <= 5.0) == ("ok", True)
        remarks = worker_to_pb(harness.plane, E0).remarks
        if first_s[0] + 12 <= at_s < min(first_s[1], second_s[1]) and second_s[0] + 2 <= at_s:
            assert any("2 agents report e0: agent" in remark for remark in remarks)
            message.update(remarks)
        await harness.clock.advance(EVERY_S)
    assert message
    noted = [body["remarks"] for subject, body in harness.noted(EntryKind.ENGINE_REMARKS) if subject == "e0"]
    assert noted[0] in [[remark] for remark in message]
    if first_s[1] != second_s[1]:
        assert noted[-1] == []


async def test_reattached_agent_is_one_sender_and_its_late_reports_change_nothing(harness: Harness) -> None:
    for turn in range(200):
        harness.report(stream=1 + turn // 40, incarnation="p")
        if turn % 40 == 2 and turn > 40:
            harness.plane.fleet.engine_reported(
                replace(engine_report("e0", turn, sample(500.0, running=77)), incarnation="p"), turn // 40
            )
        assert harness.engine("e0").running == 1
        harness.plane.fast_tick()
        await harness.clock.advance(EVERY_S)
    assert harness.noted(EntryKind.ENGINE_REMARKS) == harness.noted(EntryKind.NODE_DOUBLE) == []


async def test_second_agent_that_cannot_reach_the_engine_changes_nothing(harness: Harness) -> None:
    for turn in range(100):
        harness.report(agent=NodeId("near"), incarnation="p")
        if turn > 10:
            gone = replace(engine_report("e0", turn), agent=NodeId("far"), incarnation="q", health="gone")
            harness.plane.fleet.engine_reported(gone, 2)
        assert harness.engine("e0").health == "ok"
        await harness.clock.advance(EVERY_S)


# --- nodes with one id


async def orders_of(attachment: Attachment, seen: list[object]) -> None:
    async for operation in attachment.orders():
        seen.append(operation.action)


def moved(seen: list[object]) -> list[str]:
    return [move.request for action in seen if isinstance(action, MoveRequests) for move in action.moves]


def hello(incarnation: str, node: str = "gw", **more: object) -> NodeHello:
    return replace(gateway_hello("e0", gateway=NodeId(node)), incarnation=incarnation, **more)  # type: ignore[arg-type]


async def test_two_gateways_with_one_id_are_two_nodes(harness: Harness) -> None:
    plane = harness.plane
    first, second = plane.fleet.attach(hello("aaaa")), plane.fleet.attach(hello("bbbbbbbbbbbb"))
    assert [state.attachment.hello.node for state in plane.fleet.nodes.states()] == ["gw", "gw~312a5e8c"]
    plane.fleet.gateway_reported(replace(gateway_report(request("a"), sequence=1), incarnation="aaaa"), 1)
    plane.fleet.gateway_reported(replace(gateway_report(request("b"), sequence=1), incarnation="bbbbbbbbbbbb"), 2)
    assert [view.id for view in plane.fleet.state.snapshot(1000.0).requests] == ["a", "b"]
    harness.report("e0")
    harness.report("e1")
    plane.fast_tick()
    assert harness.noted(EntryKind.NODE_DOUBLE) == [("gw", {"listed": "gw~312a5e8c"})]
    assert list(status_to_pb(harness.parts, "").remarks) == [
        "two nodes have the id gw: the second is listed as gw~312a5e8c"
    ]
    seen: dict[str, list[object]] = {"aaaa": [], "bbbb": []}
    tasks = [
        asyncio.create_task(orders_of(attachment, seen[name]))
        for name, attachment in (("aaaa", first), ("bbbb", second))
    ]
    move = asyncio.create_task(plane.fleet.move(RequestId("b"), E1))
    await harness.clock.advance(0.1)
    assert "b" not in moved(seen["aaaa"])
    assert moved(seen["bbbb"]) == ["b"]
    (opened,) = [each for each in plane.fleet.runner.open if each.destination == "gw~312a5e8c"]
    items = (OperationItemResult("b", True),)
    result = OperationResult(opened.order.id, NodeId("gw~312a5e8c"), status_of(items), items=items)
    plane.fleet.result_received(result)
    assert (await move).items == items
    # The first returns after a break as itself; after the second has gone, no trace of it remains.
    plane.fleet.detach(first)
    plane.fleet.stream_ended(1)
    assert plane.fleet.attach(hello("aaaa")).hello.node == "gw"
    plane.fleet.detach(second)
    plane.fleet.stream_ended(2)
    assert [state.attachment.hello.node for state in plane.fleet.nodes.states()] == ["gw"]
    plane.fast_tick()
    assert list(status_to_pb(harness.parts, "").remarks) == []
    for task in tasks:
        task.cancel()


async def test_restarted_gateway_keeps_its_id(harness: Harness) -> None:
    plane = harness.plane
    first = plane.fleet.attach(hello("aaaa"))
    plane.fleet.gateway_reported(replace(gateway_report(sequence=9), incarnation="aaaa"), 1)
    plane.fleet.stream_ended(1)
    plane.fleet.detach(first)
    assert plane.fleet.attach(hello("bbbb")).hello.node == "gw"
    plane.fleet.gateway_reported(replace(gateway_report(request("a"), sequence=1), incarnation="bbbb"), 2)
    assert [view.id for view in plane.fleet.state.snapshot(1000.0).requests] == ["a"]
    assert harness.noted(EntryKind.NODE_DOUBLE) == []


async def test_idle_stream_ends_with_its_attachment(harness: Harness) -> None:
    nodes, streams = harness.plane.fleet.nodes, []
    for node in ("gw", "gw", "other"):  # the second replaces the first
        attachment = harness.plane.fleet.attach(hello("aaaa", node))
        streams.append(asyncio.create_task(orders_of(attachment, [])))
        await harness.clock.advance(0.1)
    assert [stream.done() for stream in streams] == [True, False, False]
    assert nodes.detach(attachment, harness.clock.now_s())
    await harness.clock.advance(0.1)
    assert [stream.done() for stream in streams] == [True, False, True]
    nodes.end_all()  # as the daemon ends
    await harness.clock.advance(0.1)
    assert streams[1].done()


def test_refused_or_replaced_gateway_leaves_no_state() -> None:
    nodes = NodeRegistry(most_nodes=2)
    first = nodes.attach(hello("a", "n1"), 1.0)
    nodes.attach(hello("b", "n2"), 2.0)
    with pytest.raises(LimitReached, match=r"limits\.nodes"):
        nodes.attach(hello("c", "n3"), 3.0)
    again = nodes.attach(hello("b", "n2"), 3.0)
    nodes.detach(first, 4.0)
    assert nodes.attach(hello("d", "n3"), 5.0).hello.node == "n3"
    nodes.detach(again, 6.0)
    assert nodes.attach(hello("e", "n2"), 7.0).hello.node == "n2"
    assert [(state.attachment.hello.node, state.attached) for state in nodes.states()] == [("n2", True), ("n3", True)]


async def test_gateway_without_incarnation_counts_again_after_the_other_has_ended(harness: Harness) -> None:
    for turn in range(120):
        harness.plane.fleet.gateway_reported(gateway_report(request("a"), sequence=turn + 1), 1)
        if 20 <= turn < 40:
            harness.plane.fleet.gateway_reported(gateway_report(request("b"), sequence=turn + 1), 2)
        await harness.clock.advance(EVERY_S)
    snapshot = harness.plane.fleet.state.snapshot(harness.clock.now_s())
    assert [view.id for view in snapshot.requests] == ["a"]
    assert snapshot.requests_age_s == EVERY_S


# --- old reports


def queued(report: EngineReport | GatewayReport, sent_s: float) -> SendTimes:
    """Stamp a report as a node does whose clock is a day ahead, with an echo from a moment before."""
    return SendTimes(sent_s + 86400.0, sent_s - 0.1, sent_s - 0.05 + 86400.0)


@pytest.mark.parametrize("late", ["engine", "gateway"])
async def test_loops_do_not_act_on_queued_reports(harness: Harness, late: str) -> None:
    """The receipts are fresh, but the contents are 20 s old: one engine has four times the other's requests."""
    plane = harness.plane
    plane.fleet.attach(gateway_hello("e0", "e1"))
    held = [request(f"r{n}", "e0") for n in range(8)]

    def tell(engine_s: float, gateway_s: float) -> None:
        harness.sequence += 1
        for name, running in (("e0", 4), ("e1", 0)):
            busy = sample(engine_s + 86400.0, running, 4 if running else 0, decode_tokens_per_s=40.0 * (running or 1))
            report = engine_report(name, harness.sequence, busy)
            plane.fleet.engine_reported(replace(report, times=queued(report, engine_s), incarnation="p"), 1)
        seen = gateway_report(*held, sequence=harness.sequence, at_s=gateway_s + 86400.0)
        plane.fleet.gateway_reported(replace(seen, times=queued(seen, gateway_s), incarnation="g"), 2)

    now_s = harness.clock.now_s()
    old_s = now_s - 20.0
    tell(*((old_s, now_s - 0.1) if late == "engine" else (now_s - 0.1, old_s)))
    decision = plane.fast_tick()
    assert decision.verdict.code == "stale_telemetry"
    snapshot = plane.fleet.state.snapshot(now_s)
    assert snapshot.inputs_age_s == pytest.approx(20.0, abs=0.2)
    if late == "engine":
        assert [view.age_s for view in snapshot.engines] == pytest.approx([20.0, 20.0], abs=0.2)
    else:
        assert snapshot.requests_age_s == pytest.approx(20.0, abs=0.2)
        assert all(view.quiet_s == pytest.approx(20.0, abs=0.2) for view in snapshot.requests)
        last_report_s = plane.fleet.state.last_report_s(NodeId("gw"))
        assert last_report_s == pytest.approx(old_s, abs=0.2)  # it settles nothing that was ordered since
    plan = await plane.slow_tick()
    assert plan.verdict.code == "stale_telemetry"
    assert plan.inputs_age_s == pytest.approx(20.0, abs=0.2)
    # The loops act on the same values in fresh reports.
    tell(now_s - 0.1, now_s - 0.1)
    assert plane.fast_tick().verdict.code in ("pack", "spread")


# --- several names of one server

BARE = "mode: act\nfast: {interval_s: 1}"
URL = "http://127.0.0.1:8001"


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path, BARE)
    yield made
    made.journal.close()


def named(
    harness: Harness, own: str = "a", url: str = "http://localhost:8001/", server: str = "", host: str = "H"
) -> Attachment:
    """Attach a gateway that was started with an engine under its own id."""
    addresses = (GatewayEngine(EngineId(own), url, server),)
    return harness.plane.fleet.attach(
        NodeHello(NodeId("gw"), NodeKind.GATEWAY, (EngineId(own),), "test", "", "g", addresses, host)
    )


def agent(harness: Harness, host: str = "H", node: str = "agent") -> None:
    harness.plane.fleet.attach(NodeHello(NodeId(node), NodeKind.AGENT, (E0,), "test", "", node, (), host))


@pytest.mark.parametrize(
    ("url", "server", "host"),
    [("http://localhost:8001/", "", "H"), ("http://gpu7:8001", "s1", "H"), ("http://gpu7:8001", "s1", "other")],
)
@pytest.mark.parametrize("first", ["gateway", "agent"])
async def test_engine_with_two_names_is_counted_once(
    bare: Harness, url: str, server: str, host: str, first: str
) -> None:
    harness, plane = bare, bare.plane
    if first == "gateway":
        orders = named(harness, "a", url, server, host)
    agent(harness)
    for _ in range(2):
        harness.report("e0", url=URL, server="s1", incarnation="agent", agent=NodeId("agent"))
    if first == "agent":
        orders = named(harness, "a", url, server, host)
    plane.fleet.gateway_reported(replace(gateway_report(request("r", "a")), incarnation="g"), 2)
    assert harness.ids() == ["e0"]
    plane.fast_tick()
    snapshot = plane.fleet.state.snapshot(harness.clock.now_s())
    assert [(view.id, view.engine) for view in snapshot.requests] == [("r", "e0")]
    worker = worker_to_pb(plane, E0)
    assert (list(worker.other_names), list(worker.remarks)) == (["a"], ["a of gw is the same server as e0"])
    assert worker.requests == 1
    assert harness.noted(EntryKind.ENGINE_REMARKS) == [("e0", {"remarks": ["a of gw is the same server as e0"]})]
    seen: list[object] = []
    with suppress(TimeoutError):
        await asyncio.wait_for(orders_of(orders, seen), 0.1)
    routes = [action for action in seen if isinstance(action, SetRoutes)][-1]
    # By the address that reaches it from the gateway's host.
    assert [(route.engine, route.url) for route in routes.routes] == [("e0", url if host == "other" else URL)]


async def test_loopback_urls_of_two_hosts_are_two_engines(bare: Harness) -> None:
    for index in range(2):
        agent(bare, f"H{index}", f"agent{index}")
        for _ in range(2):
            names = {"agent": NodeId(f"agent{index}"), "incarnation": f"agent{index}", "server": f"s{index}"}
            bare.report(f"e{index}", stream=index, url=URL, **names)
    named(bare, "b", "http://localhost:8001", "s1", "H1")
    assert bare.ids() == ["e0", "e1"]
    assert bare.plane.fleet.state.engine_called(EngineId("b"), bare.clock.now_s()) == "e1"


async def test_moves_and_operator_orders_work_with_both_names(bare: Harness) -> None:
    harness, plane = bare, bare.plane
    orders = named(harness)
    agent(harness)
    for _ in range(2):
        harness.report("e0", url=URL, incarnation="agent", agent=NodeId("agent"))
        harness.report("e9", url="http://e9:1", incarnation="agent", agent=NodeId("agent"))
    live = [request("r", "a"), request("s", "e9")]
    plane.fleet.gateway_reported(replace(gateway_report(*live), incarnation="g"), 2)
    seen: list[object] = []
    task = asyncio.create_task(orders_of(orders, seen))
    moves = [
        asyncio.create_task(plane.fleet.move(RequestId("s"), EngineId("a"))),
        asyncio.create_task(plane.fleet.move(RequestId("r"), EngineId("e9"))),
    ]
    await harness.clock.advance(0.1)
    ordered = [m for action in seen if isinstance(action, MoveRequests) for m in action.moves]
    # To the engine by its id, from the engine by the gateway's name for it.
    assert [(m.request, m.from_engine, m.to_engine) for m in ordered] == [("s", "e9", "e0"), ("r", "a", "e9")]
    for each in (*moves, task):
        each.cancel()


@pytest.mark.parametrize("url", ["http://localhost:8001", "http://127.0.0.1:8001/", "http://[::1]:8001"])
@pytest.mark.parametrize("id", ["e7", "a"])
async def test_engine_is_not_added_under_another_name(bare: Harness, url: str, id: str) -> None:
    named(bare, host="")
    agent(bare, "")
    bare.report("e0", url=URL, server="s1")
    bare.report("e0", url=URL, server="s1")
    with pytest.raises(ProblemFaults, match=r"url: is in use by engine (e0|a), got"):
        bare.plane.fleet.membership_changes.add(EngineFacts("e7", url))
    bare.plane.fleet.membership_changes.add(EngineFacts("e7", "http://localhost:8002"))


async def test_gateways_engine_under_the_daemons_id_is_no_second_engine(bare: Harness) -> None:
    named(bare, "a", "http://far:1")
    assert bare.ids() == ["a"]
    bare.report("e0", url=URL)
    engines = (GatewayEngine(EngineId("a"), "http://far:1", "", E0),)
    bare.plane.fleet.gateway_reported(replace(gateway_report(), incarnation="g", engines=engines), 2)
    assert bare.ids() == ["e0"]
    # The next gateway of that id does not use it any longer.
    bare.plane.fleet.gateway_reported(replace(gateway_report(sequence=2), incarnation="g", engines=()), 2)
    assert bare.ids() == ["e0"]
    assert not worker_to_pb(bare.plane, E0).other_names


# --- limits, and names that come late


@pytest.mark.parametrize("operation", ["remove", "drain"])
async def test_operator_changes_apply_to_all_names_of_an_engine(harness: Harness, operation: str) -> None:
    async def reports(count: int) -> None:
        for _ in range(count):
            harness.report("x", url="http://e0")
            await harness.clock.advance(EVERY_S)
            harness.plane.fleet.state.names(harness.clock.now_s())

    await reports(2)
    assert harness.ids() == ["e0", "e1"]
    if operation == "remove":
        await harness.plane.fleet.membership_changes.remove(E0)
    else:
        harness.plane.fleet.membership_changes.drain(E0)
        harness.plane.fleet.state.set_roster(
            (), draining=harness.plane.fleet.membership_changes.membership.draining
        )  # only the agent names it now
    await reports(int(3 * NAMES_LAST_S / EVERY_S))
    assert harness.ids() == (["e1"] if operation == "remove" else ["x"])
    if operation == "drain":
        assert harness.engine("x").draining


async def test_capabilities_are_kept_when_another_name_becomes_known(harness: Harness) -> None:
    harness.report("x", url="http://e0", capabilities=EngineCapabilities("vllm", "0", ("m",), max_sequences=7))
    for _ in range(2):
        await harness.clock.advance(EVERY_S)
        harness.plane.fast_tick()
        harness.report("x", url="http://e0")
    capabilities = harness.plane.fleet.state.capabilities(E0)
    assert capabilities is not None
    assert capabilities.max_sequences == harness.engine("e0").max_sequences == 7


def test_engines_that_only_gateways_name_count_towards_the_limit() -> None:
    state = FleetState(capacity=LimitSettings(engines=10))
    named = tuple(GatewayEngine(EngineId(f"n{index}"), f"http://n{index}") for index in range(40))
    with pytest.raises(LimitReached, match=r"limits\.engines"):
        state.check_gateway_report(replace(gateway_report(), engines=named), 1.0)
    with pytest.raises(LimitReached, match=r"limits\.engines"):
        state.check_hello(replace(gateway_hello(), addresses=named), 1.0)


def test_gateway_without_new_engines_is_accepted_beyond_the_limit() -> None:
    facts = [EngineFacts(EngineId(name), f"http://{name}") for name in ("e0", "e1")]
    state = FleetState(facts, capacity=LimitSettings(engines=1))
    state.check_hello(gateway_hello("e0"), 1.0)
    state.check_hello(gateway_hello(gateway=NodeId("other")), 1.0)


def test_gateway_names_do_not_use_up_the_agents_limit() -> None:
    state = FleetState(capacity=LimitSettings(engines=10))
    names = tuple(GatewayEngine(EngineId(f"e{index}"), f"http://e{index}") for index in range(10))
    for gateway in range(20):
        state.fold_hello(replace(gateway_hello(gateway=NodeId(f"g{gateway}")), addresses=names), 1.0)
    state.check_engine_report(engine_report("e3"), 1.0)


async def test_stream_belongs_to_one_process_at_a_time(harness: Harness) -> None:
    for number in range(50):
        report = replace(gateway_report(sequence=number + 1, at_s=harness.clock.now_s()), incarnation=f"p{number}")
        harness.plane.fleet.gateway_reported(report, 1)
    assert harness.plane.fleet.nodes.doubles() == {}
    assert len(harness.plane.fleet.state.barriers) == 1


async def test_node_is_not_attached_if_the_journal_write_fails(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise Permanent("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(harness.journal, "append", full)
        with pytest.raises(Permanent):
            harness.plane.fleet.attach(replace(gateway_hello(), incarnation="one"))
    assert harness.plane.fleet.nodes.gateways() == ()
    assert harness.plane.fleet.attach(replace(gateway_hello(), incarnation="two")).hello.node == gateway_hello().node


def test_names_in_a_late_report_do_not_replace_newer_ones() -> None:
    state = FleetState()
    new, old = (GatewayEngine(EngineId(name), f"http://{name}") for name in ("new", "old"))
    state.fold_gateway(replace(gateway_report(sequence=5, at_s=2.0), engines=(new,)), 2.0, stream=8)
    state.fold_gateway(replace(gateway_report(sequence=4, at_s=2.0), engines=(old,)), 2.0, stream=8)
    assert [view.id for view in state.engines(2.0)] == ["new"]


async def test_address_of_a_removed_engine_can_be_reused(harness: Harness) -> None:
    harness.report("x", url="http://e0")
    harness.plane.fast_tick()
    await harness.plane.fleet.membership_changes.remove(E0)
    harness.plane.fleet.membership_changes.add(EngineFacts("again", "http://e0"))
    assert "again" in harness.ids()


async def test_engine_can_be_drained_after_its_other_name_was_removed(harness: Harness) -> None:
    harness.plane.fleet.membership_changes.add(EngineFacts("x", "http://x"))
    await harness.plane.fleet.membership_changes.remove(EngineId("x"))
    for _ in range(2):
        harness.report("x", url="http://e0")
        await harness.clock.advance(EVERY_S)
        harness.plane.fast_tick()
    harness.plane.fleet.membership_changes.drain(E0)
    assert harness.engine("e0").draining
