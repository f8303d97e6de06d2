"""For every kind of entry, any legal values that its writer writes are read back, by recovery and by every view."""

import asyncio
import dataclasses
import functools
import json
import tempfile
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from builders import engine_report, gateway_report
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from balancer.balance import BalanceDecision
from ocs_drivers.model import ChangeMode, CircuitDiff, CrossConnect
from orchestrrl.cli.fleet.status import summary
from orchestrrl.cli.journal import entry_of, entry_text
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal import store as journal_module
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES, REDEPLOYMENTS
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.journal.values import FAULTS_NAMED, body_faults
from orchestrrl.core.nodes import NodeHello, NodeKind
from orchestrrl.core.operation import OperationRun, StepDirection, StepReport
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import Action, Operation, OperationResult
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.plan_book import PlanBook
from orchestrrl.daemon.planning import StepLengths
from orchestrrl.daemon.wiring import Daemon, build_daemon
from orchestrrl.fabric.circuit_change import CircuitOperation, CircuitOutcome
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.circuit_owners import CircuitOwners
from orchestrrl.fabric.operator_overrides import _CONTROL, _constraints_in
from orchestrrl.fabric.packet_routing import FabricRouting, _recorded_in
from orchestrrl.fabric.period_book import PeriodBook
from orchestrrl.fabric.periods import FabricControl, PeriodReport
from orchestrrl.fleet.membership_changes import Membership, recovered_roster
from orchestrrl.fleet.pause_lease import LEASE, PAUSE_STATE, PauseLease, PauseState
from orchestrrl.fleet.pause_operation import FleetPause
from orchestrrl.fleet.redeployment.book import (
    RecordedFleet,
    RedeploymentBook,
    RedeploymentOutcome,
    read_fleet,
    read_history,
    read_open,
    write_end,
)
from orchestrrl.fleet.redeployment.run import RedeploymentRun
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentReport,
    RedeployStep,
)
from orchestrrl.fleet.reports import EngineFailovers, EngineReport
from orchestrrl.fleet.state import EngineFacts
from orchestrrl.rpc.codecs.control import ENTRY, PLAN, redeployment_to_pb, status_to_pb
from orchestrrl.rpc.codecs.fabric import CONTROL, PERIOD
from orchestrrl.rpc.codecs.weights import report_to_pb as sync_to_pb
from orchestrrl.rpc.pb import control_pb2
from orchestrrl.rpc.plain_values import plain
from orchestrrl.weights.controller.reports import SyncReport
from orchestrrl.weights.controller.run import SyncRun, SyncStep
from orchestrrl.weights.controller.state import CommittedVersion, SyncAttempt, SyncRecord, WeightBook
from orchestrrl.weights.controller.state import FleetWeights as WeightFleet
from planner.admission import OperatorControl
from planner.calibration import Calibration
from planner.fabric.intent import Intent, Stage
from planner.fabric.model import OcsId, PortPair
from planner.model import FinishedLength, Mode, NodeId, Plan

NOW_S = 1_000_000.0
TEXTS = st.text(max_size=6) | st.sampled_from(["", "e0", "\x00\x1b[2J\n", "Ω" * 200, "\U0001f600", '"}', "\u2028"])
VERSIONS = st.integers(0, 10) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
COUNTS = st.integers(0, 2**31 - 1)
SECONDS = st.floats(-1e9, 1e12, allow_nan=False)


@functools.cache
def values(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Draw a legal value of a type; a dataclass's own checks decide."""
    kind = getattr(kind, "__supertype__", kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(each, name) for each in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0], name), max_size=1).map(tuple)
        return st.tuples(*(values(each, name) for each in arguments))
    if origin is frozenset:
        return st.frozensets(values(arguments[0], name), max_size=2)
    if origin in (dict, Mapping):
        return st.dictionaries(values(arguments[0], name), values(arguments[1], name), max_size=2)
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return VERSIONS if "version" in name or name == "newest" else COUNTS
    if kind is float:
        return SECONDS
    if kind is str:
        return TEXTS
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    hints = typing.get_type_hints(origin or kind)
    bound = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=True))  # of a generic dataclass
    hints = {field: bound.get(hint, hint) for field, hint in hints.items()}
    fields = {
        each.name: values(hints[each.name], each.name) for each in dataclasses.fields(origin or kind) if each.init
    }

    def make(given: tuple[Any, ...]) -> Any:
        try:
            return (origin or kind)(**dict(zip(fields, given, strict=True)))
        except ValueError:
            return None

    return st.tuples(*fields.values()).map(make).filter(lambda value: value is not None)


