"""Derive the text of an answer from the chunks of an engine that continues it."""

from collections.abc import Mapping
from typing import Any

from orchestrrl.engines.base import Chunk
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves.detokenizer import TextAfterCut, text_after_cut
from orchestrrl.gateway.moves.parsed_chats import parsed_message
from orchestrrl.gateway.moves.stops_after_cut import StopsAfterCut, stops_after_cut
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends


class AnswerAfterCut:
    """The text of one attempt that continues an answer: it begins inside a character, stop strings end it, or an engine
    parses it at its end. Call `start` before the first chunk. All methods may raise TextUnknown."""

    def __init__(self, record: RequestRecord, backend: EngineBackend, fleet: EngineBackends) -> None:
        self._record = record
        self._backend = backend
        self._fleet = fleet
        self._splice: TextAfterCut | None = None
        self._stops: StopsAfterCut | None = None

    @property
    def inside_character(self) -> bool:
        return self._splice is not None and self._splice.open

    async def start(self) -> None:
        self._splice = await text_after_cut(self._record, self._backend, self._fleet)
        self._stops = await stops_after_cut(self._record, self._backend, self._fleet)

    async def take(self, chunk: Chunk) -> tuple[Chunk, str, Mapping[str, Any] | None]:
        """Return the part of the chunk that belongs to the answer, its text, and the fields that were parsed out of the
        whole answer. The record must not contain the chunk yet."""
        if self._record.parsed_after_moves and chunk.finish_reason not in (None, "abort"):
            message = await parsed_message(self._record, chunk, self._backend, self._fleet)
            self._record.forget_text()
            return message
        text = chunk.text if self._splice is None else await self._splice.text(chunk)
        if self._stops is not None:
            chunk, text = await self._stops.take(chunk, text)
        return chunk, text, None
