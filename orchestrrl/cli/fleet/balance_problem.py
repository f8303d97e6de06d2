"""The problem of `orchestrrl balance` as a document."""

from pydantic import Field

from balancer.load_index import Problem, Request, Worker
from orchestrrl.cli.problem import ProblemPart, unique
from planner.model import EngineId, RequestId


class RequestPart(ProblemPart):
    id: str
    context_tokens: int = Field(ge=0)


class WorkerPart(ProblemPart):
    id: str
    running: list[RequestPart]
    waiting: list[RequestPart]
    kv_capacity_tokens: int = Field(ge=0)
    kv_free_tokens: int = Field(ge=0)
    max_sequences: int = Field(ge=0)
    decode_tokens_per_s: float | None = Field(ge=0)


class BalanceProblem(ProblemPart):
    theta: float = Field(ge=0)
    workers: list[WorkerPart]


CHECKS = (unique("workers[].id"), unique("workers[].running[].id", "workers[].waiting[].id"))


def problem_of(read: BalanceProblem) -> Problem:
    return Problem(
        read.theta,
        tuple(
            Worker(
                id=EngineId(worker.id),
                running=_requests(worker.running),
                waiting=_requests(worker.waiting),
                kv_capacity_tokens=worker.kv_capacity_tokens,
                kv_free_tokens=worker.kv_free_tokens,
                max_sequences=worker.max_sequences,
                decode_tokens_per_s=worker.decode_tokens_per_s,
            )
            for worker in read.workers
        ),
    )


def _requests(parts: list[RequestPart]) -> tuple[Request, ...]:
    return tuple(Request(RequestId(part.id), part.context_tokens) for part in parts)
