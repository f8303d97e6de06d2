"""Every Prometheus metric that the daemon exports, with its help text, and the page that serves them.

Values are read from the control plane when the page is asked for, in the daemon's own event loop.
"""

from collections import Counter
from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.defects import ACTING
from orchestrrl.core.errors import Permanent
from orchestrrl.core.metrics import MetricFamilies
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.daemon.wiring import Daemon
from orchestrrl.fabric.metrics import fabric_metrics
from orchestrrl.fleet.redeployment.metrics import RedeploymentMetrics
from orchestrrl.fleet.reports import BarrierPhase
from orchestrrl.gateway.failovers import failover_metrics
from orchestrrl.weights.controller.metrics import SyncMetrics
from planner.model import EngineHealth, Mode, RequestState, Snapshot

_CONTENT_TYPE = "text/plain; version=0.0.4"


class DaemonCollector(Collector):
    """The control plane as Prometheus sees it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._control_plane = daemon.control_plane
        self._switches = RedeploymentMetrics()
        self._weights = SyncMetrics(self._control_plane.started_s)

    def collect(self) -> Iterable[Metric]:
        found = MetricFamilies("orchestrrl_")
        snapshot = self._control_plane.fleet.state.snapshot(self._control_plane.clock.now_s())
        self._add_workers(found, snapshot)
        self._add_totals(found)
        self._add_barrier(found)
        self._add_decisions(found, snapshot.now_s)
        self._add_plans(found, snapshot.now_s)
        self._add_profile(found, snapshot)
        if self._daemon.redeployer is not None:
            found.extend(self._switches.collect(self._daemon.redeployer.history(0)))
        found.extend(pause_metrics(self._control_plane.pause_registry.pauses))
        found.extend(defect_metrics(self._daemon))
        if self._daemon.fabric.coordinator is not None:
            found.extend(fabric_metrics(self._daemon.fabric.coordinator))
        found.extend(self._weights.collect(self._daemon.weights.syncs))
        return found

    def _add_workers(self, found: MetricFamilies, snapshot: Snapshot) -> None:
        engines, held = snapshot.engines, {request.engine for request in snapshot.requests}
        healths = Counter(engine.health for engine in engines)
        found.gauge(
            "workers{health}", "Engines known, by health.", {health: healths[health] for health in EngineHealth}
        )
        draining = [engine.id for engine in engines if engine.draining]
        busy = sum(engine in held for engine in draining)
        found.gauge(
            "engines{state}",
            "Engines by what operators let them do; draining: requests are still there; removed: ever, and not added "
            "again.",
            {
                "serving": len(engines) - len(draining),
                "draining": busy,
                "drained": len(draining) - busy,
                "removed": len(self._control_plane.fleet.membership_changes.membership.removed),
            },
        )
        balance = self._control_plane.balance
        found.gauge(
            "worker_load_index{engine}",
            "Load index of an engine (equation 5), seconds per token and slot; absent while it is stalled or unknown.",
            balance.load_index if balance else {},
        )
        for name, text, attribute in (
            ("decode_tokens_per_second", "Decode rate of an engine as last measured.", "decode_tokens_per_s"),
            ("kv_free_tokens", "Free room in an engine's KV cache.", "kv_free_tokens"),
            ("sample_age_seconds", "Age of an engine's latest sample.", "age_s"),
            (
                "policy_version",
                "Of an engine's weights; with one other than the fleet's it gets no requests; absent where not known.",
                "policy_version",
            ),
        ):
            found.gauge(f"worker_{name}{{engine}}", text, {e.id: getattr(e, attribute) for e in engines})
        spread = balance.balance.spread_before if balance else None
        found.gauge("load_spread", "Highest minus lowest load index; absent while an engine is stalled.", spread)
        states = Counter(request.state for request in snapshot.requests)
        in_flight = {state: states[state] for state in (RequestState.RUNNING, RequestState.WAITING)}
        found.gauge("requests{state}", "Requests in flight, by state.", in_flight)

    def _add_totals(self, found: MetricFamilies) -> None:
        plane, totals = self._control_plane, self._control_plane.fleet.state.totals
        moved = {"done": totals.moves_done, "failed": totals.moves_failed}
        found.counter("moves{result}", "Requests moved, by result.", moved)
        found.counter("requests_finished", "Requests that finished.", totals.finished)
        text = "Tokens that destinations of moves had to prefill again."
        found.counter("recomputed_tokens", text, totals.tokens_recomputed)
        found.extend(failover_metrics("orchestrrl", plane.fleet.state.failovers))
        found.counter("loaded_tokens", "Tokens whose KV moves handed over between engines.", totals.tokens_loaded)
        nodes = Counter(node.attachment.hello.kind for node in plane.fleet.nodes.states() if node.attached)
        found.gauge("nodes_attached{kind}", "Agents and gateways attached.", dict(sorted(nodes.items())))
        found.gauge("operations_open", "Operations without a result.", len(plane.fleet.runner.open))
        found.counter("journal_entries", "Entries ever written to the journal.", plane.journal.last_sequence)
        text = "1 while damage of the journal was found that no operator has confirmed: the daemon does not act."
        found.gauge("journal_damaged", text, float(bool(plane.journal.damage)))
        text = "Entries of the journal that this version cannot read, and that recovery left out."
        found.gauge("journal_set_aside", text, len(plane.journal.set_aside))
        found.gauge("generation", "Generation of the daemon: grows at each of its starts.", plane.journal.generation)
        modes = {mode: float(mode is plane.mode.current) for mode in Mode}
        found.gauge("mode{mode}", "1 for the mode that is in force.", modes)

    def _add_barrier(self, found: MetricFamilies) -> None:
        keeper, ended = self._control_plane.fleet.barrier, self._control_plane.fleet.canceller.totals
        text = "1 for how the pause barrier for weight updates stands; quiet: all engines are at rest."
        found.gauge("barrier{phase}", text, {phase: float(phase is keeper.state.phase) for phase in BarrierPhase})
        text = "Seconds for which somebody held the pause barrier, since the daemon's start."
        found.counter("barrier_held_seconds", text, keeper.paused_s)
        text = "Leases of the pause barrier that ended without a resume: weights may be mixed."
        found.counter("barrier_leases_expired", text, keeper.expired)
        text = "The policy version of the fleet's weights; absent until somebody has told it."
        found.gauge("policy_version", text, keeper.state.newest)
        found.counter(
            "requests_cancelled{reason}",
            "Requests that the daemon had gateways end: somebody asked for it, or their group had enough over all "
            "gateways. Those that gateways ended by themselves are their metrics.",
            ended,
        )

    def _add_decisions(self, found: MetricFamilies, now_s: float) -> None:
        plane, latest = self._control_plane, self._control_plane.plans.latest
        ages = {
            "fast": now_s - plane.balance.decided_s if plane.balance else None,
            "slow": now_s - latest.created_s if latest else None,
        }
        if plane.balance:
            policies = {name: float(name == plane.balance.policy.name) for name in ("packing", "load_index", "none")}
            found.gauge("balance_policy{policy}", "1 for how the fast loop chooses moves.", policies)
        found.gauge("decision_age_seconds{loop}", "Since the latest decision of a loop.", ages)
        seconds = {"fast": plane.fast_tick_s, "slow": plane.slow_tick_s}
        found.gauge("loop_seconds{loop}", "What the latest turn of a loop took.", seconds)

    def _add_plans(self, found: MetricFamilies, now_s: float) -> None:
        plans = self._control_plane.plans
        calibration, latest = plans.calibration, plans.latest
        text = "Running mean of |predicted - actual| / actual seconds to a step's end."
        found.gauge("plan_calibration_error_ratio", text, calibration.error)
        text = "Running mean of (predicted - actual) / actual: above 0 where steps end sooner than predicted."
        found.gauge("plan_calibration_bias_ratio", text, calibration.bias)
        found.counter("plan_calibration_steps", "Ended steps that the calibration rests on.", calibration.steps)
        text = "What predicted decoding seconds are multiplied with, from how earlier steps came out."
        found.gauge("plan_correction_ratio", text, calibration.correction)
        age_s = None if plans.last_redeploy_s is None else now_s - plans.last_redeploy_s
        found.gauge("deployment_age_seconds", "Since engines were last changed by a plan.", age_s)
        if latest is not None:
            found.gauge(
                "plan_seconds{of}",
                "Seconds to the step's end by the latest plan: as it stands and as proposed, costs included; what the "
                "costs are; and before which it cannot end.",
                {
                    "current": latest.current_makespan_s,
                    "proposed": latest.proposed_total_s,
                    "switch_cost": latest.redeploy_cost_s,
                    "migration_cost": latest.migration_cost_s,
                    "lower_bound": latest.lower_bound_s or None,
                },
            )
        done = next((plan for plan in plans.newest(0) if plan.actual_makespan_s is not None), None)
        if done is not None:
            text = "Seconds to the step's end, as the latest plan with a known outcome had predicted them."
            found.gauge("plan_predicted_makespan_seconds", text, done.predicted_s)
            text = "Seconds from that plan to the step's end, as they really were."
            found.gauge("plan_actual_makespan_seconds", text, done.actual_makespan_s)

    def _add_profile(self, found: MetricFamilies, snapshot: Snapshot) -> None:
        planning = self._control_plane.planning
        sources = Counter(told.source or "unknown" for told in planning.step_times(snapshot).values())
        text = "Engines by where their step times come from; observed: learnt from batches, without a prior."
        known = {source: sources[source] for source in ("configured", "prior", "observed", "unknown")}
        found.gauge("workers_by_step_times{source}", text, known)
        estimates = {estimate.profile.id: estimate for estimate in planning.costs.estimates()}
        found.gauge(
            "profile_predicted_step_ratio{configuration}",
            "Predicted over measured seconds of a decode step, running mean; absent until something was measured.",
            {id: estimate.predicted_ratio for id, estimate in estimates.items()},
        )
        text = "Step times as they are now believed, against the configured ones, at the loads seen last."
        factors = {id: estimate.factor for id, estimate in estimates.items()}
        found.gauge("profile_step_time_factor{configuration}", text, factors)
        text = "Mean relative error of the curves in use against what they were fitted to; absent where nothing was."
        errors = {id: estimate.profile.provenance.fit_error_mean for id, estimate in estimates.items()}
        found.gauge("profile_fit_error_ratio{configuration}", text, errors)
        found.counter(
            "profile_batches{configuration,result}",
            "Batches of engines whose step time was measured; refused: no engine of the configuration could be so.",
            {(id, name): getattr(each, name) for id, each in estimates.items() for name in ("taken", "refused")},
        )


async def serve_metrics(daemon: Daemon, address: str) -> web.AppRunner:
    """Serve /metrics until the runner is cleaned up. Raises Permanent when the address is taken."""
    registry = CollectorRegistry()
    registry.register(DaemonCollector(daemon))

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": _CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, port = parse_address(address)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise Permanent(f"cannot serve metrics on {address}: {error.strerror}") from None
    return runner


def pause_metrics(paused: Iterable[PauseScope]) -> MetricFamilies:
    found, there = MetricFamilies("orchestrrl_"), set(paused)
    text = "1 while an operator has paused this part."
    found.gauge("paused{part}", text, {part: float(part in there) for part in PauseScope})
    return found


def defect_metrics(daemon: Daemon) -> MetricFamilies:
    found, counts = MetricFamilies("orchestrrl_"), daemon.fleet.defects.counts
    parts = {
        "circuits": daemon.circuits,
        "fabric": daemon.fabric.coordinator,
        "generation": daemon.fabric.gen_circuits,
        "routes": daemon.fabric.routing,
        "weights": daemon.weights.syncs,
    }
    of_parts = {name: part.defects for name, part in parts.items() if part is not None}
    found.counter(
        "defects{part}",
        "Exceptions that ended one turn of a loop or task, or one call. Its work was set aside; the log has their "
        "tracebacks.",
        of_parts | {name: counts[name] for name in sorted({*ACTING, *counts})},
    )
    return found
