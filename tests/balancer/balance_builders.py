"""Requests on engines, by the little that the balancer's rules see of them."""

from planner.model import EngineId, RequestId, RequestState, RequestView


def held_request(name: str, context_tokens: int, state: RequestState = RequestState.RUNNING) -> RequestView:
    """Return a request that has generated nothing; the engine that holds it lists it."""
    return RequestView(RequestId(name), EngineId("any"), state, context_tokens, 0)


def running(*contexts: tuple[str, int]) -> tuple[RequestView, ...]:
    return tuple(held_request(name, tokens) for name, tokens in contexts)


def waiting(*contexts: tuple[str, int]) -> tuple[RequestView, ...]:
    return tuple(held_request(name, tokens, RequestState.WAITING) for name, tokens in contexts)
