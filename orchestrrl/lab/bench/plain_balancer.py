"""The fast loop's rules, carried out the plain way: every index and every spread anew for every move that is tried.

For fleets without stalled workers. It gives the moves of `balancer.load_index_moves.decide`, which is measured against
it.
"""

from dataclasses import replace

from balancer.load_index import BalanceProblem, Worker, concurrency_cap, load_index, stand_in_tokens_per_s
from balancer.load_index_moves import Move
from planner.model import EngineId, RequestId, RequestState, RequestView

_Fleet = dict[EngineId, Worker]


class PlainBalancer:
    def __init__(self, problem: BalanceProblem) -> None:
        if any(worker.stalled for worker in problem.workers):
            raise ValueError("a stalled worker is not what this is for")
        self._theta = problem.theta
        self._fleet = {worker.id: worker for worker in problem.workers}
        self._tokens_per_s = stand_in_tokens_per_s(problem.workers)
        contexts = [request.context_tokens for worker in problem.workers for request in worker.requests]
        self._all = len(contexts), sum(contexts)

    def moves(self) -> list[Move]:
        """Every request moves once at most."""
        moves: list[Move] = []
        set_aside: set[EngineId] = set()
        while self._spread(self._fleet) > self._theta and len(set_aside) < len(self._fleet):
            congested = [worker for worker in self._fleet.values() if worker.id not in set_aside]
            source = min(congested, key=lambda worker: (-self._index(worker), worker.id))
            found = self._find(source, {move.request for move in moves})
            if found is None:
                set_aside.add(source.id)
                continue
            move, self._fleet = found
            moves.append(move)
        return moves

    def _find(self, source: Worker, moved: set[RequestId]) -> tuple[Move, _Fleet] | None:
        """The first move off `source` that lowers the spread, and the fleet after it."""
        spread = self._spread(self._fleet)
        others = [worker for worker in self._fleet.values() if worker is not source]
        destinations = sorted(others, key=lambda worker: (self._index(worker), worker.id))
        for state, queue in ((RequestState.WAITING, source.waiting), (RequestState.RUNNING, source.running)):
            for request in sorted(queue, key=lambda request: (request.context_tokens, request.id)):
                for destination in destinations:
                    if request.id in moved or request.context_tokens > destination.kv_free_tokens:
                        continue
                    left, arrived = _without(source, request, state), _having(destination, request)
                    if self._cap(arrived) < min(self._cap(destination), len(arrived.requests)):
                        continue
                    after = {**self._fleet, left.id: left, arrived.id: arrived}
                    if self._spread(after) < spread:
                        return Move(request.id, source.id, destination.id, state), after
        return None

    def _spread(self, fleet: _Fleet) -> float:
        indices = [self._index(worker) for worker in fleet.values()]
        return max(indices, default=0.0) - min(indices, default=0.0)

    def _index(self, worker: Worker) -> float:
        return load_index(len(worker.requests), self._cap(worker), worker.decode_tokens_per_s or self._tokens_per_s)

    def _cap(self, worker: Worker) -> int:
        held = worker.requests
        context_tokens = sum(request.context_tokens for request in held)
        return concurrency_cap(
            len(worker.running), len(held), context_tokens, worker.kv_free_tokens, worker.max_sequences, self._all
        )


def _without(worker: Worker, request: RequestView, state: RequestState) -> Worker:
    if state is RequestState.WAITING:
        return replace(worker, waiting=tuple(other for other in worker.waiting if other is not request))
    return replace(
        worker,
        running=tuple(other for other in worker.running if other is not request),
        kv_free_tokens=worker.kv_free_tokens + request.context_tokens,
    )


def _having(worker: Worker, request: RequestView) -> Worker:
    """It runs at once where a slot is free; that it has the room is known."""
    if len(worker.running) >= worker.max_sequences:
        return replace(worker, waiting=(*worker.waiting, request))
    return replace(
        worker,
        running=(*worker.running, request),
        kv_free_tokens=worker.kv_free_tokens - request.context_tokens,
    )
