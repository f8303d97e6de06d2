"""Define every Prometheus metric of the daemon, with its help text, and serve the metrics over HTTP.

Values are read from the control plane at each scrape, in the daemon's event loop.
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
    """Collects the metrics of the control plane for Prometheus."""

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
            "Engines by operator state; draining: with requests; drained: without requests; removed: and not added "
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
            ("decode_tokens_per_second", "Latest decode rate of an engine, tokens per second.", "decode_tokens_per_s"),
            ("kv_free_tokens", "Free tokens in an engine's KV cache.", "kv_free_tokens"),
            ("sample_age_seconds", "Age of an engine's latest sample in seconds.", "age_s"),
            (
                "policy_version",
                "Policy version of an engine's weights; if not the fleet's, no requests; absent if unknown.",
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
        text = "Tokens that destinations of moves prefilled again."
        found.counter("recomputed_tokens", text, totals.tokens_recomputed)
        found.extend(failover_metrics("orchestrrl", plane.fleet.state.failovers))
        found.counter("loaded_tokens", "Tokens whose KV was transferred by moves.", totals.tokens_loaded)
        nodes = Counter(node.attachment.hello.kind for node in plane.fleet.nodes.states() if node.attached)
        found.gauge("nodes_attached{kind}", "Agents and gateways attached.", dict(sorted(nodes.items())))
        found.gauge("operations_open", "Operations without a result.", len(plane.fleet.runner.open))
        found.counter("journal_entries", "Entries ever written to the journal.", plane.journal.last_sequence)
        text = "1 while the journal has damage that no operator has confirmed: the daemon does not act."
        found.gauge("journal_damaged", text, float(bool(plane.journal.damage)))
        text = "Entries of the journal that this version cannot read and recovery skipped."
        found.gauge("journal_set_aside", text, len(plane.journal.set_aside))
        found.gauge("generation", "Generation of the daemon, which grows at each start.", plane.journal.generation)
        modes = {mode: float(mode is plane.mode.current) for mode in Mode}
        found.gauge("mode{mode}", "1 for the current mode.", modes)

    def _add_barrier(self, found: MetricFamilies) -> None:
        keeper, ended = self._control_plane.fleet.barrier, self._control_plane.fleet.canceller.totals
        text = "1 for the current phase of the pause barrier; quiet: all engines are at rest."
        found.gauge("barrier{phase}", text, {phase: float(phase is keeper.state.phase) for phase in BarrierPhase})
        text = "Seconds for which leases held the pause barrier, since the daemon's start."
        found.counter("barrier_held_seconds", text, keeper.paused_s)
        text = "Leases of the pause barrier that ended without a resume: weights may be mixed."
        found.counter("barrier_leases_expired", text, keeper.expired)
        text = "Policy version of the fleet's weights; absent until it is set."
        found.gauge("policy_version", text, keeper.state.newest)
        found.counter(
            "requests_cancelled{reason}",
            "Requests that gateways cancelled by the daemon's order: on request, or because their group has enough "
            "answers over all gateways. Gateways count their own cancellations.",
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
            found.gauge("balance_policy{policy}", "1 for the policy by which the fast loop chooses moves.", policies)
        found.gauge("decision_age_seconds{loop}", "Seconds since the latest decision of a loop.", ages)
        seconds = {"fast": plane.fast_tick_s, "slow": plane.slow_tick_s}
        found.gauge("loop_seconds{loop}", "Duration of the latest tick of a loop in seconds.", seconds)

    def _add_plans(self, found: MetricFamilies, now_s: float) -> None:
        plans = self._control_plane.plans
        calibration, latest = plans.calibration, plans.latest
        text = "Running mean of |predicted - actual| / actual seconds to a step's end."
        found.gauge("plan_calibration_error_ratio", text, calibration.error)
        text = "Running mean of (predicted - actual) / actual: above 0 if steps end sooner than predicted."
        found.gauge("plan_calibration_bias_ratio", text, calibration.bias)
        found.counter("plan_calibration_steps", "Ended steps in the calibration.", calibration.steps)
        text = "Factor applied to predicted decoding seconds, from the results of earlier steps."
        found.gauge("plan_correction_ratio", text, calibration.correction)
        age_s = None if plans.last_redeploy_s is None else now_s - plans.last_redeploy_s
        found.gauge("deployment_age_seconds", "Seconds since a plan last changed engines.", age_s)
        if latest is not None:
            found.gauge(
                "plan_seconds{of}",
                "Seconds to the step's end by the latest plan: for the current and the proposed deployment, including "
                "costs; the costs; and the lower bound.",
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
            text = "Predicted seconds to the step's end, by the latest plan with a known result."
            found.gauge("plan_predicted_makespan_seconds", text, done.predicted_s)
            text = "Actual seconds from that plan to the step's end."
            found.gauge("plan_actual_makespan_seconds", text, done.actual_makespan_s)

    def _add_profile(self, found: MetricFamilies, snapshot: Snapshot) -> None:
        planning = self._control_plane.planning
        sources = Counter(times.source or "unknown" for times in planning.step_times(snapshot).values())
        text = "Engines by the source of their step times; observed: learned from batches, without a prior."
        known = {source: sources[source] for source in ("configured", "prior", "observed", "unknown")}
        found.gauge("workers_by_step_times{source}", text, known)
        estimates = {estimate.profile.id: estimate for estimate in planning.costs.estimates()}
        found.gauge(
            "profile_predicted_step_ratio{configuration}",
            "Running mean of predicted over measured decode step seconds; absent until one is measured.",
            {id: estimate.predicted_ratio for id, estimate in estimates.items()},
        )
        text = "Estimated over configured step times, at the latest observed loads."
        factors = {id: estimate.factor for id, estimate in estimates.items()}
        found.gauge("profile_step_time_factor{configuration}", text, factors)
        text = "Mean relative error of the curves in use against their samples; absent without samples."
        errors = {id: estimate.profile.provenance.fit_error_mean for id, estimate in estimates.items()}
        found.gauge("profile_fit_error_ratio{configuration}", text, errors)
        found.counter(
            "profile_batches{configuration,result}",
            "Batches whose step time was measured; refused: implausible for the configuration.",
            {(id, name): getattr(each, name) for id, each in estimates.items() for name in ("taken", "refused")},
        )


async def serve_metrics(daemon: Daemon, address: str) -> web.AppRunner:
    """Start an HTTP server for /metrics and return its runner, whose `cleanup` method stops the server. Raises
    Permanent if the server cannot bind the address."""
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
    text = "1 while an operator has paused this part, otherwise 0."
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
        "Exceptions that ended one tick of a loop or task, or one call. The work of that tick is skipped; the log has "
        "the tracebacks.",
        of_parts | {name: counts[name] for name in sorted({*ACTING, *counts})},
    )
    return found
