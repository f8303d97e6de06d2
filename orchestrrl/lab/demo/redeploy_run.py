"""Run the same step on a pinned fleet and on a fleet that the planner can redeploy, and return both outcomes."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.lab.demo.redeploy_stack import (
    ObservedFabric,
    RedeployStack,
    fabric_now,
    followed,
    redeploy_stack,
    site_of,
)
from orchestrrl.lab.demo.scenario import DemoScenario, Sample, expected_answers, samples
from orchestrrl.lab.demo.step import ComparedDemo, ComparedStep, DemoStepRecord, Report, connected
from orchestrrl.lab.testbed.processes import meanwhile
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from orchestrrl.rpc.plain_values import plain

LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class FlightSnapshot:
    """The requests in flight that the daemon lists at the Unix time `at_s`."""

    at_s: float
    engine_of: Mapping[str, str]  # request -> engine; an empty name means that the gateway holds it
    context_tokens: Mapping[str, int]  # request -> prompt and generated tokens


@dataclass(frozen=True, slots=True)
class Resumption:
    """The resumption of the requests that the gateway held during a redeployment. Each time is measured in wall-clock
    seconds, from the admission of requests to the new engines to a request's first new token."""

    requests: int
    context_tokens: int  # recomputed tokens of all requests
    predicted_s: float  # the plan's prediction for the last request
    median_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class ObservedRedeployment:
    """A redeployment that was caused by a plan. Times in the daemon's reports and plans are in wall-clock seconds."""

    report: Mapping[str, Any]
    plan: Mapping[str, Any]
    resumption: Resumption | None  # None if no held request was observed
    followed: Mapping[str, Any] | None  # the change of circuits; None if none was announced

    @property
    def redeploying_s(self) -> float:
        """The time, in wall-clock seconds, from the fence until requests were sent to the new engines."""
        closed_s = self.report["closed_s"]
        return 0.0 if closed_s is None else float(closed_s)

    @property
    def total_s(self) -> float:
        """The time, in wall-clock seconds, from the fence until the last held request continued."""
        return self.redeploying_s + (self.resumption.last_s if self.resumption else 0.0)

    @property
    def predicted_gain_s(self) -> float:
        return float(self.plan["current_makespan_s"] - self.plan["predicted_s"])


@dataclass(slots=True, kw_only=True)
class RedeploySeed(ComparedStep):
    """The step of one seed, run once with the planner pinned (the baseline) and once with the planner free. The times
    in the two step records are in engine seconds. The fields of this class describe the free run, in wall-clock
    seconds."""

    began_s: float
    snapshots: list[FlightSnapshot]
    fabric_before: ObservedFabric
    fabric_after: ObservedFabric
    redeployments: list[ObservedRedeployment] = field(default_factory=list)
    failed_redeployments: list[Mapping[str, Any]] = field(default_factory=list)


RedeployDemo = ComparedDemo[RedeploySeed]


async def run_redeploy_demo(
    scenario: DemoScenario, seeds: Sequence[int], out_dir: Path, report: Report
) -> RedeployDemo:
    """Run the step of every seed twice: first with the planner pinned, then with a planner that is released once the
    step has started."""
    report("starting OrchestrRL and the engines", 0, 0)
    outcomes = []
    async with redeploy_stack(scenario, out_dir) as stack:
        site = site_of(stack.deployment)
        await stack.begin_with(stack.deployment.standby, "start the standby engines")
        for seed in seeds:
            step = samples(scenario, "simulated", seed)
            await stack.begin_with(stack.deployment.initial, "initial fleet of a step")
            await stack.pin()
            pinned, *_ = await _run(scenario, stack, step, report, f"pinned, seed {seed}")
            known = {redeployment["redeployment_id"] for redeployment in await _redeployments(stack.control)}
            before, label = await fabric_now(stack.control, site), f"free to redeploy, seed {seed}"
            # Released after submission: engines are frozen until then, and a redeployment would cost no step time.
            free, began_s, looks = await _run(scenario, stack, step, report, label, stack.release)
            outcome = RedeploySeed(
                seed,
                step,
                pinned,
                free,
                expected_answers(scenario, step),
                began_s=began_s,
                snapshots=looks,
                fabric_before=before,
                fabric_after=await fabric_now(stack.control, site),
            )
            await _add_redeployments(outcome, stack.control, known)
            outcomes.append(outcome)
    return RedeployDemo(scenario, outcomes)


