"""Tests of the control plane on a virtual clock, with behaving nodes: from reports to moves and back."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from builders import GATEWAY, engine_report, finished, gateway_hello, gateway_report, request, sample

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import Config, FleetSettings
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry
from orchestrrl.core.nodes import Attachment
from orchestrrl.core.operations import MoveRequests, OperationItemResult, OperationResult, SetRoutes, status_of
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.redeployment.book import RedeploymentOutcome
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from planner.admission import ControlState
from planner.model import ConfigurationId, EngineHealth, EngineId, Mode, Plan, RequestId
from planner.move_methods import FIXED_PRIOR_S

TP2 = "{id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 4, \
prefill_tokens_per_s: 9000, switch_s: 1.5}"
CONFIG = f"""
mode: act
fast: {{interval_s: 1, theta: 0.0001, stall_grace_s: 3}}
slow: {{interval_s: 10, epsilon_s: 1}}
fleet:
  gpus: {{count: 4}}
  configurations: [{TP2}]
  engines:
    - {{id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1]}}
    - {{id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3]}}
"""


class Fleet:
    """A gateway and an agent that report every quarter of a second, with requests that really move. A request decodes
    10 tokens per report."""

    def __init__(self, plane: ControlPlane, clock: VirtualClock) -> None:
        self.plane = plane
        self.clock = clock
        self.remaining: dict[str, int] = {}
        self.where: dict[str, str] = {}
        self.generated: dict[str, int] = {}
        self.moves_seen: list[str] = []
        self.routes: list[SetRoutes] = []
        self.mute = False  # the gateway carries moves out, and its results are lost
        self.attachment: Attachment | None = None
        self._done: list[str] = []
        self._sequence = 0

    def submit(self, engine: str, *lengths: int) -> None:
        for length in lengths:
            id = f"r{len(self.generated):02d}"
            self.remaining[id], self.where[id], self.generated[id] = length, engine, 0

    async def run(self) -> None:
        while True:
            self.turn()
            await self.clock.sleep(0.25)

    def turn(self) -> None:
        for engine in ("e0", "e1"):
            for id in [id for id in self.remaining if self.where[id] == engine][:4]:
                step = min(10, self.remaining[id])
                self.generated[id] += step
                self.remaining[id] -= step
                if not self.remaining[id]:
                    del self.remaining[id]
                    self._done.append(id)
        self.report()

    def report(self, stream: int = 1) -> None:
        self._sequence += 1
        for engine in ("e0", "e1"):
            held = sum(self.where[id] == engine for id in self.remaining)
            busy = sample(
                self.clock.now_s(),
                running=min(held, 4),
                waiting=max(0, held - 4),
                decode_tokens_per_s=min(held, 4) * 40.0,
                kv_capacity_tokens=100_000,
                kv_usage_fraction=0.1,
            )
            self.plane.fleet.engine_reported(engine_report(engine, self._sequence, busy), stream)
        live = [request(id, self.where[id], self.generated[id]) for id in self.remaining]
        done = tuple(finished(id, self.generated[id]) for id in self._done)
        self._done = []
        self.plane.fleet.gateway_reported(gateway_report(*live, sequence=self._sequence, done=done), stream)

    async def attach(self) -> None:
        self.attachment = self.plane.fleet.attach(gateway_hello("e0", "e1"))
        results: dict[str, OperationResult] = {}
        async for operation in self.attachment.orders():
            match operation.action:
                case SetRoutes():
                    self.routes.append(operation.action)
                case MoveRequests(moves):
                    if operation.id not in results:
                        items = tuple(self._move(m.request, m.to_engine) for m in moves)
                        results[operation.id] = OperationResult(operation.id, GATEWAY, status_of(items), items=items)
                    if not self.mute:
                        self.plane.fleet.result_received(results[operation.id])

    def _move(self, id: str, to: str) -> OperationItemResult:
        if id not in self.remaining:
            return OperationItemResult(id, False, "finished before the move")
        self.where[id] = to
        self.moves_seen.append(id)
        return OperationItemResult(id, True, recomputed_tokens=100 + self.generated[id])


class Harness:
    """Successive daemons over one journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock(1000.0)
        self.journal: Journal | None = None

    def start(self, config: str | Config = CONFIG) -> ControlPlane:
        self.stop()
        self.journal = Journal(self.path, self.clock.now_s())
        settings = parse_config(config) if isinstance(config, str) else config
        self.parts = build_daemon(settings, self.journal, self.clock)
        self.plane = self.parts.control_plane
        self.fleet = Fleet(self.plane, self.clock)
        return self.plane

    def redeployed_by(self, redeployer: RedeploymentController) -> ControlPlane:
        """Return the same fleet with a controller of deployment changes."""
        one = self.plane
        self.plane = ControlPlane(one.fleet, one.mode, one.pause_registry, one._turn, redeployer, one._left_for_moves)
        return self.plane

    def stop(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def entries(self, *kinds: EntryKind) -> list[JournalEntry]:
        assert self.journal is not None
        return self.journal.since(0, kinds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        parts = [self.fleet.run(), self.fleet.attach(), run_loops(self.plane, self.clock)]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            yield self.fleet
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "journal.sqlite")
    yield made
    made.stop()


# --- the fast loop


async def test_stragglers_requests_move_and_the_step_ends(harness: Harness) -> None:
    plane = harness.start(CONFIG.replace("epsilon_s: 1", "epsilon_s: 1000"))  # no plan can gain this much
    harness.fleet.submit("e0", *[400] * 10)
    async with harness.running() as fleet:
        await harness.clock.advance(6.0)
        assert len(fleet.moves_seen) >= 4
        assert {fleet.where[id] for id in fleet.remaining} == {"e0", "e1"}
        await harness.clock.advance(30.0)
        assert not fleet.remaining
    totals = plane.fleet.state.totals
    assert (totals.finished, totals.moves_failed) == (10, 0)
    assert totals.moves_done == len(fleet.moves_seen)
    assert len(harness.entries(EntryKind.OPERATION_INTENT)) == len(harness.entries(EntryKind.OPERATION_RESULT)) > 0
    assert harness.entries(EntryKind.STEP_ENDED)
    assert len(set(fleet.moves_seen)) == len(fleet.moves_seen)  # no request moved back and forth


async def test_advise_mode_changes_nothing(harness: Harness) -> None:
    plane = harness.start(CONFIG.replace("mode: act", "mode: advise"))
    harness.fleet.submit("e0", *[4000] * 10)
    async with harness.running() as fleet:
        await harness.clock.advance(10.0)
        assert plane.balance is not None
        assert plane.balance.verdict.code == "advise_only"
        assert plane.balance.moves
        assert fleet.moves_seen == []
        plane.mode.set(Mode.ACT, "seen enough")
        await harness.clock.advance(3.0)
        assert fleet.moves_seen
    assert harness.entries(EntryKind.OPERATION_INTENT)[0].sequence > harness.entries(EntryKind.MODE)[0].sequence


async def test_balance_decision_is_journalled_when_it_changes_or_acts(harness: Harness) -> None:
    harness.start()
    async with harness.running() as fleet:
        await harness.clock.advance(20.0)
        assert [entry.subject for entry in harness.entries(EntryKind.BALANCE)] == ["nothing_to_do"]
        fleet.submit("e0", *[4000] * 10)
        await harness.clock.advance(20.0)
    written = [entry.subject for entry in harness.entries(EntryKind.BALANCE)]
    assert all(now != then or now == "spread" for then, now in pairwise(written))
    acted = next(entry for entry in harness.entries(EntryKind.BALANCE) if entry.body["acts"])
    assert acted.body["moves"]
    assert acted.body["inputs_digest"]


async def test_balance_holds_while_moves_are_open_and_observes_their_result(harness: Harness) -> None:
    plane = harness.start()
    harness.fleet.mute = True
    harness.fleet.submit("e0", *[4000] * 10)
    async with harness.running() as fleet:
        await harness.clock.advance(5.0)
        moved = list(fleet.moves_seen)
        assert moved
        assert plane.balance is not None
        assert plane.balance.verdict.code == "moves_open"
        await harness.clock.advance(10.0)
        (result,) = harness.entries(EntryKind.OPERATION_RESULT)[:1]
        assert (result.body["status"], result.body["detail"]) == ("done", "seen in telemetry")
        assert [item["id"] for item in result.body["items"]] == moved
        assert plane.fleet.state.totals.moves_done == len(moved)


async def test_stale_telemetry_holds(harness: Harness) -> None:
    plane = harness.start()
    harness.fleet.submit("e0", *[4000] * 10)
    harness.fleet.report()
    loops = asyncio.create_task(run_loops(plane, harness.clock))
    await harness.clock.advance(6.0)
    assert plane.balance is not None
    assert plane.balance.verdict.code == "stale_telemetry"
    loops.cancel()


async def test_gone_engine_leaves_the_routes_at_once(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running() as fleet:
        await harness.clock.advance(1.0)
        assert [(r.engine, r.health) for r in fleet.routes[-1].routes] == [("e0", "ok"), ("e1", "ok")]
        reported = len(fleet.routes)
        plane.fleet.engine_reported(engine_report("e1", 10**6, None, EngineHealth.GONE), 9)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(fleet.routes) == reported + 1
        assert [(r.engine, r.health) for r in fleet.routes[-1].routes] == [("e0", "ok"), ("e1", "gone")]
    healths = [(entry.subject, entry.body["health"]) for entry in harness.entries(EntryKind.ENGINE_HEALTH)]
    assert healths[:3] == [("e0", "ok"), ("e1", "ok"), ("e1", "gone")]


async def test_gateway_that_attaches_before_agents_keeps_its_engines(harness: Harness) -> None:
    plane = harness.start("mode: act")
    plane.fleet.engine_reported(engine_report("from-agent", 1, sample()), 1)
    plane.fleet.attach(gateway_hello("e0"))
    plane = harness.start("mode: act")
    orders = plane.fleet.attach(gateway_hello("e0")).orders()
    first = (await anext(orders)).action
    assert isinstance(first, SetRoutes)
    assert [(r.engine, r.url, r.health) for r in first.routes] == [
        ("e0", "", None),
        ("from-agent", "http://from-agent", None),
    ]


async def test_operators_move_uses_the_same_path(harness: Harness) -> None:
    plane = harness.start(CONFIG.replace("mode: act", "mode: advise"))
    harness.fleet.submit("e0", 4000)
    async with harness.running() as fleet:
        await harness.clock.advance(1.0)
        outcome = await plane.fleet.move(RequestId("r00"), EngineId("e1"))
        assert outcome.items[0].done
        assert fleet.where["r00"] == "e1"
        assert len(harness.entries(EntryKind.OPERATION_RESULT)) == 1
        fleet.report()
        with pytest.raises(Permanent, match="request r00 cannot move, because it is already assigned to engine e1"):
            await plane.fleet.move(RequestId("r00"), EngineId("e1"))
        with pytest.raises(ProblemFaults) as caught:
            await plane.fleet.move(RequestId("unknown"), EngineId("nowhere"))
        assert caught.value.faults == [
            "request_id: is not in flight, got 'unknown'",
            "to_engine_id: must be a known engine (e0, e1), got 'nowhere'",
        ]


async def test_moves_use_the_cheaper_method_and_report_their_duration(harness: Harness) -> None:
    """KV transfer is instant, prefill runs at 400 tokens a second; then the weights change their name."""
    links = "connector: kv_handover, weights: v1, inter_node_gbps_per_gpu: 8.0, latency_s: 0.01"
    config = CONFIG.replace("mode: act", "mode: advise").replace("tokens_per_s: 9000", "tokens_per_s: 400")
    config = config.replace("fleet:", f"fleet:\n  kv_transfer: {{{links}, kv_bytes_per_token: 1000.0}}")
    plane = harness.start(config)
    harness.fleet.submit("e0", 4000)
    async with harness.running() as fleet:
        await harness.clock.advance(1.0)
        assert [route.kv_version for route in fleet.routes[-1].routes] == ["tp2/v1"] * 2
        context = 100 + fleet.generated["r00"]
        assert (await plane.fleet.move(RequestId("r00"), EngineId("e1"))).items[0].done
        ordered = harness.entries(EntryKind.OPERATION_INTENT)[0].body["operation"]["action"]["moves"][0]
        assert ordered["method"] == "transfer"
        assert ordered["fixed_s"] == pytest.approx(0.01 + FIXED_PRIOR_S)
        assert ordered["predicted_s"] == pytest.approx(0.01 + FIXED_PRIOR_S + context * 1000 / 2e9)  # both GPUs send
        assert ordered["other_s"] == pytest.approx(FIXED_PRIOR_S + context / 400)
        (moved,) = plane.fleet.latest_moves
        assert (moved.move.request, moved.item.done) == ("r00", True)
        plane.reconfigure(parse_config(config.replace("v1", "v2")))
        await harness.clock.advance(0.1)
        assert [route.kv_version for route in fleet.routes[-1].routes] == ["tp2/v2"] * 2
        plane.reconfigure(parse_config(config.replace("connector: kv_handover, ", "")))
        await harness.clock.advance(0.5)
        assert [route.kv_version for route in fleet.routes[-1].routes] == [""] * 2
        assert (await plane.fleet.move(RequestId("r00"), EngineId("e0"))).items[0].done
        ordered = harness.entries(EntryKind.OPERATION_INTENT)[1].body["operation"]["action"]["moves"][0]
        assert (ordered["method"], ordered["other_s"]) == ("recompute", 0.0)


async def test_reattached_node_replaces_its_old_stream(harness: Harness) -> None:
    plane = harness.start()
    old = plane.fleet.attach(gateway_hello("e0"))
    new = plane.fleet.attach(gateway_hello("e0"))
    assert [operation async for operation in old.orders()] == []
    plane.fleet.detach(old)
    assert [state.attached for state in plane.fleet.nodes.states()] == [True]
    plane.fleet.detach(new)
    assert [state.attached for state in plane.fleet.nodes.states()] == [False]


# --- the slow loop


async def test_plans_are_made_and_get_their_actual_makespan(harness: Harness) -> None:
    plane = harness.start()
    harness.fleet.submit("e0", *[200] * 8)
    watching = plane.plans.watch()
    async with harness.running():
        await harness.clock.advance(15.0)
        first = await anext(watching)
        assert first.plan is not None
        await harness.clock.advance(15.0)
    ended = harness.entries(EntryKind.STEP_ENDED)[0].body["ended_s"]
    plans = [plan for plan in plane.plans.newest(0) if plan.requests_running]
    assert plans
    for plan in plans:
        assert plan.actual_makespan_s == pytest.approx(ended - plan.created_s)
    actual = harness.entries(EntryKind.PLAN_ACTUAL)
    assert {entry.subject for entry in actual} >= {plan.id for plan in plans}
    assert actual[0].body["predicted_makespan_s"] is not None


async def test_plans_and_controls_survive_a_restart_until_they_expire(harness: Harness) -> None:
    plane = harness.start()
    harness.fleet.submit("e0", 400)
    harness.fleet.report()
    made = await plane.slow_tick()
    plane.plans.override(ConfigurationId("tp2"), [ConfigurationId("tp2")], "capacity test", 60.0)

    plane = harness.start()
    assert plane.plans.latest == made
    control = plane.plans.control
    assert (control.state, control.configuration, control.reason) == (ControlState.OVERRIDDEN, "tp2", "capacity test")
    await harness.clock.advance(61.0)
    assert plane.plans.control.state is ControlState.FREE
    assert harness.start().plans.control.state is ControlState.FREE


async def test_deployment_is_pinned_and_released(harness: Harness) -> None:
    plane = harness.start()
    assert plane.plans.pin("maintenance", 0.0).expires_s is None
    assert harness.start().plans.control.state is ControlState.PINNED
    harness.plane.plans.release("done")
    assert harness.start().plans.control.state is ControlState.FREE


async def test_unknown_configuration_fault_lists_the_known_ones(harness: Harness) -> None:
    plane = harness.start()
    with pytest.raises(ProblemFaults) as caught:
        plane.plans.override(ConfigurationId("tp9"), [ConfigurationId("tp2")], "", -1.0)
    assert caught.value.faults == [
        "ttl_s: must be >= 0 (0: until released), got -1",
        "configuration: is not a known configuration (known: tp2), got 'tp9'",
    ]
    assert plane.plans.control.state is ControlState.FREE


async def test_plan_that_moves_requests_is_carried_out_with_its_result(harness: Harness) -> None:
    """The fast loop is disabled, so that every move is the slow loop's."""
    plane = harness.start(CONFIG.replace("fast: {", "fast: {policy: none, "))
    harness.fleet.submit("e0", *[4000] * 12)
    async with harness.running() as fleet:
        await harness.clock.advance(15.0)
        assert fleet.moves_seen
        assert {fleet.where[id] for id in fleet.remaining} == {"e0", "e1"}
    acted = next(plan for plan in plane.plans.newest(0) if plan.acted)
    assert acted.decision == "rebalance"
    assert {move.request for move in acted.moves} <= set(fleet.moves_seen)
    assert acted.acted_detail == f"{acted.moves_count} of {acted.moves_count} requests moved"
    entry = harness.entries(EntryKind.PLAN_ACTED)[0]
    assert (entry.subject, entry.body["done"]) == (acted.id, True)


async def test_plan_in_advise_mode_moves_nothing(harness: Harness) -> None:
    plane = harness.start(CONFIG.replace("mode: act", "mode: advise").replace("fast: {", "fast: {policy: none, "))
    harness.fleet.submit("e0", *[4000] * 12)
    async with harness.running() as fleet:
        await harness.clock.advance(15.0)
        assert fleet.moves_seen == []
    assert next(plan.verdict.code for plan in plane.plans.newest(0) if plan.requests_running) == "advise_only"
    assert harness.entries(EntryKind.PLAN_ACTED) == []


WIDE = "{id: tp4, gpus: 4, alpha_s: 0.002, beta_s: 1e-5, gamma_s: 4e-9, kv_capacity_tokens: 200000, max_sequences: 64, \
prefill_tokens_per_s: 18000, switch_s: 1.5}"


class Deployed:
    """A deployment that records its calls and takes two seconds for each."""

    def __init__(self, clock: VirtualClock, turn: DeploymentTurn, error: Permanent | None) -> None:
        self.clock = clock
        self.turn = turn
        self.error = error
        self.plans: list[Plan] = []

    async def carry_out(self, plan: Plan) -> RedeploymentOutcome:
        self.plans.append(plan)
        with self.turn.preparing():
            await self.clock.sleep(2.0)
        if self.error is not None:
            raise self.error
        return RedeploymentOutcome(True, "1 engine started", self.clock.now_s())

    def reconfigure(self, fleet: FleetSettings) -> None:
        pass


@pytest.mark.parametrize("error", [None, Permanent("no image for this engine")])
async def test_engines_are_changed_once_and_the_cooldown_begins_at_the_end(
    harness: Harness, error: Permanent | None
) -> None:
    plane = harness.start(CONFIG.replace(f"[{TP2}]", f"[{TP2}, {WIDE}]").replace("fast: {", "fast: {policy: none, "))
    deployment = Deployed(harness.clock, plane._turn, error)
    plane = harness.redeployed_by(deployment)
    harness.fleet.submit("e0", *[4000] * 12)
    async with harness.running():
        await harness.clock.advance(25.0)
    assert len(deployment.plans) == 1
    plan = deployment.plans[0]
    assert (plan.decision, [instance.configuration for instance in plan.instances]) == ("reconfigure", ["tp4"])
    ended = harness.entries(EntryKind.DEPLOYMENT_ENDED)[0].body
    assert (ended["done"], plane.plans.get(plan.id).acted) == (error is None, error is None)
    assert plane.plans.last_redeploy_s == ended["ended_s"]
    later = [p for p in plane.plans.newest(0) if p.created_s > ended["ended_s"]]
    assert all("cooldown" in (p.verdict.code, p.forgone.code if p.forgone else "") for p in later)
    assert later
    assert harness.start().plans.last_redeploy_s == ended["ended_s"]


async def test_plan_for_other_engines_is_held_without_a_deployment(harness: Harness) -> None:
    plane = harness.start(CONFIG.replace(f"[{TP2}]", f"[{TP2}, {WIDE}]").replace("fast: {", "fast: {policy: none, "))
    harness.fleet.submit("e0", *[4000] * 2)
    harness.fleet.submit("e1", *[4000] * 2)
    harness.fleet.report()
    plan = await plane.slow_tick()
    assert (plan.decision, plan.verdict.code) == ("reconfigure", "no_deployer")


# --- across restarts


async def test_restarted_daemon_learns_the_fleet_again_and_settles_open_operations(harness: Harness) -> None:
    harness.start()
    harness.fleet.mute = True
    harness.fleet.submit("e0", *[4000] * 10)
    async with harness.running() as before:
        await harness.clock.advance(3.0)
        assert harness.plane.fleet.runner.open
    plane = harness.start()
    assert len(plane.fleet.runner.open) == 1
    fleet = harness.fleet
    fleet.remaining, fleet.where, fleet.generated = before.remaining, before.where, before.generated
    async with harness.running():
        await harness.clock.advance(1.5)
        assert plane.fleet.runner.open == ()
        result = harness.entries(EntryKind.OPERATION_RESULT)[-1]
        assert result.body["status"] == "done"
        snapshot = plane.fleet.state.snapshot(harness.clock.now_s())
        assert len(snapshot.requests) == 10
        assert [view.health for view in snapshot.engines] == [EngineHealth.OK, EngineHealth.OK]
    started = harness.entries(EntryKind.DAEMON_STARTED)
    assert [entry.body["open_operations"] for entry in started] == [0, 1]
    assert started[0].generation < started[1].generation


@pytest.mark.parametrize(("configured", "expected"), [("mode: act", Mode.ADVISE), ("mode: advise", Mode.ADVISE)])
async def test_operators_mode_persists_while_the_configured_one_is_unchanged(
    harness: Harness, configured: str, expected: Mode
) -> None:
    harness.start("mode: act").mode.set(Mode.ADVISE, "something is wrong")
    assert harness.start(configured).mode.current is expected


async def test_mode_is_not_changed_if_the_journal_write_fails(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = harness.start("mode: advise")

    def refuse(*_: object) -> int:
        raise Permanent("the disk is full")

    monkeypatch.setattr(plane.journal, "append", refuse)
    with pytest.raises(Permanent, match="full"):
        plane.mode.set(Mode.ACT, "seen enough")
    assert plane.mode.current is Mode.ADVISE


async def test_new_configured_mode_overrides_an_older_setting(harness: Harness) -> None:
    harness.start("mode: advise").mode.set(Mode.ACT, "trying")
    assert harness.start("mode: advise").mode.current is Mode.ACT
    harness.start("mode: act").mode.set(Mode.ADVISE, "enough")
    assert harness.start("mode: advise").mode.current is Mode.ADVISE


async def test_reloaded_configuration_applies_at_the_next_tick(harness: Harness) -> None:
    plane = harness.start()
    plane.reconfigure(parse_config(CONFIG.replace("mode: act", "mode: advise").replace("theta: 0.0001", "theta: 0.5")))
    assert plane.mode.current is Mode.ADVISE
    assert plane.fast_tick().theta == 0.5
    assert [entry.kind for entry in harness.entries(EntryKind.CONFIG_RELOADED, EntryKind.MODE)] == [
        EntryKind.CONFIG_RELOADED,
        EntryKind.MODE,
    ]


async def test_shutdown_waits_for_results_and_leaves_the_rest_open(harness: Harness) -> None:
    plane = harness.start()
    harness.fleet.mute = True
    harness.fleet.submit("e0", *[4000] * 10)
    async with harness.running():
        await harness.clock.advance(3.0)
        await plane.fleet.close(drain_s=0.01)
    assert harness.entries(EntryKind.DAEMON_STOPPED)[0].body == {"open_operations": 1}
    assert len(harness.start().fleet.runner.open) == 1
