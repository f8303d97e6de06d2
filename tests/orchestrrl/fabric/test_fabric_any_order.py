"""Announcements, windows, faults, operator overrides and restarts in random order, with invariants checked throughout.

No port is used twice. No circuit stays half up. Every pair that goes dark is reported. Every commit is feasible. No
training commit begins outside a window of that time. Each period ends exactly once."""

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from fabric_harness import ACROSS_RAILS, GEN, OVER_CORE, SYNC, Harness, harness, train
from hypothesis import example, given
from hypothesis import strategies as st

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import Connectivity
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.fabric.period_queue import AnnouncedPeriod
from orchestrrl.fabric.periods import PeriodState
from planner.fabric.intent import Intent
from planner.fabric.materialize import validate
from planner.fabric.model import Pair
from planner.fabric.windows import Window
from planner.model import Mode

INTENTS = {
    "core": OVER_CORE,
    "rails": ACROSS_RAILS,
    "pod": train("pod", range(8)),
    "gen": GEN,
    "sync": SYNC,
}
SWITCHES = ["train0/agg0", "train1/agg0", "gen0/agg0", "gen1/agg0", "core0"]
MASKS = ["port core0:1", "port train0/agg0:2", "switch train1/agg0", "circuit core0:2-6", "nic train0/s0:1"]
PINS = ["core0:1-5", "core0:2-6", "train0/agg0:1-5", "gen0/agg0:2-6"]
FAULTS = [
    DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1),
    DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=0, silent=True),
    DeviceFault(DeviceFaultKind.DROP_CONNECTION),
    DeviceFault(DeviceFaultKind.DROP_COMMAND),
    DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=0.2),
    DeviceFault(DeviceFaultKind.RESTART),
]

_switch = st.sampled_from(SWITCHES)
_port = st.integers(1, 12)
_period = st.tuples(st.just("comes about"), st.sampled_from(sorted(INTENTS)), st.sampled_from([0.01, 0.1, 0.5]))
ACTS = st.one_of(
    _period,
    _period,
    _period,
    _period,
    st.tuples(st.just("announce"), st.sampled_from(sorted(INTENTS)), st.booleans()),
    st.tuples(st.just("announce"), st.sampled_from(["core", "rails"]), st.just(False)),
    st.tuples(st.just("quiet"), st.sampled_from([0.01, 0.06, 0.2, 5.0]), st.integers(0, 1)),
    st.tuples(st.just("all quiet"), st.sampled_from([0.06, 0.2, 5.0]), st.none()),
    st.tuples(st.just("busy"), st.integers(0, 1), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.02, 0.1, 1.0]), st.none()),
    st.tuples(st.just("fault"), _switch, st.sampled_from(FAULTS)),
    st.tuples(st.just("stick"), _switch, _port),
    st.tuples(st.just("fail port"), _switch, _port),
    st.tuples(st.just("mend port"), _switch, _port),
    st.tuples(st.just("mask"), st.sets(st.sampled_from(MASKS), max_size=2), st.none()),
    st.tuples(st.just("pin"), st.sets(st.sampled_from(PINS), max_size=2), st.none()),
    st.tuples(st.just("override"), st.sampled_from(sorted(INTENTS)), st.none()),
    st.tuples(st.just("release"), st.none(), st.none()),
    st.tuples(st.just("pause"), st.sampled_from([PauseScope.FABRIC, PauseScope.SYNC]), st.none()),
    st.tuples(st.just("resume"), st.sampled_from([PauseScope.FABRIC, PauseScope.SYNC]), st.none()),
    st.tuples(st.just("mode"), st.sampled_from(Mode), st.none()),
    st.tuples(st.just("withdraw"), st.none(), st.none()),
    st.tuples(st.just("kill"), st.none(), st.none()),
)
Act = tuple[str, object, object]


