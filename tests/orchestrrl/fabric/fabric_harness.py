"""Run a site's switches, agents and coordinator in virtual time: `async with harness(tmp_path) as harness: ...`.

Switches are virtual; agents report what a test sets, each by its own clock; the journal is a real file. `kill` ends a
daemon as the operating system does: none of its tasks runs on, and no cleanup takes place."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from ocs_drivers.emulators.base import EmulatedDevice as VirtualGlass
from ocs_drivers.faults import DeviceFault
from ocs_drivers.model import CircuitState, Connectivity, CrossConnect
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import FabricSettings
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.period_queue import AnnouncedPeriod
from orchestrrl.fabric.periods import PeriodReport
from orchestrrl.fabric.site import read_site
from orchestrrl.fabric.switch_reader import SwitchReader, device_pairs
from orchestrrl.fabric.window_tracker import AgentStream, ClockPing, StopWatching, WatchWindows, WindowTracker
from planner.fabric.clocks import ClockExchange
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.model import OcsId, Pair, PortPair
from planner.fabric.plan import FabricPlan, FabricState
from planner.fabric.slack import RemainingQuiet
from planner.fabric.topology import Site
from planner.fabric.windows import CommitTimes, Window
from planner.model import Hold, Mode

T = TypeVar("T")

SITE = Path(__file__).parents[3] / "deploy/examples/site.yaml"
START_S = 1000.0


def train(
    name: str, *groups: Iterable[int], job: str = "", operation: TrafficOperation = TrafficOperation.DP
) -> Intent:
    traffic = Traffic(operation, Primitive.ALL_TO_ALL, tuple(map(tuple, groups)), 4e9)
    return Intent(name, Stage.TRAIN, (traffic,), job=job)


# Periods with different circuits: over the core, between the rails of each PoD, and inside one PoD.
OVER_CORE = train("gradients", range(0, 16, 2), range(1, 16, 2))
ACROSS_RAILS = train("experts", *((i, i + 3) for i in range(0, 16, 4)), operation=TrafficOperation.EP)
GEN = Intent(
    "generation", Stage.GEN, (Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, (tuple(range(16, 24)),), 4e9),), job=""
)
SYNC = Intent(
    "sync",
    Stage.WEIGHT_SYNC,
    (Traffic(TrafficOperation.WEIGHT_SYNC, Primitive.BROADCAST, ((0,),), 8e9, receivers=(tuple(range(16, 32)),)),),
)


class RestingClock(VirtualClock):
    """Advances time only when no task is left to run at the current instant."""

    async def _settle(self) -> None:
        ready: deque[Any] = cast(Any, asyncio.get_running_loop())._ready
        for _ in range(100_000):
            await asyncio.sleep(0)
            if not ready:
                return
        raise AssertionError("a task runs endlessly at this instant")


class Killed(BaseException):
    """Simulates the daemon's death. A BaseException, so that no handler in the daemon catches it."""


class MortalJournal(Journal):
    """A journal that is full, or kills its daemon, at the n-th entry from now: before it is written or right after."""

    full_in: int | None = None
    kill_in: int | None = None
    kill_after: bool = False
    on_kill: Callable[[], None] = lambda: None

    def append(self, at_s: float, kind: EntryKind, subject: str, body: Mapping[str, Any]) -> int:
        if self.full_in is not None:
            self.full_in -= 1
            if self.full_in < 0:
                from orchestrrl.core.errors import Permanent

                raise Permanent("database or disk is full")
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                if self.kill_after and self.kill_in == -1:
                    super().append(at_s, kind, subject, body)
                self.on_kill()
                raise Killed
        return super().append(at_s, kind, subject, body)


@dataclass
class Agent:
    """The agent of one host, whose clock is `ahead_s` ahead of the daemon's. Answers pings after `way_s` in each
    direction, and repeats its last report when it is armed."""

    hub: WindowTracker
    clock: VirtualClock
    name: str
    jobs: Mapping[str, frozenset[int]]
    ahead_s: float = 0.0
    way_s: float = 0.0
    armed: dict[int, WatchWindows] = field(default_factory=dict)
    found: dict[str, RemainingQuiet | Hold] = field(default_factory=dict)
    stream: AgentStream | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def attach(self) -> None:
        self.armed.clear()
        self.stream = self.hub.attach(self.name, self.jobs)
        self._tasks = [asyncio.create_task(self.stream.ping()), asyncio.create_task(self._obey(self.stream))]

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.stream is not None:
            self.stream.end()

    @property
    def now_s(self) -> float:
        return self.clock.now_s() + self.ahead_s

    def quiet(self, length_s: float, job: str = "", since_s: float = 0.0) -> None:
        """Report quiet that began `since_s` ago and lasts `length_s` from now."""
        self._report(job, RemainingQuiet(3, self.now_s - since_s, self.now_s + length_s, 20, 0.01))

    def busy(self, job: str = "") -> None:
        self._report(job, Hold("traffic", "rank 0: DP is under way"))

    def _report(self, job: str, report: RemainingQuiet | Hold) -> None:
        self.found[job] = report
        if self.stream is not None and any(arm.job == job for arm in self.armed.values()):
            self.stream.on_remaining_quiet(job, self.now_s, min(self.jobs.get(job, {0})), report)

    async def _obey(self, stream: AgentStream) -> None:
        while (order := await stream.next_order()) is not None:
            match order:
                case WatchWindows():
                    self.armed[order.id] = order
                    if order.job in self.found:
                        stream.on_remaining_quiet(order.job, self.now_s, 0, self.found[order.job])
                case StopWatching():
                    self.armed.pop(order.id, None)
                case ClockPing():
                    await self.clock.sleep(self.way_s)
                    received_s = self.now_s
                    await self.clock.sleep(self.way_s)
                    stream.answers(ClockExchange(order.sent_s, received_s, received_s, self.clock.now_s()))


