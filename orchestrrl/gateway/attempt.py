"""One attempt at a request on one engine: what the engine is asked, and its answer, chunk by chunk, into the record."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, cast

from orchestrrl.clock import Clock
from orchestrrl.engines.base import Chunk, Endpoint, GenerationRequest
from orchestrrl.engines.handover import loading, saving
from orchestrrl.errors import OrchestrRLError, OutcomeUnknown
from orchestrrl.gateway.fleet import Fleet
from orchestrrl.gateway.handing import left_by, wait_s
from orchestrrl.gateway.ledger import Record
from orchestrrl.gateway.movable import continued
from orchestrrl.gateway.moving import Moving
from orchestrrl.gateway.seam import Seam, open_seam
from orchestrrl.gateway.slot import Slot

logger = logging.getLogger(__name__)


class Attempt:
    """The record's present attempt, on `slot`, which the record has entered."""

    def __init__(self, record: Record, slot: Slot, fleet: Fleet, clock: Clock) -> None:
        self._record = record
        self._slot = slot
        self._fleet = fleet
        self._clock = clock
        self._began: tuple[float, int] | None = None  # when its first token came, and how many there were then
        self._version = slot.policy_version  # of the policy that its last tokens came from
        self._gathered = False  # the engine keeps tokens back until there are some for a chunk
        self.left = left_by(record, slot, fleet)  # when it is cut

    def request(self, coalesce_tokens: int, move: Moving | None) -> GenerationRequest:
        """What the engine is asked: from the beginning, or from the tokens that are there. `move`: the one that brought
        the request here."""
        record = self._record
        self._gathered = coalesce_tokens > 1
        kv = self._kv_fields(move)
        if not record.generated_ids:
            body = {**record.body, **kv} if kv else record.body
            return GenerationRequest(record.attempt_id, record.endpoint, body, coalesce_tokens)
        assert record.prompt_ids is not None
        assert record.max_tokens is not None
        body = continued(record.endpoint, record.body, record.prompt_ids, record.generated_ids, record.max_tokens)
        return GenerationRequest(record.attempt_id, Endpoint.COMPLETIONS, {**body, **kv}, coalesce_tokens)

    def _kv_fields(self, move: Moving | None) -> Mapping[str, Any]:
        """What the body says of KV: what to leave, and what to load."""
        left, load = self.left, None if move is None else move.load
        if move is None or load is None or left is None or load.version != left.version:
            return saving(left.version, left.entry) if left is not None else {}
        return loading(left.version, load.entry, left.entry, wait_s(move.order))

    async def run(self, request: GenerationRequest, took: Callable[[Chunk], None]) -> bool:
        """Take chunks until the answer ends; `took` is told of each. False: the engine gave the request up, unfinished.

        Raises as engines do, OutcomeUnknown too where the stream ends without a word.
        """
        record, slot = self._record, self._slot
        seam = await self._seam()
        if record.max_tokens is None and not record.immovable_because:
            await self._learn_context_length()
        # The protocol has it that the iterator can be closed.
        stream = cast("AsyncGenerator[Chunk, None]", slot.engine.generate(request))
        try:
            async for chunk in stream:
                text = chunk.text if seam is None else await seam.text(chunk)
                given_up = chunk.finish_reason == "abort"
                finished = chunk.finish_reason is not None and not given_up
                self._take(request.endpoint, _unfinished(chunk) if given_up else chunk, text)
                took(chunk)
                if seam is not None:
                    record.text_complete = not seam.open
                    # Once closed it has no say: the answer may be cut inside a character again.
                    seam = seam if seam.open else None
                if finished or given_up:
                    return finished
        finally:
            await stream.aclose()
        raise OutcomeUnknown(f"{slot.id}: the stream of {request.request_id} ended without a finish_reason")

    def step_s(self) -> float:
        """A decode step, as its tokens came; 0 where few have."""
        if self._began is None:
            return 0.0
        began_s, tokens_then = self._began
        made = len(self._record.generated_ids) - tokens_then
        return (self._record.progressed_s - began_s) / made if made > 0 else 0.0

    def _take(self, endpoint: Endpoint, chunk: Chunk, text: str) -> None:
        record, slot = self._record, self._slot
        now_s = self._clock.now_s()
        was, context_before = record.state, record.context_tokens
        extra = _parsed_fields(chunk) if endpoint is Endpoint.CHAT else None
        version = slot.policy_version
        if version != self._version:
            # Of tokens that an engine gathered for a chunk some may be older than the change: all count as such.
            gathered = self._gathered and len(chunk.token_ids) > 1
            version, self._version = (self._version if gathered else version), version
        self._gathered = self._gathered or len(chunk.token_ids) > 1
        record.append(chunk, text, extra, now_s, version)
        slot.advance(record, context_before, was, now_s)
        if chunk.token_ids:
            # An engine that shows text after a single token holds nothing back.
            record.text_complete = bool(text) and len(chunk.token_ids) == 1
        if extra:
            record.immovable_because = record.immovable_because or "the engine parses the answer"
        if was is not record.state:
            self._first_token()

    def _first_token(self) -> None:
        """The attempt has begun to generate."""
        record, slot = self._record, self._slot
        self._began = record.progressed_s, len(record.generated_ids)
        self._fleet.trust(slot)
        if record.prompt_ids is None:
            record.immovable_because = record.immovable_because or "the engine does not tell the prompt's tokens"
        elif record.max_tokens is None and slot.capabilities is not None:
            longest = slot.capabilities.max_model_len_tokens
            if longest is None:
                record.immovable_because = record.immovable_because or "its engine's context length is not known"
            else:
                record.max_tokens = longest - len(record.prompt_ids)

    async def _seam(self) -> Seam | None:
        record = self._record
        if record.text_complete or not record.generated_ids:
            return None
        context = [*(record.prompt_ids or ())[-64:], *record.generated_ids[-64:]]
        keep = bool(record.body.get("include_stop_str_in_output"))
        return await open_seam(self._slot.engine, context, keep_stop_token=keep)

    async def _learn_context_length(self) -> None:
        """Without max_tokens an answer may fill the context, and a continued one must be told how much is left."""
        try:
            await self._fleet.capabilities(self._slot)
        except OrchestrRLError as error:
            logger.debug("capabilities of %s: %s", self._slot.id, error)
            self._record.immovable_because = "its engine's context length is not known"


def _unfinished(chunk: Chunk) -> Chunk:
    return Chunk(chunk.token_ids, chunk.text, chunk.prompt_token_ids, chunk.logprobs)


def _parsed_fields(chunk: Chunk) -> Mapping[str, Any] | None:
    """What a chat engine parsed out of the answer (reasoning, tool calls) instead of leaving it in the text."""
    delta = chunk.raw.get("delta") if chunk.raw is not None else None
    if not delta:
        return None
    extra = {name: value for name, value in delta.items() if name not in ("role", "content") and value}
    return extra or None