@dataclass
class Life:
    """Performs drawn actions and checks invariants after each."""

    site: Harness
    announced: list[AnnouncedPeriod] = field(default_factory=list)
    broken: bool = False  # pairs that lost light by a fault, not by the coordinator

    async def do(self, act: Act) -> None:
        site, (name, one, other) = self.site, act
        match name:
            case "announce":
                self._announce(INTENTS[str(one)], bool(other))
            case "comes about":
                intent = INTENTS[str(one)]
                self._announce(intent, intent in (GEN, SYNC))
                for agent in site.agents:
                    agent.quiet(1.0)
                await self.pass_time(float(str(other)))
            case "quiet":
                site.agents[int(str(other))].quiet(float(str(one)))
            case "all quiet":
                for agent in site.agents:
                    agent.quiet(float(str(one)))
                await self.pass_time(0.02)
            case "busy":
                site.agents[int(str(one))].busy()
            case "wait":
                await self.pass_time(float(str(one)))
            case "fault" | "stick" | "fail port" | "mend port":
                self._break(name, str(one), other)
            case "mask":
                assert isinstance(one, set)
                site.coordinator.mask(sorted(one), "")
            case "pin":
                assert isinstance(one, set)
                site.overrides.pin(sorted(one), "", 0.0)
            case "override":
                intent = INTENTS[str(one)]
                if site.coordinator._book.get(intent.period, intent.job) is not None:
                    site.coordinator.override(intent.period, "", 0.0)
            case "release":
                site.overrides.release("")
            case "pause":
                site.pause_registry.pause(PauseScope(str(one)), "")
            case "resume":
                site.pause_registry.resume(PauseScope(str(one)), "")
            case "mode":
                site.mode = Mode(str(one))
            case "withdraw":
                if self.announced:
                    site.coordinator.withdraw(self.announced[-1], "the caller continues")
            case "kill":
                await self._kill()

    def _announce(self, intent: Intent, boundary: bool) -> None:
        self.announced.append(self.site.coordinator.expect(intent, boundary=boundary))

    def _break(self, name: str, switch: str, what: object) -> None:
        self.broken = True
        if isinstance(what, DeviceFault):
            return self.site.fail(switch, what)
        kinds = {
            "stick": DeviceFaultKind.STICK_MIRROR,
            "fail port": DeviceFaultKind.FAIL_PORT,
            "mend port": DeviceFaultKind.MEND_PORT,
        }
        return self.site.fail(switch, DeviceFault(kinds[name], int(str(what))))

    async def _kill(self) -> None:
        self.broken = True
        self.check_ends()
        self.announced.clear()  # periods under way are lost with their daemon
        await self.site.kill()
        self.site.start()

    async def pass_time(self, duration_s: float) -> None:
        for _ in range(max(1, round(duration_s / 0.005))):
            before = self.site.pairs()
            await self.site.pass_time(min(0.005, duration_s))
            self.look(before)

    def look(self, before: set[Pair]) -> None:
        ports = Counter((each.switch, port) for each in self.site.all_up() for port in each.ports)
        assert max(ports.values(), default=0) <= 1, ports
        now = self.site.coordinator.active
        if not self.broken:
            notes = "".join("".join(report.notes) for report in self.site.coordinator.reports(3))
            for one, other in before - self.site.pairs():
                # Briefly dark, as reported, or no longer wanted.
                wanted = {
                    self.site.coordinator.site.cabling.ends(each) for each in self.site.plans[-1][1].cross_connects
                }
                assert f"{one} - {other}" in notes or (one, other) not in wanted, (one, other, notes, now)

    def check_ends(self) -> None:
        """Check that each period has ended at most once."""
        ids = Counter(report.id for report in self.site.coordinator.reports(1000))
        assert all(ids[period.report.id] == 1 for period in self.announced)

    def check_sent(self) -> None:
        for sent in self.site.sent:
            assert sent.window is None or isinstance(sent.window, Window), sent

    async def settle(self) -> None:
        """Repair all faults: open changes are completed, and the next period gets its circuits."""
        for switch in SWITCHES:
            for port in range(1, 33):
                self.site.fail(switch, DeviceFault(DeviceFaultKind.MEND_PORT, port))
            self.site.switches_glass(switch)._next_setter.clear()
        self.site.mode = Mode.ACT
        for part in PauseScope:
            self.site.pause_registry.resume(part, "")
        self.site.overrides.release("")
        self.site.overrides.mask([], "")
        for agent in self.site.agents:
            agent.busy()
        await self.site.pass_time(90.0)  # deadlines, and ports avoided for a while


async def lived(acts: list[Act], moves: int, connectivity: Connectivity) -> None:
    settings = {"max_moves_per_stage": moves, "within_s": 1.0, "boundary_within_s": 3.0}
    with tempfile.TemporaryDirectory() as folder:
        async with harness(Path(folder), connectivity=connectivity, **settings) as site:
            site.agent("n0", range(8), ahead_s=3.0, way_s=0.0005)
            site.agent("n1", range(8, 16))
            for agent in site.agents:
                agent.busy()
            await site.pass_time(0.2)
            life = Life(site)
            for act in acts:
                await life.do(act)
            await life.pass_time(0.05)
            life.check_sent()
            await life.settle()
            for period in life.announced:
                assert period.report.over, period.report
            life.check_ends()
            assert site.circuits.open == ()
            for intent in (GEN, OVER_CORE):
                report = await (site.at_boundary(intent) if intent is GEN else site.in_window(intent))
                assert report.state is PeriodState.COMMITTED, report
                state, plan = site.plans[-1]
                assert plan.cross_connects <= site.up()
                faults = validate(site.site, replace(state, current=site.up()), plan.cross_connects)
                assert faults == ()
            life.check_sent()


@example(
    [("announce", "core", False), ("all quiet", 5.0, None), ("wait", 0.0, None), ("kill", None, None)],
    4,
    Connectivity.ANY_TO_ANY,
)
@given(
    acts=st.lists(ACTS, min_size=3, max_size=16),
    moves=st.sampled_from([2, 6, 1024]),
    connectivity=st.sampled_from(Connectivity),
)
def test_invariants_hold_in_any_order(acts: list[Act], moves: int, connectivity: Connectivity) -> None:
    asyncio.run(lived(acts, moves, connectivity))