@dataclass
class Sent:
    """A command sent to a switch. `window`: the hub's window at that instant. `trains`: whether the change needs
    one."""

    at_s: float
    switch: OcsId
    window: Window | Hold | None
    trains: bool = False


class Harness:
    """The parts of a site under test. Tests announce periods and let time pass."""

    def __init__(
        self,
        folder: Path,
        site: Site,
        *,
        connectivity: Connectivity = Connectivity.ANY_TO_ANY,
        reconfiguration_s: float = 0.025,
        **settings: Any,
    ) -> None:
        self.site = site
        self.clock = RestingClock(START_S)
        self.settings = FabricSettings(site="site.yaml", **(settings or {"within_s": 2.0, "boundary_within_s": 5.0}))
        self.mode = Mode.ACT
        self.routing: Any = None
        self.sent: list[Sent] = []
        self.plans: list[tuple[FabricState, FabricPlan]] = []
        self._folder = folder
        count = 2 if connectivity is Connectivity.INGRESS_EGRESS else 1
        self.switches = {
            switch.id: VirtualSwitch(
                switch.id,
                clock=self.clock,
                ports=32 * count,
                connectivity=connectivity,
                reconfiguration_s=reconfiguration_s,
                command_timeout_s=0.5,
                lock_timeout_s=1.0,
                link_timeout_s=0.2,
                tune_timeout_s=0.3,
            )
            for switch in site.switches
        }
        for id, switch in self.switches.items():
            self._note_commands(id, switch)
        self.agents: list[Agent] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.journal: MortalJournal

    # --- the daemon

    def start(self) -> None:
        """Start a daemon on the journal of the previous one."""
        self.journal = MortalJournal(self._folder / "journal.sqlite", self.clock.now_s())
        self.journal.on_kill = self._die
        self.hub = WindowTracker(self.clock)
        self.pause_registry = PauseRegistry(self.journal, self.clock)
        self.circuits = CircuitExecutor(cast(Any, self.switches), self.journal, self.clock)
        self.circuits.recover()
        self.reader = SwitchReader(self.site, self.switches, self.clock, self.circuits.owners)
        self.coordinator = CircuitCoordinator(
            self.site,
            self.reader,
            self.circuits,
            self.hub,
            self.pause_registry,
            self.journal,
            self.clock,
            materialise=self._materialise,
            mode=lambda: self.mode,
            times=CommitTimes(dict.fromkeys(self.switches, 0.025)),
            settings=self.settings,
            routing=self.routing,
        )
        self.overrides = self.coordinator.overrides
        self._tasks = [asyncio.create_task(self.circuits.run()), asyncio.create_task(self.coordinator.run())]
        for agent in self.agents:
            agent.hub = self.hub
            agent.attach()

    def _die(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def kill(self) -> None:
        """Kill the daemon: what it still does while it ends is not journalled and reaches no switch."""
        self.journal.kill_in = 0
        for agent in self.agents:
            agent.leave()
        dead = {id: switch.commit for id, switch in self.switches.items()}
        for switch in self.switches.values():
            switch.commit = _never  # type: ignore[method-assign]
        self._die()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, Killed):
                await task
        for id, commit in dead.items():
            self.switches[id].commit = commit  # type: ignore[method-assign]
        self.journal.close()

    async def until_killed(self, life: Coroutine[Any, Any, None], entries: int) -> bool:
        """Run `life` and return whether the daemon was killed before it ended."""
        self.journal.kill_in = entries
        try:
            await life
        except Killed:
            return True
        return self.journal.kill_in < 0

    async def stop(self) -> None:
        for agent in self.agents:
            agent.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.journal.close()

    # --- actions

    async def pass_time(self, duration_s: float) -> None:
        await self.clock.advance(duration_s)

    async def during(self, work: Awaitable[T]) -> T:
        """Await work while time passes."""
        under_way = asyncio.ensure_future(work)
        while not under_way.done():
            await self.pass_time(0.005)
        return await under_way

    async def over(self, period: AnnouncedPeriod, within_s: float = 30.0) -> PeriodReport:
        until_s = self.clock.now_s() + within_s
        while not period.report.over and self.clock.now_s() < until_s:
            await self.pass_time(0.005)
        assert period.report.over, period.report
        return period.report

    async def at_boundary(self, intent: Intent) -> PeriodReport:
        return await self.over(self.coordinator.expect(intent, boundary=True))

    async def in_window(self, intent: Intent) -> PeriodReport:
        """Announce a period while all agents are quiet for long."""
        for agent in self.agents:
            for job in agent.jobs:
                agent.quiet(60.0, job)
        period = self.coordinator.expect(intent)
        while not period.report.over:
            await self.pass_time(0.5)
            for agent in self.agents:  # agents repeat their reports, which expire
                for job in agent.jobs:
                    agent.quiet(60.0, job)
        return period.report

    def agent(self, name: str, ranks: Iterable[int], job: str = "", **more: Any) -> Agent:
        made = Agent(self.hub, self.clock, name, {job: frozenset(ranks)}, **more)
        self.agents.append(made)
        made.attach()
        return made

    def fail(self, switch: str, fault: DeviceFault) -> None:
        self.switches[OcsId(switch)].model.inject(fault)

    # --- observations

    def up(self, lit: bool = False) -> frozenset[PortPair]:
        """Return the cross-connects on the devices, or only tuned ones if `lit`. Raises if one direction is missing."""
        found: set[PortPair] = set()
        for id, switch in self.switches.items():
            facts = switch.model.facts
            circuits = switch.model.circuits()
            shown = {each.cross_connect for each in circuits if not lit or each.state is CircuitState.TUNED}
            for pair in shown:
                whole = self._of_site(id, pair)
                is_whole = set(device_pairs(facts, whole)) <= shown
                assert is_whole or lit, f"half of {whole}"
                if is_whole:
                    found.add(whole)
        return frozenset(found)

    def all_up(self) -> frozenset[PortPair]:
        """Return the cross-connects on the devices, one-way ones included."""
        return frozenset(
            self._of_site(id, circuit.cross_connect)
            for id, switch in self.switches.items()
            for circuit in switch.model.circuits()
        )

    def switches_glass(self, switch: str) -> VirtualGlass:
        return self.switches[OcsId(switch)].model

    def pairs(self) -> set[Pair]:
        """Return the pairs that light can pass between now."""
        ends = {self.coordinator.site.cabling.ends(each) for each in self.up(lit=True)}
        return {pair for pair in ends if pair is not None}

    def _of_site(self, id: OcsId, pair: CrossConnect) -> PortPair:
        facts = self.switches[id].model.facts
        offset = 0 if facts.connectivity is Connectivity.ANY_TO_ANY else len(facts.ingress_ports)
        one, other = sorted((pair.ingress_port, pair.egress_port - offset))
        return PortPair(id, one, other)

    def written(self, *kinds: EntryKind) -> list[Mapping[str, Any]]:
        return [entry.body for entry in self.journal.tail(1000, kinds)]

    def _materialise(self, intent: Intent, state: FabricState) -> FabricPlan | Hold:
        plan = materialize(self.site, intent, state)
        if isinstance(plan, FabricPlan):
            self.plans.append((state, plan))
        return plan

    def _note_commands(self, id: OcsId, switch: VirtualSwitch) -> None:
        """Record the instant of each commit, with the window and period at that time."""
        really = switch.commit

        async def commit(diff: Any, expect_revision: int) -> Any:
            now = self.coordinator._circuits.by
            window = None
            if now is not None and now.intent.stage is Stage.TRAIN:
                window = self.hub.window({now.intent.job: now.intent.ranks})
                if isinstance(window, Window) and not window.opened_s <= self.clock.now_s() < window.until_s:
                    window = Hold("window_closed", str(window))
            if expect_revision == diff.revision:  # otherwise a change that had begun is completed
                trains = now is not None and now.intent.stage is Stage.TRAIN
                self.sent.append(Sent(self.clock.now_s(), id, window, trains))
            return await really(diff, expect_revision)

        switch.commit = commit  # type: ignore[method-assign]


async def _never(diff: Any, expect_revision: int) -> Any:
    raise Killed


@asynccontextmanager
async def harness(folder: Path, **more: Any) -> AsyncIterator[Harness]:
    made = Harness(folder, read_site(SITE), **more)
    made.start()
    try:
        yield made
    finally:
        await made.stop()
