"""What the quick generation loop keeps of requests and engines, and the snapshot that planner and balancer get.

What agents and a gateway would tell, without their delays: every age is 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.rl.kv_moves import Leaving
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.model import (
    EngineHealth,
    EngineId,
    EngineView,
    FinishedLength,
    GpuId,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)


@dataclass(slots=True)
class LiveRequest:
    request: SimRequest
    engine: EngineId
    generated: int = 0
    moves: int = 0
    moved_s: float | None = None

    @property
    def context_tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


@dataclass(slots=True)
class LiveEngine:
    """One engine. It answers from `ready_s` on; its requests wait until then."""

    id: EngineId
    kind: EngineKind
    gpus: tuple[GpuId, ...]
    ready_s: float
    scheduler: Scheduler
    seen: tuple[float, int] = (0.0, 0)  # when its rate was last looked at, and its tokens then
    decode_tokens_per_s: float | None = None

    @classmethod
    def start(cls, id: EngineId, kind: EngineKind, gpus: tuple[GpuId, ...], ready_s: float) -> "LiveEngine":
        return cls(id, kind, gpus, ready_s, Scheduler(kind.shape, ready_s), (ready_s, 0))

    def submit(self, live: LiveRequest, at_s: float, *, prefilled: bool) -> None:
        live.request.submit(self.scheduler, max(at_s, self.ready_s), live.generated, prefilled=prefilled)

    def update_rate(self, now_s: float, window_s: float) -> None:
        """Take its rate over the last window."""
        since_s, tokens = self.seen
        if now_s - since_s >= window_s:
            made = self.scheduler.generated_tokens_total
            self.decode_tokens_per_s = (made - tokens) / (now_s - since_s) if self.scheduler.running else None
            self.seen = now_s, made


def leaving_of(live: LiveRequest, source: LiveEngine, kind: EngineKind, gpus: tuple[GpuId, ...]) -> Leaving:
    return Leaving(
        live.request.id,
        (source.kind.profile.parallelism, source.gpus),
        (kind.profile.parallelism, gpus),
        kind.profile.prefill_tokens_per_s,
        live.context_tokens,
    )


def snapshot_of(
    now_s: float,
    started_s: float,
    engines: Mapping[EngineId, LiveEngine],
    requests: Iterable[LiveRequest],
    finished: tuple[FinishedLength, ...],
) -> Snapshot:
    running = {sequence.id for engine in engines.values() for sequence in engine.scheduler.running}
    return Snapshot(
        now_s=now_s,
        engines=tuple(_engine_view(engines[id]) for id in sorted(engines)),
        requests=tuple(sorted((_request_view(each, running) for each in requests), key=lambda view: view.id)),
        finished_output_tokens=tuple(each.tokens for each in finished),
        requests_age_s=0.0,
        step_started_s=started_s,
        finished=finished,
    )


def _engine_view(engine: LiveEngine) -> EngineView:
    scheduler, shape = engine.scheduler, engine.scheduler.shape
    capacity_tokens = shape.blocks * shape.block_tokens
    return EngineView(
        id=engine.id,
        url="",
        configuration=engine.kind.id,
        health=EngineHealth.OK,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_capacity_tokens=capacity_tokens,
        kv_free_tokens=capacity_tokens - scheduler.kv_used_tokens,
        max_sequences=engine.kind.profile.max_sequences,
        decode_tokens_per_s=engine.decode_tokens_per_s,
        age_s=0.0,
        gpus=engine.gpus,
        preemptions_total=scheduler.preemptions_total,
    )


def _request_view(live: LiveRequest, running: set[RequestId]) -> RequestView:
    request = live.request
    return RequestView(
        id=request.id,
        engine=live.engine,
        state=RequestState.RUNNING if request.id in running else RequestState.WAITING,
        prompt_tokens=request.prompt_tokens,
        generated_tokens=live.generated,
        max_tokens=request.max_tokens,
        group=request.group,
        moves=live.moves,
    )
