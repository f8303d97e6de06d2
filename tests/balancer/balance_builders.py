"""Builders for requests on engines, with the few fields that the balancer reads."""

from planner.model import EngineId, RequestId, RequestState, RequestView


def held_request(name: str, context_tokens: int, state: RequestState = RequestState.RUNNING) -> RequestView:
    """Return a request without generated tokens, to be listed by its engine."""
    return RequestView(RequestId(name), EngineId("any"), state, context_tokens, 0)


def running(*contexts: tuple[str, int]) -> tuple[RequestView, ...]:
    return tuple(held_request(name, tokens) for name, tokens in contexts)


def waiting(*contexts: tuple[str, int]) -> tuple[RequestView, ...]:
    return tuple(held_request(name, tokens, RequestState.WAITING) for name, tokens in contexts)
