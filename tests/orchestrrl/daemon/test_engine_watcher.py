"""Tests that a deployer's engines are reported as by an agent, unless an agent reports them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from builders import engine_report, gateway_hello, sample
from fake_engine import FakeEngine

from orchestrrl.core.clock import Clock, VirtualClock
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.nodes import NodeHello, NodeKind
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.redeployment_wiring import LOOK_S, SILENT_AFTER_S, WATCHER, DeployedEngineWatcher
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.engines.base import Engine, EngineCapabilities
from orchestrrl.fleet.reports import EngineReport, ReportAck
from planner.model import EngineHealth, EngineId, EngineView, NodeId

CONFIG = """
mode: act
fleet:
  gpus: {count: 4}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 16,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
"""
E0, E1 = EngineId("e0"), EngineId("e1")
PLACES = {E0: ("http://e0", "fake"), E1: ("http://e1", "fake")}
AGENT = NodeHello(NodeId("a"), NodeKind.AGENT, (E0,), "test")


class Sink:
    """A fleet that records the reporters."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.journal = Journal(folder / "journal.sqlite", clock.now_s())
        self.fleet = build_daemon(parse_config(CONFIG), self.journal, clock).fleet
        self.nodes = self.fleet.nodes
        self.reports: list[EngineReport] = []

    def engine_reported(self, report: EngineReport, stream: int) -> ReportAck:
        self.reports.append(report)
        return self.fleet.engine_reported(report, stream)


class Harness:
    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock(1000.0)
        self.sink = Sink(folder, self.clock)
        self.engines: list[FakeEngine] = []
        self.watch = DeployedEngineWatcher(self.sink, make_engine=self.connect)
        self.sequence = 0

    def connect(self, product: str, url: str) -> Engine:
        if product != "fake":
            raise Permanent(f"unknown engine {product!r}")
        offers = EngineCapabilities("fake", "1", ("m",), max_sequences=7)
        self.engines.append(FakeEngine(self.clock, url, offers=offers))
        return self.engines[-1]

    def engine(self, name: str) -> FakeEngine:
        return [engine for engine in self.engines if engine.url == f"http://{name}"][-1]

    def view(self, engine: EngineId) -> EngineView:
        return {view.id: view for view in self.sink.fleet.state.engines(self.clock.now_s())}[engine]

    async def pass_time(self, seconds: float, tokens_per_s: int = 0) -> None:
        for _ in range(round(seconds / 0.25)):
            for engine in self.engines:
                engine.generate_tokens(tokens_per_s // 4)
            await self.clock.advance(0.25)

    async def agent_reports(self, seconds: float, running: int) -> None:
        for _ in range(round(seconds / 0.25)):
            self.sequence += 1
            seen = sample(self.clock.now_s(), running)
            self.sink.engine_reported(engine_report("e0", self.sequence, seen, agent="a"), 5)
            await self.pass_time(0.25)

    def reporters(self, engine: EngineId) -> list[NodeId]:
        return [report.agent for report in self.sink.reports if report.engine == engine]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    made = Harness(tmp_path)
    yield made
    await made.watch.close()
    assert all(engine.closed for engine in made.engines)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    made.sink.journal.close()


async def test_engine_is_reported_as_by_an_agent(harness: Harness) -> None:
    harness.watch.follow(PLACES)
    await harness.pass_time(3.0, tokens_per_s=400)
    for name in (E0, E1):
        view = harness.view(name)
        assert (view.url, view.health, view.running) == (f"http://{name}", EngineHealth.OK, 2)
        assert view.decode_tokens_per_s == pytest.approx(400.0)
        assert view.max_sequences == 7
        assert view.age_s is not None
        assert view.age_s <= 0.25
    assert set(harness.reporters(E0)) == {WATCHER}
    # Gateways may route to it.
    assert harness.sink.fleet.state.reported(E0)
    harness.sink.fleet.attach(gateway_hello())


async def test_repeated_follow_changes_nothing_and_others_are_dropped(harness: Harness) -> None:
    harness.watch.follow(PLACES)
    await harness.pass_time(1.0)
    harness.watch.follow(dict(PLACES))
    assert len(harness.engines) == 2
    harness.watch.follow({E0: PLACES[E0]})
    await harness.pass_time(0.25)
    assert [engine.closed for engine in harness.engines] == [False, True]
    seen = len(harness.reporters(E1))
    await harness.pass_time(2.0)
    assert len(harness.reporters(E1)) == seen
    # Another engine under the same name.
    harness.watch.follow({E0: ("http://e0b", "fake")})
    await harness.pass_time(1.0)
    assert harness.view(E0).url == "http://e0b"
    assert harness.engines[0].closed
    # An unknown product: nothing changes.
    with pytest.raises(Permanent, match="unknown engine"):
        harness.watch.follow({E1: ("http://e1", "other")})
    await harness.pass_time(1.0)
    assert harness.view(E0).age_s == pytest.approx(0.25, abs=0.25)


async def test_engines_that_restart_are_still_watched(harness: Harness) -> None:
    harness.watch.follow({E0: PLACES[E0]})
    await harness.pass_time(1.0)
    harness.engine("e0").error = Retryable("connection refused", 1.0)
    await harness.pass_time(1.0)
    assert harness.view(E0).health is EngineHealth.GONE
    harness.engine("e0").error = RuntimeError("a defect of the client")
    await harness.pass_time(1.0)
    assert harness.view(E0).health is EngineHealth.NONSENSE
    harness.engine("e0").error = None
    await harness.pass_time(1.0)
    assert harness.view(E0).health is EngineHealth.OK


async def test_report_that_is_refused_does_not_end_the_watch(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: EngineReport, stream: int) -> ReportAck:
        raise KeyError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(harness.sink, "engine_reported", broken)
        harness.watch.follow({E0: PLACES[E0]})
        await harness.pass_time(2.0)
    await harness.pass_time(LOOK_S + 0.5)
    assert harness.view(E0).health is EngineHealth.OK


async def test_agents_reports_take_precedence_while_it_reports(harness: Harness) -> None:
    harness.watch.follow(PLACES)
    await harness.pass_time(2.0)
    assert harness.view(E0).running == 2
    harness.sink.fleet.attach(AGENT)
    harness.sink.reports.clear()
    await harness.agent_reports(5.0, running=3)
    assert harness.view(E0).running == 3
    assert set(harness.reporters(E0)) == {"a"}
    assert set(harness.reporters(E1)) == {WATCHER}  # the agent does not report it
    # Silence.
    await harness.pass_time(SILENT_AFTER_S + LOOK_S + 0.5)
    assert harness.view(E0).running == 2
    age_s = harness.view(E0).age_s
    assert age_s is not None
    assert age_s <= 0.25
    # The agent continues its stream.
    harness.sink.reports.clear()
    await harness.agent_reports(2.0, running=4)
    assert harness.view(E0).running == 4
    assert set(harness.reporters(E0)) == {"a"}
    # A late report of the agent changes nothing.
    harness.sink.fleet.engine_reported(engine_report("e0", 1, sample(0.0, 9), agent="a"), 5)
    assert harness.view(E0).running == 4
