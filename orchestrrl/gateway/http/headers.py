"""Choose the headers of a client's request that go on to engines. Pure."""

from collections.abc import Iterable

from orchestrrl.gateway.http.field_types import name_set

# Of the client's connection alone (RFC 9110, 7.6.1).
_HOP_BY_HOP = name_set(
    """
    connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade
    """
)
# The gateway sets these for each attempt, reads them itself, or they describe a body or an answer that it rewrites.
_OWN = name_set(
    """
    accept accept-charset accept-encoding expect host if-match if-modified-since if-none-match if-range
    if-unmodified-since range x-group-id x-request-id x-tag
    """
)
KEPT_HERE = _HOP_BY_HOP | _OWN


def end_to_end(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the headers that are meant for the engine, in their order: `Authorization`, `X-Session-ID`, `traceparent`
    and whatever else is neither the connection's nor the gateway's own."""
    passed_on = [
        (name, value) for name, value in headers if name.lower() not in _OWN and not name.lower().startswith("content-")
    ]
    named = {
        token.strip().lower() for name, value in passed_on if name.lower() == "connection" for token in value.split(",")
    }
    return tuple((name, value) for name, value in passed_on if name.lower() not in _HOP_BY_HOP | named)
