"""The engines that hold the responses of /v1/responses. vLLM keeps a response in the memory of one server. This module
performs no I/O."""

import json
from collections import OrderedDict

from orchestrrl.engines.openai_chunks import ServerSentEvents
from planner.model import EngineId

MOST_RESPONSES = 65_536


class ResponseOwners:
    """The engines of the responses that were created or used last, by response id."""

    def __init__(self, most: int = MOST_RESPONSES) -> None:
        self._most = most
        self._engines: OrderedDict[str, EngineId] = OrderedDict()

    def remember(self, response: str, engine: EngineId) -> None:
        self._engines[response] = engine
        self._engines.move_to_end(response)
        while len(self._engines) > self._most:
            self._engines.popitem(last=False)

    def get(self, response: str) -> EngineId | None:
        """Return the engine that holds the response, or None if it is unknown."""
        if response in self._engines:
            self._engines.move_to_end(response)
        return self._engines.get(response)


def response_id(document: bytes) -> str | None:
    """Return the id of the response in a JSON document, which is the response itself or an event with the response.
    Return None if there is none."""
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        return None
    response = found.get("response", found) if isinstance(found, dict) else None
    name = response.get("id") if isinstance(response, dict) else None
    return name if isinstance(name, str) else None


class FirstEvent:
    """Finds the first event of a stream."""

    def __init__(self) -> None:
        self._events: ServerSentEvents | None = ServerSentEvents()

    def feed(self, data: bytes) -> bytes | None:
        """Return the content of the first event once it is complete, and None at all other calls."""
        if self._events is None:
            return None
        try:
            complete = self._events.feed(data)
        except ValueError:  # the event is too long
            self._events = None
            return None
        if not complete:
            return None
        self._events = None
        return complete[0]
