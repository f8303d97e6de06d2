"""Run the same generation steps without and with OrchestrRL, compute an oracle's result, and return the outcome."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from orchestrrl.core.journal.store import EntryKind
from orchestrrl.lab.demo import stack
from orchestrrl.lab.demo.scenario import DemoScenario, Sample, expected_answers, samples
from orchestrrl.lab.demo.step import ComparedDemo, ComparedStep, DemoFleet, Report, connected
from orchestrrl.lab.demo.sync_run import SyncOutcome, run_sync
from orchestrrl.lab.sim.static import best_placed_s, lower_bound_s, placed_s
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from planner.model import MoveMethod

ALL_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class MethodMark:
    """The predicted and actual times of the moves by one method, as medians in engine seconds. A move is counted only
    if it succeeded, took time, and used the method for which its time was predicted."""

    method: str
    moves: int
    context_tokens: float  # median
    predicted_s: float
    actual_s: float
    predicted_over_actual: float  # of these medians
    other_s: float  # predicted time of the other method; 0 if it was not available


@dataclass(frozen=True, slots=True)
class OracleMark:
    """The result of an oracle that is given all output lengths, and a lower bound on the step's duration for any
    schedule."""

    makespan_s: float
    static_s: float  # the static placement, simulated in the same way
    lower_bound_s: float
    longest_tokens: int


@dataclass(slots=True)
class SeedOutcome(ComparedStep):
    oracle: OracleMark | None = None  # None for engines without a step-time model
    moves: int = 0
    tokens_recomputed: int = 0

    @property
    def oracle_ratio(self) -> float | None:
        return None if self.oracle is None else self.oracle.static_s / self.oracle.makespan_s


@dataclass(slots=True)
class DemoOutcome(ComparedDemo[SeedOutcome]):
    engine: str
    moves_by_method: list[MethodMark] = field(default_factory=list)
    sync: SyncOutcome | None = None  # None if the scenario has no new weights

    @property
    def ratio_median(self) -> float:
        return median(outcome.ratio for outcome in self.seeds)

    @property
    def oracle_ratio_median(self) -> float | None:
        ratios = [outcome.oracle_ratio for outcome in self.seeds if outcome.oracle_ratio is not None]
        return median(ratios) if ratios else None

    @property
    def gain_kept(self) -> float | None:
        """The fraction of the oracle's gain that OrchestrRL achieved, or None if there is no oracle or the oracle has
        no gain."""
        oracle_ratio = self.oracle_ratio_median
        if oracle_ratio is None or oracle_ratio <= 1:
            return None
        return (self.ratio_median - 1) / (oracle_ratio - 1)

    @property
    def limit(self) -> tuple[float, int, int] | None:
        """The time that the longest response of a step would take alone on an engine, as a fraction of the step's
        makespan. The value is a tuple for the seed with the largest fraction: the fraction, the response's number of
        tokens, and the seed. It is None if there is no oracle."""
        return max(
            (
                (outcome.oracle.lower_bound_s / outcome.shown.makespan_s, outcome.oracle.longest_tokens, outcome.seed)
                for outcome in self.seeds
                if outcome.oracle is not None
            ),
            default=None,
        )


async def run_demo(
    scenario: DemoScenario, engine: str, seeds: Sequence[int], out_dir: Path, report: Report
) -> DemoOutcome:
    """Run the step of every seed without OrchestrRL, and then with OrchestrRL on the same engines. Finally, sync new
    weights if the scenario has any."""
    async with _fleet(scenario, engine, out_dir, report) as (fleet, engines):
        outcomes = []
        for seed in seeds:
            step = samples(scenario, engine, seed)
            record = await fleet.run_step(step, f"without OrchestrRL, seed {seed}")
            outcomes.append(SeedOutcome(seed, step, record))
        report("starting OrchestrRL", 0, 0)
        async with stack.orchestrrl(scenario, engine, engines, out_dir) as control_plane:
            for outcome in outcomes:
                before, label = await control_plane.status(), f"with OrchestrRL, seed {outcome.seed}"
                outcome.shown = await fleet.run_step(outcome.samples, label, control_plane.gateway_url)
                await asyncio.sleep(5 * scenario.control.report_interval_s)  # until the last results are reported
                after = await control_plane.status()
                outcome.moves = after.moves_done - before.moves_done
                outcome.tokens_recomputed = after.tokens_recomputed - before.tokens_recomputed
            async with ControlClient(control_plane.daemon_address) as control:
                marks = await marks_by_method(control, scenario.speed)
            synced = None if scenario.sync is None else await run_sync(fleet, control_plane)
    for index, outcome in enumerate(outcomes if engine == "simulated" else ()):
        report("computing the oracle's result", index, len(outcomes))
        outcome.expected = await asyncio.to_thread(expected_answers, scenario, outcome.samples)
        outcome.oracle = await asyncio.to_thread(_oracle, scenario, outcome.samples)
    return DemoOutcome(scenario, outcomes, engine, marks, synced)


async def run_sync_demo(scenario: DemoScenario, engine: str, out_dir: Path, report: Report) -> SyncOutcome:
    """Run only the weight sync of the demo, and return its outcome."""
    async with _fleet(scenario, engine, out_dir, report) as (fleet, engines):
        report("starting OrchestrRL", 0, 0)
        async with stack.orchestrrl(scenario, engine, engines, out_dir) as control_plane:
            return await run_sync(fleet, control_plane)


@contextlib.asynccontextmanager
async def _fleet(
    scenario: DemoScenario, engine: str, out_dir: Path, report: Report
) -> AsyncIterator[tuple[DemoFleet, Sequence[LocalEngine]]]:
    report("starting the engines", 0, 0)
    async with (
        stack.engines(scenario, engine, out_dir) as running,
        connected(scenario, engine, [local.url for local in running], report) as fleet,
    ):
        yield fleet, running


def _oracle(scenario: DemoScenario, step: Sequence[Sample]) -> OracleMark:
    dealt: list[list[SimRequest]] = [[] for _ in range(scenario.engines)]
    for sample in step:
        dealt[sample.dealt_to].append(sample.request)
    requests, shape = [sample.request for sample in step], scenario.engine.shape
    return OracleMark(
        best_placed_s(shape, [requests[place :: scenario.engines] for place in range(scenario.engines)]),
        placed_s(shape, dealt),
        lower_bound_s(shape, requests),
        max(request.output_tokens for request in requests),
    )


# --- moves by method from the daemon's journal: predicted and actual seconds


async def marks_by_method(control: ControlClient, speed: float) -> list[MethodMark]:
    """Return one mark for each method by which the moves in the daemon's journal were made. `speed` is the number of
    engine seconds per wall-clock second."""
    wanted = control_pb2.WatchJournalRequest(
        tail=ALL_ENTRIES, kinds=[EntryKind.OPERATION_INTENT, EntryKind.OPERATION_RESULT]
    )
    orders: dict[tuple[str, str], Mapping[str, Any]] = {}
    moved: dict[MoveMethod, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {method: [] for method in MoveMethod}
    async for entry in control.control.WatchJournal(wanted):
        body = json.loads(entry.body_json)
        if entry.kind == EntryKind.OPERATION_INTENT:
            moves = body["operation"]["action"].get("moves", ())
            orders |= {(entry.subject_id, move["request"]): move for move in moves}
            continue
        for item in body["items"]:
            order = orders.get((entry.subject_id, item["id"]), {})
            is_as_ordered = order.get("predicted_s", 0) > 0 and order["method"] == item["method"]
            if is_as_ordered and item["done"] and item["duration_s"] > 0:
                moved[MoveMethod(item["method"])].append((order, item))
    return [_mark(method, pairs, speed) for method, pairs in moved.items() if pairs]


def _mark(method: MoveMethod, moved: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], speed: float) -> MethodMark:
    """Return the medians over the moves by one method. `moved` contains pairs of a move's order and its result."""
    predicted_s, other_s = (speed * median(order[name] for order, _ in moved) for name in ("predicted_s", "other_s"))
    actual_s = speed * median(item["duration_s"] for _, item in moved)
    context_tokens = median(item["loaded_tokens"] + item["recomputed_tokens"] for _, item in moved)
    return MethodMark(method, len(moved), context_tokens, predicted_s, actual_s, predicted_s / actual_s, other_s)
