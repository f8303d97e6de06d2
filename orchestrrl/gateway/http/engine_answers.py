"""Write an engine's answer to a client with its status, headers and body unchanged."""

import json
from collections.abc import Callable

from orchestrrl.engines.exchange import EngineConnection
from orchestrrl.gateway.http.connections import HttpAnswer, HttpConnection
from orchestrrl.gateway.http.field_types import HttpRefusal, name_set
from orchestrrl.gateway.http.responses import error_body

# An answer up to this size is held until it is complete, so that another engine can answer if this one fails.
MOST_HELD_BYTES = 4 << 20
_EVENT_STREAM = "text/event-stream"
# Headers of one connection alone (RFC 9110, 7.6.1).
HOP_BY_HOP = name_set(
    """
    connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade
    """
)
_OWN_HEADERS = HOP_BY_HOP | name_set("content-length content-type date server")  # written by the gateway


class AnswerWriter:
    """Writes the answer to one request."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._streams = False  # the client has received a part of an event stream

    @property
    def begun(self) -> bool:
        """Return whether the client has received a part of the answer."""
        return self._connection.answered

    async def write(
        self,
        answer: EngineConnection,
        on_data: Callable[[bytes], None] = lambda _: None,
        on_begin: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Write the whole answer. `on_data` is called with each part of the body that arrives, and `on_begin` before
        the client receives anything. Returns the body if it was held until it was complete, else b"". Raises the errors
        of the engine's client."""
        form = form_of(answer)
        events = form.content_type.startswith(_EVENT_STREAM)
        held = bytearray()
        while data := await answer.read():
            on_data(data)
            held += data
            if events or self.begun or len(held) > MOST_HELD_BYTES:
                on_begin()
                self._streams = events
                self._connection.piece(bytes(held), form=form)
                held.clear()
                await self._connection.drain()
        on_begin()
        if self.begun:
            self._connection.piece(b"", last=True)
        else:
            self._connection.whole(form._replace(body=bytes(held)))
        return bytes(held)

    def fail(self, message: str, status: int) -> None:
        """Report a failure. If the client has received a part of an event stream, the failure is an event. Otherwise, a
        begun answer is broken off. Raises HttpRefusal if the client has received nothing."""
        if not self.begun:
            raise HttpRefusal(message, status=status)
        if not self._streams:
            self._connection.cut()
            return
        error = json.dumps(error_body(message, status), separators=(",", ":"))
        self._connection.piece(f"\n\nevent: error\ndata: {error}\n\n".encode(), last=True)


def form_of(answer: EngineConnection) -> HttpAnswer:
    """Return the status and headers of an engine's answer, without the headers of its connection."""
    headers = {name: _text(value) for name, value in answer.headers.items()}
    dropped = _OWN_HEADERS | {name.strip().lower() for name in headers.get("connection", "").split(",")}
    kept = {name: value for name, value in headers.items() if name not in dropped}
    return HttpAnswer(b"", answer.status, headers.get("content-type", "application/octet-stream"), kept)


def _text(value: str) -> str:
    """Return a header's value in the form in which the gateway writes headers."""
    return value.encode("latin-1").decode("utf-8", "surrogateescape")
