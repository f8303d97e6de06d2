"""The problem of `orchestrrl balance` as a document."""

from pydantic import Field

from balancer.load_index import Worker
from orchestrrl.cli.problem import ProblemPart, unique
from planner.model import EngineId, RequestId, RequestState, RequestView


class BalanceRequestPart(ProblemPart):
    id: str
    context_tokens: int = Field(ge=0)


class WorkerPart(ProblemPart):
    id: str
    running: list[BalanceRequestPart]
    waiting: list[BalanceRequestPart]
    kv_capacity_tokens: int = Field(ge=0)
    kv_free_tokens: int = Field(ge=0)
    max_sequences: int = Field(ge=0)
    decode_tokens_per_s: float | None = Field(ge=0)


class BalanceDocument(ProblemPart):
    theta: float = Field(ge=0)
    workers: list[WorkerPart]


CHECKS = (unique("workers[].id"), unique("workers[].running[].id", "workers[].waiting[].id"))


def workers_of(read: BalanceDocument) -> list[Worker]:
    return [
        Worker(
            id=EngineId(worker.id),
            running=_requests(worker, RequestState.RUNNING),
            waiting=_requests(worker, RequestState.WAITING),
            kv_capacity_tokens=worker.kv_capacity_tokens,
            kv_free_tokens=worker.kv_free_tokens,
            max_sequences=worker.max_sequences,
            decode_tokens_per_s=worker.decode_tokens_per_s,
        )
        for worker in read.workers
    ]


def _requests(worker: WorkerPart, state: RequestState) -> tuple[RequestView, ...]:
    parts = worker.running if state is RequestState.RUNNING else worker.waiting
    return tuple(RequestView(RequestId(part.id), EngineId(worker.id), state, part.context_tokens, 0) for part in parts)