class Shelf:
    """A journal that is written by one daemon and read by the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.sqlite"
        self.clock = VirtualClock(NOW_S)
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.path, NOW_S)

    def again(self) -> Journal:
        self.journal.close()
        self.open()
        assert not self.journal.damage
        return self.journal

    def daemon(self) -> Daemon:
        return build_daemon(parse_config("mode: act\n"), self.journal, self.clock)

    def plane(self) -> ControlPlane:
        return self.daemon().control_plane


Drawn = Callable[[Any], Any]


def _plane(act: Callable[[ControlPlane, Drawn], None]) -> Callable[[Shelf, Drawn], None]:
    return lambda shelf, draw: act(shelf.plane(), draw)


def _mode(plane: ControlPlane, draw: Drawn) -> None:
    reason = draw(TEXTS)
    plane.mode.set(Mode.ADVISE, reason)
    plane.journal.close()
    again = build_daemon(plane.config, Journal(plane.journal.path, NOW_S), plane.clock).control_plane
    assert (again.mode.current, again.mode.reason) == (Mode.ADVISE, reason)
    again.journal.close()
    plane.journal.__init__(plane.journal.path, NOW_S)  # type: ignore[misc]


def _damage(shelf: Shelf, draw: Drawn) -> None:
    shelf.journal.damage = (draw(TEXTS),)
    shelf.journal.confirm_damage(NOW_S, draw(TEXTS))
    body = {"faults": [draw(TEXTS)], "kept_as": draw(TEXTS), "entries_kept": 3}
    shelf.journal.append(NOW_S, EntryKind.JOURNAL_DAMAGED, "", body)
    assert not shelf.journal.damage
    shelf.journal.close()
    shelf.open()
    assert shelf.journal.damage[0] == body["faults"][0]
    shelf.journal.confirm_damage(NOW_S, "")


def _node(plane: ControlPlane, draw: Drawn) -> None:
    plane.fleet.detach(plane.fleet.attach(draw(values(NodeHello))))


def _health(plane: ControlPlane, draw: Drawn) -> None:
    plane.fleet.engine_reported(dataclasses.replace(draw(values(EngineReport)), sample=None, capabilities=None), 1)


def _failovers(plane: ControlPlane, draw: Drawn) -> None:
    report = gateway_report(failovers=(draw(values(EngineFailovers)),))
    plane.fleet.gateway_reported(dataclasses.replace(report, gateway=draw(values(NodeId))), 1)


def _remarks(plane: ControlPlane, draw: Drawn) -> None:
    """Set up one server under two names, and two nodes with one id."""
    engine, other, node = draw(st.tuples(TEXTS, TEXTS, TEXTS).filter(lambda names: names[0] != names[1]))
    for agent, name in (("one", engine), ("two", other)):
        report = dataclasses.replace(engine_report(name, agent=agent), url="http://10.0.0.1:8000")
        plane.fleet.engine_reported(report, 1 if agent == "one" else 2)
    hello = NodeHello(NodeId(node), NodeKind.AGENT, (), "test")
    for incarnation in ("p", "q"):
        plane.fleet.attach(dataclasses.replace(hello, incarnation=incarnation))
    plane.fast_tick()


def _reload(plane: ControlPlane, draw: Drawn) -> None:
    plane.reconfigure(plane.config)


def _stopped(plane: ControlPlane, draw: Drawn) -> None:
    asyncio.run(plane.fleet.close(0.0))


def _engines(shelf: Shelf, draw: Drawn) -> None:
    facts = draw(values(EngineFacts))
    membership = (
        Membership().with_added(facts).with_drained(draw(TEXTS), move=draw(st.booleans())).with_removed(draw(TEXTS))
    )
    membership_changes = shelf.plane().fleet.membership_changes
    membership_changes._change("added", facts.id, membership, draw(TEXTS))
    assert recovered_roster(shelf.again()) == membership


def _step_ended(shelf: Shelf, draw: Drawn) -> None:
    lengths = StepLengths(64, 4096)
    finished = draw(st.lists(st.builds(FinishedLength, st.integers(0, 5000), st.booleans(), TEXTS), max_size=5))
    body = lengths.step_ended(finished)
    written = list(lengths._waiting)
    shelf.plane().fleet.note(EntryKind.STEP_ENDED, "", {"started_s": 1.0, "ended_s": 2.0, "lengths": body})
    again = StepLengths(64, 4096)
    again.recover(shelf.again())
    assert list(again._waiting) == written


def _plans(shelf: Shelf, draw: Drawn) -> None:
    plan = dataclasses.replace(
        draw(values(Plan)), created_s=NOW_S, actual_makespan_s=None, acted=False, acted_detail=""
    )
    outcome = draw(values(RedeploymentOutcome))
    book = PlanBook(shelf.journal, shelf.clock)
    book.add(plan, "digest")
    book.acted(plan.id, draw(st.booleans()), draw(TEXTS))
    book.deployment_ended(plan.id, outcome)
    step: Any = types.SimpleNamespace(started_s=NOW_S - 1.0, ended_s=NOW_S + draw(st.floats(0, 1e6)))
    book.step_ended(step)
    book.calibration = draw(st.just(Calibration()) | st.builds(Calibration, COUNTS, SECONDS, SECONDS))
    shelf.journal.append(NOW_S, EntryKind.PLAN_CALIBRATION, "", dataclasses.asdict(book.calibration))
    again = PlanBook(shelf.again(), shelf.clock)
    again.recover()
    assert again.newest(0) == book.newest(0)
    assert (again.calibration, again.last_redeploy_s) == (book.calibration, book.last_redeploy_s)
    PLAN.to_pb(again.newest(0)[0]).SerializeToString()


def _plan_control(shelf: Shelf, draw: Drawn) -> None:
    control = draw(values(OperatorControl))
    book = PlanBook(shelf.journal, shelf.clock)
    book._set(control)
    again = PlanBook(shelf.again(), shelf.clock)
    again.recover()
    assert again._control == control


def _redeployments(shelf: Shelf, draw: Drawn) -> None:
    redeployment, report = draw(values(Redeployment)), draw(values(RedeploymentReport))
    log = OperationJournal(shelf.journal, shelf.clock, REDEPLOYMENTS)
    run: Any = object.__new__(RedeploymentRun)
    run.acts, run._has_written_reference = types.SimpleNamespace(redeployment=redeployment), False
    step = dataclasses.replace(draw(values(StepReport[RedeployStep])), direction=StepDirection.BACK)
    log.begin(redeployment.id, run.intent())
    operation: Any = object.__new__(OperationRun)
    operation._description, operation._log, operation._changed = run, log, lambda: None
    operation._reports, operation.records, operation.attempt = {}, [], 1
    operation._write(step)
    opened = read_open(shelf.again())
    assert opened is not None
    assert opened.intent == redeployment
    assert [entry.body["detail"] for entry in opened.steps] == [step.detail]
    fleet = RecordedFleet(redeployment.old, redeployment.new)
    write_end(OperationJournal(shelf.journal, shelf.clock, REDEPLOYMENTS), report, fleet)
    journal = shelf.again()
    assert read_fleet(journal) == fleet
    assert read_history(journal) == {report.id: report}
    redeployment_to_pb(report).SerializeToString()


def _engine_ends(shelf: Shelf, draw: Drawn) -> None:
    book = RedeploymentBook(shelf.journal, shelf.clock, lambda: None)
    book.note_stopped(draw(TEXTS), done=draw(st.booleans()), detail=draw(TEXTS))
    body = {"done": True, "detail": draw(TEXTS), "configuration": draw(TEXTS), "gpus": [0]}
    shelf.journal.append(NOW_S, EntryKind.ENGINE_STARTED, "e", {**body, "elapsed_s": draw(SECONDS), "expected_s": 1.0})
    shelf.journal.append(NOW_S, EntryKind.ENGINE_STARTED, "e", {"done": False, "detail": draw(TEXTS)})


def _refitted(plane: ControlPlane, draw: Drawn) -> None:
    plane.planning.costs._note(draw(TEXTS), {"figure": draw(TEXTS), "value": draw(SECONDS), "seconds": [draw(SECONDS)]})


def _balance(plane: ControlPlane, draw: Drawn) -> None:
    plane._note_balance(draw(values(BalanceDecision)), plane.fleet.state.snapshot(NOW_S))


def _barrier(shelf: Shelf, draw: Drawn) -> None:
    state = dataclasses.replace(draw(values(PauseState)), lease=None, quiet=False)
    lease = draw(values(PauseLease))
    for each in (state, dataclasses.replace(state, lease=dataclasses.replace(lease, until_s=2e12))):
        plane = shelf.plane()
        plane.fleet.barrier._take(each, "event", draw(TEXTS))
        shelf.again()
        found = shelf.journal.newest(EntryKind.BARRIER, lambda body: PAUSE_STATE.validate_python(body["state"]))
        assert found == each


def _fleet_pauses(shelf: Shelf, draw: Drawn) -> None:
    lease = draw(values(PauseLease))
    barrier = shelf.plane().fleet.barrier
    barrier._log.begin(lease.id, FleetPause(lease, barrier, barrier._log, shelf.clock).intent())
    barrier._log.step(lease.id, {"number": 1, "direction": "forward", "state": "failed", **STEP_TIMES})
    shelf.again()
    barrier = shelf.plane().fleet.barrier
    (left,) = barrier._log.left_open(lambda entry: LEASE.validate_python(entry.body["lease"]))
    assert left.intent == lease
    asyncio.run(barrier.settle())
    assert not barrier._log.left_open(lambda entry: entry.body)


STEP_TIMES = {"attempt": 1, "detail": "", "began_s": 1.0, "elapsed_s": 0.0}


def _routes(shelf: Shelf, draw: Drawn) -> None:
    plane = shelf.plane()
    urls = draw(st.dictionaries(TEXTS, TEXTS, max_size=3))
    expected = {draw(TEXTS): NOW_S + draw(st.floats(1, 1e9))}
    for engine, url in urls.items():
        plane.fleet.state.remember_engine(engine, url, NOW_S)
    plane.fleet.routes.expected.update(expected)
    plane.fleet.routes.send(plane.fleet.state.engines(NOW_S))
    shelf.again()
    again = shelf.plane()
    assert again.fleet.routes.expected == expected
    assert {engine.id: engine.url for engine in again.fleet.state.engines(NOW_S)} == urls


class _Silent:
    def send(self, node: str, operation: Operation) -> None:
        if node == "away":
            raise Retryable("is not attached", 1.0)


def _operations(shelf: Shelf, draw: Drawn) -> None:
    action, node = draw(values(Action)), draw(TEXTS)
    result = draw(values(OperationResult))
    runner = OperationRunner(shelf.journal, _Silent(), shelf.clock, lambda *_: None)

    async def ask() -> None:
        task = asyncio.create_task(runner.run(node, action, 60.0))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(ask())
    sent = [opened.order for opened in runner.open]
    again = OperationRunner(shelf.again(), _Silent(), shelf.clock, lambda *_: None)
    assert again.recover() == len(sent)
    assert [opened.order for opened in again.open] == sent
    for opened in again.open:
        again._close(opened, dataclasses.replace(result, operation=opened.order.id))
    assert shelf.journal.open_operations() == []


def _circuits(shelf: Shelf, draw: Drawn) -> None:
    pairs = st.builds(CrossConnect, st.integers(1, 500), st.integers(501, 999))
    before, remove, add = (tuple(sorted(draw(st.sets(pairs, max_size=3)))) for _ in range(3))
    diff = CircuitDiff(draw(st.sampled_from(ChangeMode)), draw(COUNTS), frozenset(before), remove, add, remove[:1])
    operation = CircuitOperation(draw(TEXTS), draw(TEXTS), diff, draw(SECONDS), draw(st.none() | SECONDS))
    executor = CircuitExecutor({}, shelf.journal, shelf.clock)
    executor._run_of(operation).begin()
    again = CircuitExecutor({}, shelf.again(), shelf.clock)
    assert again.recover() == 1
    assert again.open == (operation,)
    again._close(dataclasses.replace(draw(values(CircuitOutcome)), operation=operation.id))
    assert shelf.journal.open_operations(CIRCUIT_CHANGES) == []
    owners = CircuitOwners({}, shelf.journal, shelf.clock)
    owners.ended(operation.switch, (), [*add, CrossConnect(1, 999)])
    recovered = CircuitOwners({}, shelf.again(), shelf.clock)
    assert recovered.owned(operation.switch) == owners.owned(operation.switch)


def _periods(shelf: Shelf, draw: Drawn) -> None:
    intent = Intent(draw(TEXTS.filter(bool)), draw(st.sampled_from(Stage)), (), {0: 1}, draw(st.text(max_size=5)))
    report = draw(values(PeriodReport))
    book = PeriodBook(shelf.journal)
    book.record(intent, NOW_S)
    book.ended(report, NOW_S)
    again = PeriodBook(shelf.again())
    assert again.intent(intent.period, intent.job) == intent
    assert list(again.over) == [report]
    PERIOD.to_pb(report).SerializeToString()


def _fabric_control(shelf: Shelf, draw: Drawn) -> None:
    control, masked = draw(values(FabricControl)), draw(st.lists(TEXTS, max_size=3))
    body = {"control": _CONTROL.dump_python(control, mode="json"), "masked": masked, "reason": draw(TEXTS)}
    shelf.journal.append(NOW_S, EntryKind.FABRIC_CONTROL, control.state, body)
    assert shelf.again().newest(EntryKind.FABRIC_CONTROL, _constraints_in) == (control, tuple(masked))
    CONTROL.to_pb(control).SerializeToString()


def _rerouted(shelf: Shelf, draw: Drawn) -> None:
    routing: Any = object.__new__(FabricRouting)
    pairs = frozenset(draw(st.lists(st.builds(PortPair, TEXTS.map(OcsId), st.integers(1, 9), st.integers(10, 99)))))
    over: Any = types.SimpleNamespace(over=pairs)
    routing._lit, routing._is_changing, routing._recorded = (over,), False, None
    routing._journal, routing._clock = shelf.journal, shelf.clock
    routing._write_down()
    assert shelf.again().newest(EntryKind.REROUTED, _recorded_in) == pairs


def _holds(shelf: Shelf, draw: Drawn) -> None:
    book = PauseRegistry(shelf.journal, shelf.clock)
    book.pause(draw(st.sampled_from(PauseScope)), draw(TEXTS), draw(st.just(0.0) | st.floats(1, 1e9)))
    assert PauseRegistry(shelf.again(), shelf.clock).pauses == book.pauses


def _syncs(shelf: Shelf, draw: Drawn) -> None:
    report, committed = draw(values(SyncReport)), draw(values(CommittedVersion))
    spoilt, engines = draw(st.dictionaries(TEXTS, TEXTS, max_size=2)), draw(st.lists(TEXTS, max_size=2))
    book = WeightBook(shelf.journal, shelf.clock)
    book.began(report)
    run: Any = object.__new__(SyncRun)
    run.sync_record, run._attempt = SyncRecord(report, shelf.clock), SyncAttempt(targets=engines)
    operation: Any = object.__new__(OperationRun)
    operation._description, operation._log, operation._changed = run, book.log, lambda: None
    operation._reports, operation.records, operation.attempt = {}, [], 2
    step = dataclasses.replace(draw(values(StepReport[SyncStep])), step=SyncStep.INSTALL)
    operation._write(step)
    for engine in engines:
        book.repairs(report.id, engine)
    book.stands(WeightFleet(committed, spoilt))
    again = WeightBook(shelf.again(), shelf.clock)
    (left,) = again.recover()
    assert left.intent == report
    (entry,) = left.steps
    assert (entry.body["step"], entry.body["attempt"], entry.body["state"]) == ("install", 2, step.state)
    assert entry.body["engines"] == sorted(set(engines))
    assert again.fleet == WeightFleet(committed, spoilt)
    again.ended(SyncRecord(report, shelf.clock))
    last = WeightBook(shelf.again(), shelf.clock)
    assert last.recover() == []
    assert list(last.over) == [report]
    sync_to_pb(report).SerializeToString()


WRITERS: dict[tuple[EntryKind, ...], Callable[[Shelf, Drawn], None]] = {
    (EntryKind.DAEMON_STARTED, EntryKind.CONFIG_RELOADED): _plane(_reload),
    (EntryKind.DAEMON_STOPPED,): _plane(_stopped),
    (EntryKind.MODE,): _plane(_mode),
    (EntryKind.JOURNAL_DAMAGED, EntryKind.JOURNAL_CONFIRMED): _damage,
    (EntryKind.NODE_ATTACHED, EntryKind.NODE_DETACHED): _plane(_node),
    (EntryKind.ENGINE_HEALTH,): _plane(_health),
    (EntryKind.ENGINE_FAILOVERS,): _plane(_failovers),
    (EntryKind.ENGINE_REMARKS, EntryKind.NODE_DOUBLE): _plane(_remarks),
    (EntryKind.ENGINES,): _engines,
    (EntryKind.STEP_ENDED,): _step_ended,
    (
        EntryKind.PLAN,
        EntryKind.PLAN_ACTED,
        EntryKind.PLAN_ACTUAL,
        EntryKind.PLAN_CALIBRATION,
        EntryKind.DEPLOYMENT_ENDED,
    ): _plans,
    (EntryKind.PLAN_CONTROL,): _plan_control,
    (EntryKind.REDEPLOYMENT_BEGAN, EntryKind.REDEPLOYMENT_STEP, EntryKind.REDEPLOYMENT_ENDED): _redeployments,
    (EntryKind.ENGINE_STARTED, EntryKind.ENGINE_STOPPED): _engine_ends,
    (EntryKind.PROFILE_REFITTED,): _plane(_refitted),
    (EntryKind.BALANCE,): _plane(_balance),
    (EntryKind.BARRIER,): _barrier,
    (EntryKind.PAUSE_BEGAN, EntryKind.PAUSE_STEP, EntryKind.PAUSE_ENDED): _fleet_pauses,
    (EntryKind.ROUTES,): _routes,
    (EntryKind.OPERATION_INTENT, EntryKind.OPERATION_SENT, EntryKind.OPERATION_RESULT): _operations,
    (EntryKind.CIRCUITS_INTENT, EntryKind.CIRCUITS_RESULT, EntryKind.CIRCUITS_OWNED): _circuits,
    (EntryKind.PERIOD_INTENT, EntryKind.PERIOD): _periods,
    (EntryKind.FABRIC_CONTROL,): _fabric_control,
    (EntryKind.REROUTED,): _rerouted,
    (EntryKind.PAUSES,): _holds,
    (EntryKind.SYNC_BEGAN, EntryKind.SYNC_STEP, EntryKind.SYNC_ENDED, EntryKind.WEIGHTS): _syncs,
}
# The daemon was killed before the results: those belong to a later generation.


def test_every_kind_has_a_writer() -> None:
    assert {kind for kinds in WRITERS for kind in kinds} == set(EntryKind)


@pytest.mark.parametrize("kinds", WRITERS, ids=lambda kinds: kinds[0])
@settings(
    max_examples=8,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_written_entries_are_read_back_and_shown(kinds: tuple[EntryKind, ...], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(Path(folder))
        try:
            WRITERS[kinds](shelf, data.draw)
            written = shelf.again().since(0)
            assert set(kinds) <= {entry.kind for entry in written}
            assert not shelf.journal.set_aside
            for entry in written:
                message = control_pb2.JournalEntry.FromString(ENTRY.to_pb(entry).SerializeToString())
                shown = entry_of(message)
                assert (shown["body"], shown["subject_id"]) == (entry.body, entry.subject)
                entry_text(shown).encode()
            parts = shelf.daemon()
            plain(status_to_pb(parts, "test"))
            assert summary(plain(status_to_pb(parts, "test")))
            assert not shelf.journal.set_aside
        finally:
            shelf.journal.close()


# --- Checks before writing


def nested(depth: int) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for _ in range(depth):
        body = {"a": body}
    return body


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"version": 2**64}, r"body.version: must be from -2\*\*63 to 2\*\*64 - 1, got 18446744073709551616"),
        ({"a": [{"b": -(2**63) - 1}]}, r"body.a\[0\].b: must be from"),
        ({"a": float("nan")}, "body.a: must be a finite number, got nan"),
        ({"a": [1.0, float("-inf")]}, r"body.a\[1\]: must be a finite number, got -inf"),
        ({"a": "\ud800"}, "body.a: must be Unicode without lone surrogates"),
        ({"\udfff": 1}, "body: must have texts as keys"),
        ({1: 2}, "body: must have texts as keys, got '1'"),
        ({"a": {None: 2}}, "body.a: must have texts as keys, got 'None'"),
        ({"a": b"bytes"}, "body.a: must be a value of JSON, got b'bytes'"),
        ({"a": {1, 2}}, "body.a: must be a value of JSON"),
        (nested(100), "must not be nested more than"),
        ([1, 2], "body: must be an object"),
    ],
)
def test_entry_that_cannot_be_read_back_is_refused(tmp_path: Path, body: Any, fault: str) -> None:
    with Journal(tmp_path / "journal.sqlite", NOW_S) as journal:
        with pytest.raises(Permanent, match=fault):
            journal.append(NOW_S, EntryKind.MODE, "", body)
        assert journal.since(0) == []
        assert journal.append(NOW_S, EntryKind.MODE, "", {}) == 1


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), 1e300, -1e300])
def test_invalid_time_is_refused(tmp_path: Path, at_s: float) -> None:
    with Journal(tmp_path / "journal.sqlite", NOW_S) as journal:
        with pytest.raises(Permanent, match="at_s: must be a time"):
            journal.append(at_s, EntryKind.MODE, "", {})
        with pytest.raises(Permanent, match="subject: must be Unicode"):
            journal.append(NOW_S, EntryKind.MODE, "\ud800", {})


BODIES = st.dictionaries(
    st.text(max_size=5) | st.sampled_from(["\ud800", ""]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats()
        | st.text(st.characters(), max_size=5)
        | st.sampled_from(["\ud800", b"x", 2**64, -0.0]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(at_s=st.floats(), subject=st.text(st.characters(), max_size=5) | st.just("\udc80"), body=BODIES)
@settings(phases=[Phase.generate])
def test_any_body_is_refused_or_read_back_unchanged(at_s: float, subject: str, body: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        with Journal(path, NOW_S) as journal:
            refused = ""
            try:
                journal.append(at_s, EntryKind.BALANCE, subject, body)
            except Permanent as error:
                refused = str(error).partition("cannot be written: ")[2]
                assert refused, "it says why"
        if refused:
            return
        with Journal(path, NOW_S) as journal:
            assert not journal.damage
            (entry,) = journal.since(0)
            assert (entry.at_s, entry.subject, entry.body) == (at_s, subject, body)
            message = ENTRY.to_pb(entry)
            assert json.loads(message.body_json) == body
            entry_text(entry_of(control_pb2.JournalEntry.FromString(message.SerializeToString()))).encode()


# --- Entries of earlier versions


def raw(path: Path, kind: EntryKind, *bodies: str) -> None:
    """Write entries as versions without these checks could."""
    with Journal(path, NOW_S) as journal, pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal_module, "can_be_written", lambda _: True)
        for number, body in enumerate(bodies):
            journal.append(NOW_S, kind, f"s{number}", json.loads(body))


BODIES_OF_OTHERS = [
    "{}",
    '{"version": 18446744073709551616}',
    '{"fleet": {"committed": {"version": 18446744073709551616, "sync": "w1", "has": []}, "spoilt": {}}}',
    '{"state": {"newest": 18446744073709551616, "versions": {"e0": -1}}}',
    '{"report": {"id": "w1", "version": 18446744073709551616, "state": "done", "began_s": 1.0}}',
    '{"report": {"id": "w1", "version": -1, "state": "done", "began_s": 1.0}}',
    '{"mode": "act", "configured": 7, "routes": 3, "operation": [], "pairs": {}, "roster": null, "state": "odd"}',
    '{"lengths": {"bin_tokens": "x"}, "elapsed_s": null, "cross_connects": [[1]], "control": [], "pauses": 1}',
]


# Recovery reads these kinds, and accepts none of the bodies above.
SET_ASIDE = {
    *(
        EntryKind.MODE,
        EntryKind.ENGINES,
        EntryKind.STEP_ENDED,
        EntryKind.PLAN,
        EntryKind.DEPLOYMENT_ENDED,
        EntryKind.REDEPLOYMENT_BEGAN,
        EntryKind.PROFILE_REFITTED,
    ),
    *(
        EntryKind.REDEPLOYMENT_ENDED,
        EntryKind.ENGINE_STARTED,
        EntryKind.BARRIER,
        EntryKind.PAUSE_BEGAN,
        EntryKind.ROUTES,
        EntryKind.OPERATION_INTENT,
        EntryKind.CIRCUITS_INTENT,
    ),
    *(
        EntryKind.CIRCUITS_OWNED,
        EntryKind.PERIOD_INTENT,
        EntryKind.PERIOD,
        EntryKind.FABRIC_CONTROL,
        EntryKind.REROUTED,
        EntryKind.PAUSES,
    ),
    *(EntryKind.SYNC_BEGAN, EntryKind.SYNC_ENDED, EntryKind.WEIGHTS),
}


@pytest.mark.parametrize(
    "kind", [kind for kind in EntryKind if kind not in (EntryKind.JOURNAL_DAMAGED, EntryKind.JOURNAL_CONFIRMED)]
)
def test_unreadable_entry_is_skipped(tmp_path: Path, kind: EntryKind) -> None:
    path = tmp_path / "journal.sqlite"
    raw(path, kind, *BODIES_OF_OTHERS)
    with Journal(path, NOW_S) as journal:
        clock = VirtualClock(NOW_S)
        parts = build_daemon(parse_config("mode: act\n"), journal, clock)
        asyncio.run(parts.fleet.barrier.settle())
        book = WeightBook(journal, clock)
        book.recover()
        PauseRegistry(journal, clock)
        periods = PeriodBook(journal)
        CircuitExecutor({}, journal, clock).recover()
        read_fleet(journal), read_open(journal)
        for report in read_history(journal).values():
            redeployment_to_pb(report).SerializeToString()
        for sync in book.over:
            sync_to_pb(sync).SerializeToString()
        for period in periods.over:
            PERIOD.to_pb(period).SerializeToString()
        journal.newest(EntryKind.FABRIC_CONTROL, _constraints_in)
        journal.newest(EntryKind.REROUTED, _recorded_in)
        seen = plain(status_to_pb(parts, "test"))
        assert all("journal is left out" in line for line in summary(seen) if "of the journal" in line)
        assert bool(seen["journal_set_aside"]) is (kind in SET_ASIDE)
        for entry in journal.since(0):
            entry_text(entry_of(ENTRY.to_pb(entry)))


def test_skipped_entry_is_reported_and_previous_one_applies(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path, NOW_S) as journal:
        WeightBook(journal, VirtualClock(NOW_S)).stands(WeightFleet(CommittedVersion(7, "w7", ("e0",))))
    raw(path, EntryKind.WEIGHTS, '{"fleet": {"committed": {"version": 18446744073709551616, "sync": "w8", "has": []}}}')
    with Journal(path, NOW_S) as journal:
        book = WeightBook(journal, VirtualClock(NOW_S))
        book.recover()
        assert book.fleet.version == 7
        assert list(journal.set_aside) == [2]
        assert "fleet.committed.version: must be from" in journal.set_aside[2]


def test_only_first_faults_of_a_body_are_reported() -> None:
    odd = {f"k{number}": float("inf") for number in range(FAULTS_NAMED)}
    assert body_faults(odd) == [f"k{number}: must be a finite number, got inf" for number in range(FAULTS_NAMED)]
    (text,) = body_faults({**odd, "last": float("inf")})
    assert "k4" in text
    assert "last" not in text
