"""A fake controller that runs redeployments without engines: steps take a set time, and fail as configured."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operation import Chain, OperationState, Stage, StepDirection, StepReport, StepState, steps_in
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentId,
    RedeploymentReport,
    RedeployRequest,
    StepKind,
    stages_back,
    stages_of,
)
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism, PlanId

GPUS = 16
# Multiples of the pace.
SLOWNESS = {StepKind.READY: 8.0, StepKind.START: 2.0, StepKind.STOP: 2.0, StepKind.LOAD: 3.0}
WIDTHS = {"tp1": 1, "tp2": 2, "tp4": 4, "tp8": 8}


def spec(engine: str, configuration: str, first_gpu: int) -> EngineSpec:
    width = WIDTHS[configuration]
    gpus = tuple(GpuId(first_gpu + index) for index in range(width))
    return EngineSpec(EngineId(engine), ConfigurationId(configuration), Parallelism(tp=width), gpus)


def fleet(configuration: str, number: int, name: str = "e") -> tuple[EngineSpec, ...]:
    width = WIDTHS[configuration]
    return tuple(spec(f"{name}{index}", configuration, index * width) for index in range(number))


class FakeSwitching:
    """A fake redeployment controller of 16 GPUs with eight tp2 engines. `pace_s` is the duration of each step;
    `failing` maps steps to their faults."""

    def __init__(self, clock: Clock, pace_s: float = 0.0) -> None:
        self.clock = clock
        self.pace_s = pace_s
        self.failing: dict[tuple[StepDirection, StepKind], str] = {}
        self.held = asyncio.Event()  # no step begins while it is clear
        self.held.set()
        self.remembered = 256
        self.remark = ""  # the detail of a redeployment that is done
        self.wishes: list[RedeployRequest] = []
        self.engines = fleet("tp2", GPUS // 2)
        self.reports: dict[RedeploymentId, RedeploymentReport] = {}
        self.watchers = 0
        self._called_off = ""
        self._fenced_s: float | None = None
        self._changed = asyncio.Condition()
        self._running: asyncio.Task[None] | None = None

    # --- the controller's interface

    def draft(self, wish: RedeployRequest) -> tuple[Redeployment, tuple[Stage, ...]]:
        self.wishes.append(wish)
        if self._running is not None and not self._running.done():
            raise Permanent("redeployment s1 is under way: watch it with `orchestrrl redeploy`")
        faults, new, next_gpu = [], [], 0
        if not wish.targets and not wish.plan:
            faults.append("targets: must name a configuration, or plan_id a plan, got neither")
        if wish.plan and wish.plan != "p1":
            faults.append(f"plan_id: must be one of p1, got {wish.plan!r}")
        for index, (configuration, number) in enumerate(wish.targets or (("tp8", 2),)):
            if configuration not in WIDTHS:
                known = ", ".join(WIDTHS)
                faults.append(f"targets[{index}].configuration: must be one of {known}, got {configuration!r}")
                continue
            width = WIDTHS[configuration]
            wanted = number or (GPUS - next_gpu) // width
            if next_gpu + wanted * width > GPUS:
                faults.append(f"targets[{index}].engines: take more GPUs than the {GPUS - next_gpu} left, got {wanted}")
                continue
            for n in range(wanted):
                new.append(self._like(spec(f"{configuration}-{index}.{n}", configuration, next_gpu)))
                next_gpu += width
        if faults:
            raise ProblemFaults(faults)
        id = RedeploymentId(f"s{len(self.reports) + 1}")
        redeployment = Redeployment(id, PlanId(wish.plan), wish.reason, self.clock.now_s(), self.engines, tuple(new))
        return redeployment, stages_of(redeployment) if redeployment.leaving or redeployment.coming else ()

    def begin(self, wish: RedeployRequest) -> RedeploymentId:
        redeployment, stages = self.draft(wish)
        self._called_off, self._fenced_s = "", None
        steps = tuple(StepReport(step, StepDirection.FORWARD) for step in steps_in(stages))
        engines = tuple(engine.engine for engine in redeployment.old)
        self.reports[redeployment.id] = RedeploymentReport(
            redeployment.id, redeployment.plan, redeployment.reason, redeployment.created_s,
            OperationState.RUNNING, redeployment.old, redeployment.new, engines, steps,
        )  # fmt: skip
        self._running = asyncio.ensure_future(self._run(redeployment))
        return redeployment.id

    def report(self, id: str = "") -> RedeploymentReport:
        if not self.reports:
            raise Permanent("no redeployment has been made yet")
        wanted = RedeploymentId(id) if id else next(reversed(self.reports))
        if wanted not in self.reports:
            raise Permanent(f"no redeployment {id!r}")
        return self.reports[wanted]

    async def watch(self, id: str) -> AsyncIterator[RedeploymentReport]:
        self.watchers += 1
        try:
            seen = self.report(id)
            yield seen
            while seen.state is OperationState.RUNNING:
                async with self._changed:
                    while self.report(id) == seen:
                        await self._changed.wait()
                seen = self.report(id)
                yield seen
        finally:
            self.watchers -= 1

    def cancel(self, id: str, reason: str) -> RedeploymentReport:
        if self._running is None or self._running.done() or id not in ("", self.report().id):
            raise Permanent(f"redeployment {id} is not running" if id else "no redeployment is running")
        report = self.report(id)
        self._called_off = f"called off: {reason}"
        self.held.set()
        return report

    def history(self, limit: int) -> list[RedeploymentReport]:
        newest = list(reversed(self.reports.values()))[: self.remembered]
        return newest[:limit] if limit else newest

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    # --- inside

    def _like(self, wanted: EngineSpec) -> EngineSpec:
        """Return the existing engine with this configuration and GPUs, or `wanted`."""
        same = [e for e in self.engines if (e.configuration, e.gpus) == (wanted.configuration, wanted.gpus)]
        return same[0] if same else wanted

    async def _run(self, redeployment: Redeployment) -> None:
        why = await self._direction(redeployment, StepDirection.FORWARD, stages_of(redeployment))
        state, detail = OperationState.DONE, self.remark
        if why:
            self._set(redeployment.id, steps=self._skipped(redeployment.id))
            stages = stages_back(redeployment, {e.engine for e in redeployment.coming})
            back = tuple(StepReport(step, StepDirection.BACK) for step in steps_in(stages))
            self._set(redeployment.id, steps=(*self.reports[redeployment.id].steps, *back), detail=why)
            missing = await self._direction(redeployment, StepDirection.BACK, stages)
            state, detail = OperationState.DEGRADED if missing else OperationState.ROLLED_BACK, why
            if missing:
                self.engines = redeployment.old[1:]
                detail = f"{why}; {missing}"
        else:
            self.engines = redeployment.new
        self._set(
            redeployment.id,
            state=state,
            detail=detail,
            ended_s=self.clock.now_s(),
            engines=tuple(engine.engine for engine in self.engines),
        )
        await self._tell()

    async def _direction(self, redeployment: Redeployment, direction: StepDirection, stages: Sequence[Stage]) -> str:
        """Run the stages of a direction. Return why it stopped early, or an empty string."""
        for stage in stages:
            whys = await asyncio.gather(*(self._chain(redeployment, direction, chain) for chain in stage))
            for why in filter(None, whys):
                return why
        return ""

    async def _chain(self, redeployment: Redeployment, direction: StepDirection, chain: Chain) -> str:
        for step in chain:
            await self.held.wait()
            if self._called_off and direction is StepDirection.FORWARD:
                return self._called_off
            began_s = self.clock.now_s()
            self._fenced_s = began_s if step.kind is StepKind.FENCE else self._fenced_s
            self._step(redeployment.id, StepReport(step, direction, StepState.RUNNING, "", began_s))
            await self._tell()
            await self.clock.sleep(self.pace_s * SLOWNESS.get(step.kind, 1.0))
            elapsed_s = self.clock.now_s() - began_s
            # Of the engines that are worked on in parallel, only the first fails.
            first = step.engine is None or step.engine in (redeployment.coming[0].engine, redeployment.old[0].engine)
            fault = self.failing.get((direction, step.kind), "") if first else ""
            state = StepState.FAILED if fault else StepState.DONE
            self._step(redeployment.id, StepReport(step, direction, state, fault, began_s, elapsed_s))
            await self._tell()
            if fault:
                return f"{step.kind} of {step.engine or 'the fleet'}: {fault}"
            if step.kind is StepKind.EVACUATE:
                report = self.reports[redeployment.id]
                parked = report.requests_parked + 3
                self._set(redeployment.id, requests_moved=report.requests_moved + 1, requests_parked=parked)
            if step.kind is StepKind.ADMIT and direction is StepDirection.FORWARD and self._fenced_s is not None:
                self._set(redeployment.id, closed_s=self.clock.now_s() - self._fenced_s)
        return ""

    def _skipped(self, id: RedeploymentId) -> tuple[StepReport, ...]:
        pending = StepState.PENDING
        return tuple(
            replace(each, state=StepState.SKIPPED) if each.state is pending else each for each in self.reports[id].steps
        )

    def _step(self, id: RedeploymentId, reported: StepReport) -> None:
        key = reported.direction, reported.step.number
        steps = self.reports[id].steps
        self._set(id, steps=tuple(reported if (s.direction, s.step.number) == key else s for s in steps))

    def _set(self, id: RedeploymentId, **changes: object) -> None:
        self.reports[id] = replace(self.reports[id], **changes)  # type: ignore[arg-type]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