async def _run(
    scenario: DemoScenario,
    stack: RedeployStack,
    step: Sequence[Sample],
    report: Report,
    label: str,
    begun: Callable[[], Awaitable[None]] | None = None,
) -> tuple[DemoStepRecord, float, list[FlightSnapshot]]:
    """Run the step. Return its record, its start time as Unix time, and snapshots of the requests in flight. `begun` is
    called when the step has started."""
    control = stack.control
    urls = [worker.url for worker in (await stack.status()).workers]
    looks: list[FlightSnapshot] = []

    async def poll() -> None:
        with contextlib.suppress(OrchestrRLError):  # a busy daemon responds to the next poll
            listed = await control.call(control.control.ListRequests, control_pb2.ListRequestsRequest())
            at = {request.request_id: request.engine_id for request in listed.requests}
            tokens = {r.request_id: r.prompt_tokens + r.generated_tokens for r in listed.requests}
            looks.append(FlightSnapshot(time.time(), at, tokens))

    async with connected(scenario, "simulated", urls, report) as fleet, meanwhile(poll, LOOK_S):
        record = await fleet.run_step(step, label, stack.gateway_url, begun=begun)
        began_s = time.time() - record.makespan_s / scenario.speed
    await asyncio.sleep(5 * scenario.control.report_interval_s)  # until the last results are reported
    return record, began_s, looks


async def _add_redeployments(outcome: RedeploySeed, control: ControlClient, known: Collection[str]) -> None:
    for redeployment in await _redeployments(control):
        if redeployment["redeployment_id"] in known or not redeployment["plan_id"]:
            continue
        if redeployment["state"] == "done":
            wanted = control_pb2.GetPlanRequest(plan_id=redeployment["plan_id"])
            message = await control.call(control.control.GetPlan, wanted)
            plan = plain(message)
            resumed, circuits = resumption(redeployment, plan, outcome.snapshots), outcome.fabric_after
            seen = ObservedRedeployment(redeployment, plan, resumed, followed(redeployment, circuits))
            outcome.redeployments.append(seen)
        else:
            outcome.failed_redeployments.append(redeployment)


async def _redeployments(control: ControlClient) -> list[dict[str, Any]]:
    """Return the daemon's reports of all redeployments with their steps, oldest first."""
    listed = await control.call(control.control.ListRedeployments, control_pb2.ListRedeploymentsRequest())
    reports = []
    for redeployment in sorted(listed.redeployments, key=lambda redeployment: redeployment.created_unix_s):
        wanted = control_pb2.GetRedeploymentRequest(redeployment_id=redeployment.redeployment_id)
        message = await control.call(control.control.GetRedeployment, wanted)
        reports.append(plain(message))
    return reports


def resumption(
    report: Mapping[str, Any], plan: Mapping[str, Any], snapshots: Sequence[FlightSnapshot]
) -> Resumption | None:
    """Return the resumption of held requests as observed in snapshots, or None if no resumed request was observed. The
    function has no side effects."""
    admitted = [step["began_unix_s"] + step["elapsed_s"] for step in report["steps"] if step["kind"] == "admit"]
    fenced = [step["began_unix_s"] for step in report["steps"] if step["kind"] == "fence"]
    if not admitted or not fenced:
        return None
    left = {engine["engine_id"] for engine in report["old_engines"]}
    left -= {engine["engine_id"] for engine in report["new_engines"]}
    held: dict[str, int] = {}  # request of a stopped engine -> its context tokens at admission
    for look in snapshots:
        if look.at_s < fenced[0]:
            held = {request: look.context_tokens[request] for request, e in look.engine_of.items() if e in left}
        elif look.at_s < admitted[0]:
            held = {request: look.context_tokens.get(request, tokens) for request, tokens in held.items()}
    first: dict[str, float] = {}
    for look in snapshots:
        if look.at_s >= admitted[0]:
            for request, tokens in look.context_tokens.items():
                if request in held and tokens > held[request]:
                    first.setdefault(request, look.at_s - admitted[0])
    if not first:
        return None
    predicted_s = max((float(instance["migration_s"]) for instance in plan["instances"]), default=0.0)
    tokens, after_s = sum(held[request] for request in first), first.values()
    return Resumption(len(first), tokens, predicted_s, median(after_s), max(after_s))
