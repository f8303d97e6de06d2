"""Every Prometheus metric that the daemon exports, with its help text, and the page that serves them.

Values are read from the control plane when the page is asked for, in the daemon's own event loop.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.defects import ACTING
from orchestrrl.core.errors import Permanent
from orchestrrl.core.metrics import labelled_counter, labelled_gauge
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.daemon.wiring import Daemon
from orchestrrl.fabric.metrics import fabric_metrics
from orchestrrl.fleet.redeployment.metrics import RedeploymentMetrics
from orchestrrl.fleet.reports import BarrierPhase
from orchestrrl.gateway.failovers import failover_metrics
from orchestrrl.weights.controller.metrics import SyncMetrics
from planner.model import EngineHealth, EngineId, EngineView, Mode, RequestState, Snapshot

_CONTENT_TYPE = "text/plain; version=0.0.4"


class DaemonCollector(Collector):
    """The control plane as Prometheus sees it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._control_plane = daemon.control_plane
        self._switches = RedeploymentMetrics()
        self._weights = SyncMetrics(self._control_plane.started_s)

    def collect(self) -> Iterable[Metric]:
        snapshot = self._control_plane.fleet.state.snapshot(self._control_plane.clock.now_s())
        yield from self._workers(snapshot.engines, {request.engine for request in snapshot.requests})
        states = Counter(request.state for request in snapshot.requests)
        yield labelled_gauge(
            "orchestrrl_requests",
            "Requests in flight, by state.",
            "state",
            [(state, states[state]) for state in (RequestState.RUNNING, RequestState.WAITING)],
        )
        yield from self._totals()
        yield from self._barrier(snapshot.engines)
        yield from self._decisions(snapshot.now_s)
        yield from self._plans()
        yield from self._profile(snapshot)
        if self._daemon.redeployer is not None:
            yield from self._switches.collect(self._daemon.redeployer.history(0))
        yield pause_metrics(self._control_plane.pause_registry.pauses)
        yield defect_metrics(self._daemon)
        if self._daemon.fabric is not None:
            yield from fabric_metrics(self._daemon.fabric)
        yield from self._weights.collect(self._daemon.weights.syncs)

    def _engine_states(
        self, engines: tuple[EngineView, ...], held: Collection[EngineId | None]
    ) -> list[tuple[str, float]]:
        draining = [engine.id for engine in engines if engine.draining]
        busy = sum(engine in held for engine in draining)
        return [
            ("serving", len(engines) - len(draining)),
            ("draining", busy),
            ("drained", len(draining) - busy),
            ("removed", len(self._control_plane.fleet.membership_changes.membership.removed)),
        ]

    def _workers(self, engines: tuple[EngineView, ...], held: Collection[EngineId | None]) -> Iterator[Metric]:
        """`held`: engines that requests are on."""
        healths = Counter(engine.health for engine in engines)
        yield labelled_gauge(
            "orchestrrl_workers",
            "Engines known, by health.",
            "health",
            [(health, healths[health]) for health in EngineHealth],
        )
        yield labelled_gauge(
            "orchestrrl_engines",
            "Engines by what operators let them do; draining: requests are still there; removed: ever, and not added "
            "again.",
            "state",
            self._engine_states(engines, held),
        )
        balance = self._control_plane.balance
        indices = balance.load_index if balance else {}
        yield labelled_gauge(
            "orchestrrl_worker_load_index",
            "Load index of an engine (equation 5), seconds per token and slot; absent while it is stalled or unknown.",
            "engine",
            indices.items(),
        )
        yield labelled_gauge(
            "orchestrrl_worker_decode_tokens_per_second",
            "Decode rate of an engine as last measured.",
            "engine",
            [(engine.id, engine.decode_tokens_per_s) for engine in engines],
        )
        yield labelled_gauge(
            "orchestrrl_worker_kv_free_tokens",
            "Free room in an engine's KV cache.",
            "engine",
            [(engine.id, engine.kv_free_tokens) for engine in engines],
        )
        yield labelled_gauge(
            "orchestrrl_worker_sample_age_seconds",
            "Age of an engine's latest sample.",
            "engine",
            [(engine.id, engine.age_s) for engine in engines],
        )
        if balance and balance.balance.spread_before is not None:
            help_text = "Highest minus lowest load index; absent while an engine is stalled."
            yield GaugeMetricFamily("orchestrrl_load_spread", help_text, balance.balance.spread_before)

    def _totals(self) -> Iterator[Metric]:
        plane, totals = self._control_plane, self._control_plane.fleet.state.totals
        moved = [("done", totals.moves_done), ("failed", totals.moves_failed)]
        yield labelled_counter("orchestrrl_moves", "Requests moved, by result.", "result", moved)
        yield CounterMetricFamily("orchestrrl_requests_finished", "Requests that finished.", totals.finished)
        help_text = "Tokens that destinations of moves had to prefill again."
        yield CounterMetricFamily("orchestrrl_recomputed_tokens", help_text, totals.tokens_recomputed)
        yield from failover_metrics("orchestrrl", plane.fleet.state.failovers)
        help_text = "Tokens whose KV moves handed over between engines."
        yield CounterMetricFamily("orchestrrl_loaded_tokens", help_text, totals.tokens_loaded)
        nodes = Counter(node.hello.kind for node in plane.fleet.nodes.states() if node.attached)
        yield labelled_gauge(
            "orchestrrl_nodes_attached", "Agents and gateways attached.", "kind", sorted(nodes.items())
        )
        open_operations = len(plane.fleet.runner.open)
        yield GaugeMetricFamily("orchestrrl_operations_open", "Operations without a result.", open_operations)
        help_text = "Entries ever written to the journal."
        yield CounterMetricFamily("orchestrrl_journal_entries", help_text, plane.journal.last_sequence)
        help_text = "1 while damage of the journal was found that no operator has confirmed: the daemon does not act."
        yield GaugeMetricFamily("orchestrrl_journal_damaged", help_text, float(bool(plane.journal.damage)))
        help_text = "Entries of the journal that this version cannot read, and that recovery left out."
        yield GaugeMetricFamily("orchestrrl_journal_set_aside", help_text, len(plane.journal.set_aside))
        help_text = "Generation of the daemon: grows at each of its starts."
        yield GaugeMetricFamily("orchestrrl_generation", help_text, plane.journal.generation)
        modes = [(mode, float(mode is plane.mode.current)) for mode in Mode]
        yield labelled_gauge("orchestrrl_mode", "1 for the mode that is in force.", "mode", modes)

    def _barrier(self, engines: tuple[EngineView, ...]) -> Iterator[Metric]:
        keeper, ended = self._control_plane.fleet.barrier, self._control_plane.fleet.canceller.totals
        phases = [(phase, float(phase is keeper.state.phase)) for phase in BarrierPhase]
        help_text = "1 for how the pause barrier for weight updates stands; quiet: all engines are at rest."
        yield labelled_gauge("orchestrrl_barrier", help_text, "phase", phases)
        help_text = "Seconds for which somebody held the pause barrier, since the daemon's start."
        yield CounterMetricFamily("orchestrrl_barrier_held_seconds", help_text, keeper.paused_s)
        help_text = "Leases of the pause barrier that ended without a resume: weights may be mixed."
        yield CounterMetricFamily("orchestrrl_barrier_leases_expired", help_text, keeper.expired)
        newest = keeper.state.newest
        if newest is not None:
            help_text = "The policy version of the fleet's weights; absent until somebody has told it."
            yield GaugeMetricFamily("orchestrrl_policy_version", help_text, newest)
        yield labelled_gauge(
            "orchestrrl_worker_policy_version",
            "Of an engine's weights; with one other than the fleet's it gets no requests; absent where not known.",
            "engine",
            [(engine.id, engine.policy_version) for engine in engines],
        )
        yield labelled_counter(
            "orchestrrl_requests_cancelled",
            "Requests that the daemon had gateways end: somebody asked for it, or their group had enough over all "
            "gateways. Those that gateways ended by themselves are their metrics.",
            "reason",
            ended.items(),
        )

    def _decisions(self, now_s: float) -> Iterator[Metric]:
        plane, latest = self._control_plane, self._control_plane.plans.latest
        ages = []
        if plane.balance:
            ages.append(("fast", now_s - plane.balance.decided_s))
        if latest:
            ages.append(("slow", now_s - latest.created_s))
        if plane.balance:
            policies = [(name, float(name == plane.balance.policy.name)) for name in ("packing", "load_index", "none")]
            yield labelled_gauge(
                "orchestrrl_balance_policy", "1 for how the fast loop chooses moves.", "policy", policies
            )
        yield labelled_gauge("orchestrrl_decision_age_seconds", "Since the latest decision of a loop.", "loop", ages)
        seconds = [("fast", plane.fast_tick_s), ("slow", plane.slow_tick_s)]
        yield labelled_gauge("orchestrrl_loop_seconds", "What the latest turn of a loop took.", "loop", seconds)

    def _plans(self) -> Iterator[Metric]:
        yield from self._calibration()
        latest = self._control_plane.plans.latest
        if latest is not None:
            seconds = [
                ("current", latest.current_makespan_s),
                ("proposed", latest.proposed_total_s),
                ("switch_cost", latest.redeploy_cost_s),
                ("migration_cost", latest.migration_cost_s),
                ("lower_bound", latest.lower_bound_s or None),
            ]
            yield labelled_gauge(
                "orchestrrl_plan_seconds",
                "Seconds to the step's end by the latest plan: as it stands and as proposed, costs included; what the "
                "costs are; and before which it cannot end.",
                "of",
                seconds,
            )
        done = next((plan for plan in self._control_plane.plans.newest(0) if plan.actual_makespan_s is not None), None)
        if done is None or done.actual_makespan_s is None:
            return
        if done.predicted_s is not None:
            help_text = "Seconds to the step's end, as the latest plan with a known outcome had predicted them."
            yield GaugeMetricFamily("orchestrrl_plan_predicted_makespan_seconds", help_text, done.predicted_s)
        help_text = "Seconds from that plan to the step's end, as they really were."
        yield GaugeMetricFamily("orchestrrl_plan_actual_makespan_seconds", help_text, done.actual_makespan_s)

    def _calibration(self) -> Iterator[Metric]:
        plans = self._control_plane.plans
        calibration = plans.calibration
        if calibration.error is not None and calibration.bias is not None:
            help_text = "Running mean of |predicted - actual| / actual seconds to a step's end."
            yield GaugeMetricFamily("orchestrrl_plan_calibration_error_ratio", help_text, calibration.error)
            help_text = "Running mean of (predicted - actual) / actual: above 0 where steps end sooner than predicted."
            yield GaugeMetricFamily("orchestrrl_plan_calibration_bias_ratio", help_text, calibration.bias)
        help_text = "Ended steps that the calibration rests on."
        yield CounterMetricFamily("orchestrrl_plan_calibration_steps", help_text, calibration.steps)
        help_text = "What predicted decoding seconds are multiplied with, from how earlier steps came out."
        yield GaugeMetricFamily("orchestrrl_plan_correction_ratio", help_text, calibration.correction)
        if plans.last_redeploy_s is not None:
            help_text = "Since engines were last changed by a plan."
            age_s = self._control_plane.clock.now_s() - plans.last_redeploy_s
            yield GaugeMetricFamily("orchestrrl_deployment_age_seconds", help_text, age_s)

    def _profile(self, snapshot: Snapshot) -> Iterator[Metric]:
        sources = Counter(
            told.source or "unknown" for told in self._control_plane.planning.step_times(snapshot).values()
        )
        yield labelled_gauge(
            "orchestrrl_workers_by_step_times",
            "Engines by where their step times come from; observed: learnt from batches, without a prior.",
            "source",
            [(source, sources[source]) for source in ("configured", "prior", "observed", "unknown")],
        )
        estimates = self._control_plane.planning.costs.estimates()
        yield labelled_gauge(
            "orchestrrl_profile_predicted_step_ratio",
            "Predicted over measured seconds of a decode step, running mean; absent until something was measured.",
            "configuration",
            [(estimate.profile.id, estimate.predicted_ratio) for estimate in estimates],
        )
        yield labelled_gauge(
            "orchestrrl_profile_step_time_factor",
            "Step times as they are now believed, against the configured ones, at the loads seen last.",
            "configuration",
            [(estimate.profile.id, estimate.factor) for estimate in estimates],
        )
        yield labelled_gauge(
            "orchestrrl_profile_fit_error_ratio",
            "Mean relative error of the curves in use against what they were fitted to; absent where nothing was.",
            "configuration",
            [(estimate.profile.id, estimate.profile.provenance.fit_error_mean) for estimate in estimates],
        )
        yield labelled_counter(
            "orchestrrl_profile_batches",
            "Batches of engines whose step time was measured; refused: no engine of the configuration could be so.",
            ("configuration", "result"),
            [((each.profile.id, name), getattr(each, name)) for each in estimates for name in ("taken", "refused")],
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


def pause_metrics(paused: Iterable[PauseScope]) -> Metric:
    there = set(paused)
    parts = [(part, float(part in there)) for part in PauseScope]
    return labelled_gauge("orchestrrl_paused", "1 while an operator has paused this part.", "part", parts)


def defect_metrics(daemon: Daemon) -> Metric:
    parts = {
        "circuits": daemon.circuits,
        "fabric": daemon.fabric,
        "generation": daemon.gen_circuits,
        "routes": daemon.routing,
        "weights": daemon.weights.syncs,
    }
    counts = daemon.fleet.defects.counts
    return labelled_counter(
        "orchestrrl_defects",
        "Exceptions that ended one turn of a loop or task, or one call. Its work was set aside; the log has their "
        "tracebacks.",
        "part",
        [
            *((name, part.defects) for name, part in parts.items() if part is not None),
            *((name, counts[name]) for name in sorted({*ACTING, *counts})),
        ],
    )
