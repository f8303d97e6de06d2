"""Run one attempt of a request on one engine: build the engine's request and append its answer to the record."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown
from orchestrrl.engines.base import Chunk, CompletionEndpoint, GenerationRequest
from orchestrrl.engines.handover import loading, saving
from orchestrrl.engines.openai_chunks import other_answer_fields
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.ledger.weight_labels import WEIGHT_VERSIONS, correct_versions, joined_labels
from orchestrrl.gateway.moves.after_cut import AnswerAfterCut
from orchestrrl.gateway.moves.movable import (
    JOINED_FIELDS,
    MOST_TOKENS,
    PORTABLE_FIELDS,
    UNTIED_FIELDS,
    continued,
    immovable_because,
    sampling_fields,
)
from orchestrrl.gateway.moves.move import MoveInProgress, left_by, wait_s
from orchestrrl.gateway.moves.parsed_chats import may_be_parsed
from orchestrrl.gateway.moves.reseed import reseeded_fields
from orchestrrl.gateway.moves.stop_strings import stop_strings
from orchestrrl.gateway.moves.stops_after_cut import TextUnknown
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends

logger = logging.getLogger(__name__)


class EngineAttempt:
    """One attempt of a request on one engine. The caller must have added the record to `backend` before it creates the
    attempt."""

    def __init__(self, record: RequestRecord, backend: EngineBackend, fleet: EngineBackends) -> None:
        self._record = record
        self._backend = backend
        self._fleet = fleet
        self._began: tuple[float, int] | None = None  # time of its first token, and the number of tokens then
        self._version = backend.policy_version  # policy version of the latest tokens
        self._continues = bool(record.generated_ids)
        self._generates = record.endpoint is CompletionEndpoint.GENERATE
        self._joined_fields = JOINED_FIELDS if self._generates else frozenset()
        self._start = 0  # tokens of earlier attempts
        self.joinable = True  # False: the engine's fields describe only the last part of the answer
        self._gathered = False  # the engine collects several tokens per chunk
        self._stops = bool(stop_strings(sampling_fields(record.endpoint, record.body)))
        self._announced: Mapping[str, Any] = {}  # choice fields for the chunk with the attempt's first tokens
        seated = not backend.max_sequences or backend.running + backend.waiting <= backend.max_sequences
        self._entered_s = fleet.clock.now_s()
        self._to_prefill = backend.prefill_tokens if seated else 0  # until its first token; 0: this is not measured
        self._beside = 0  # requests running on the engine at its first token, itself included
        self._loads_kv = False
        self.left = left_by(record, backend, fleet)  # the KV that remains when the attempt is cut

    async def decide_form(self) -> None:
        """Decide whether the engine receives the request body unchanged, and whether the request must stay on this
        engine."""
        record, backend = self._record, self._backend
        may_be_whole = not record.streaming and not record.delivered
        if may_be_whole and not record.relayed_because and backend.capabilities is None:
            await self._fleet.learn(backend)
        experts = _whole_field(backend)
        # The streams of the generate endpoint have this field too.
        whole_field = experts if may_be_whole and not self._generates else ""
        if self._continues and whole_field:
            logger.warning(
                "request %s starts over: %s would return %s for the last part alone", record.id, backend.id, whole_field
            )
            context_before = record.context_tokens
            record.forget_answer()
            backend.waiting_tokens += record.context_tokens - context_before
            self._continues = False
        if self._continues:
            return
        because = record.relayed_because
        if record.parsed_after_moves:
            await self._fleet.learn(backend)
            parsed = await may_be_parsed(record, backend)
            record.immovable_because = "" if parsed else immovable_because(record.endpoint, record.body, reseed=True)
        if not because and whole_field:
            because = f"{whole_field}: only the engine's own whole answer has it"
        record.relayed = bool(because)
        tying_field = backend.tying_field or (experts if self._generates else "")
        if not because and tying_field:
            because = f"{tying_field}: it describes one undivided answer"
        record.immovable_because = record.immovable_because or because
        if record.relayed:
            self._version = backend.policy_version
            record.versions.add(self._version, 0)
            if not record.streaming:
                backend.run_whole(record)

    def request(self, coalesce_tokens: int, move: MoveInProgress | None) -> GenerationRequest:
        """Return the request for the engine: the original request, or a request that continues after the generated
        tokens. `move` is the move that brought the request to this engine, if there was one."""
        record = self._record
        if self._stops and record.generated_ids:
            coalesce_tokens = 1  # the engine would generate further tokens after a stop string
        self._gathered = coalesce_tokens > 1
        self._start = len(record.generated_ids)
        if record.relayed:
            whole = {**record.body, **record.form_fields}
            return GenerationRequest(record.attempt_id, record.endpoint, whole, 1, record.headers, verbatim=True)
        kv = self._kv_fields(move)
        if not record.generated_ids:
            body = {**record.body, **kv} if kv else record.body
            return GenerationRequest(record.attempt_id, record.endpoint, body, coalesce_tokens, record.headers)
        assert record.prompt_ids is not None
        assert record.max_tokens is not None
        body = continued(record.endpoint, record.body, record.prompt_ids, record.generated_ids, record.max_tokens)
        sampling = sampling_fields(record.endpoint, record.body)
        self._announced = reseeded_fields(sampling, len(record.generated_ids))
        endpoint = record.endpoint if self._generates else CompletionEndpoint.COMPLETIONS
        return GenerationRequest(record.attempt_id, endpoint, {**body, **kv}, coalesce_tokens, record.headers)

    def _kv_fields(self, move: MoveInProgress | None) -> Mapping[str, Any]:
        """Return the body fields that name the KV cache entries to save and to load. The result is empty if there are
        none."""
        left, record = self.left, self._record
        if left is None:
            return {}
        at_end = self._fleet.is_to_offload(record)
        record.saves_kv = left if at_end else None
        if move is None:
            load, patience_s = self._fleet.offloaded_kv(record)
        else:
            load, patience_s = move.load, wait_s(move.order)
        if load is None or load.version != left.version:
            return saving(left.version, left.entry, at_end=at_end)
        self._loads_kv = True
        return loading(left.version, load.entry, left.entry, patience_s, at_end=at_end)

    async def run(self, request: GenerationRequest, on_chunk: Callable[[Chunk], None]) -> bool:
        """Append chunks to the record until the answer ends, and return True. `on_chunk` is called with each chunk.
        Return False if the engine aborted the request or the answer must start over.

        Raises the errors of the engine's client if the engine fails, and OutcomeUnknown if the stream ends without a
        finish_reason.
        """
        record, backend = self._record, self._backend
        if record.max_tokens is None and not record.immovable_because:
            await self._learn_context_length()
        # The Engine protocol guarantees that the iterator has aclose().
        stream = cast("AsyncGenerator[Chunk, None]", backend.engine.generate(request))
        # The engine prefills the context at the same time.
        after = AnswerAfterCut(record, backend, self._fleet) if self._continues else None
        opening = None if after is None else asyncio.create_task(after.start())
        try:
            async for chunk in stream:
                if opening is not None:
                    await opening
                    opening = None
                parsed: Mapping[str, Any] | None = None
                text = chunk.text
                if after is not None:
                    chunk, text, parsed = await after.take(chunk)
                elif self._stops and chunk.finish_reason == "abort":
                    text = ""  # it may begin a stop string; it is decoded again after the cut
                if chunk.choice_fields or chunk.answer_fields or chunk.usage:
                    chunk = self._joined(chunk)
                    if not self.joinable:
                        return False
                given_up = chunk.finish_reason == "abort"
                finished = chunk.finish_reason is not None and not given_up
                if chunk.answer is not None or chunk.event is not None:
                    if not given_up:
                        self._relay(chunk)
                else:
                    self._take(request.endpoint, _unfinished(chunk) if given_up else chunk, text, parsed)
                on_chunk(chunk)
                if after is not None and after.inside_character:
                    record.text_complete = False
                if finished or given_up:
                    return finished
        except TextUnknown as error:
            record.immovable_because, record.parsed_after_moves = str(error), False
            self.joinable = False
            return False
        finally:
            if opening is not None:
                opening.cancel()
            if step_s := self.step_s():
                backend.step_times.add((self._beside + backend.running) / 2, step_s)
            try:
                await stream.aclose()
            finally:
                if opening is not None:
                    await asyncio.gather(opening, return_exceptions=True)
        raise OutcomeUnknown(f"engine {backend.id} ended request {request.request_id} without a finish_reason")

    def step_s(self) -> float:
        """Return the mean time per token after the first chunk, in seconds, or 0 if no tokens followed the first
        chunk."""
        if self._began is None:
            return 0.0
        began_s, tokens_then = self._began
        made = len(self._record.generated_ids) - tokens_then
        return (self._record.progressed_s - began_s) / made if made > 0 else 0.0

    def _joined(self, chunk: Chunk) -> Chunk:
        """Return the chunk without the fields that describe only the last part of a continued answer. If such a field
        cannot be left out and nothing has been delivered yet, set `joinable` to False, so that the answer starts
        over."""
        record, backend = self._record, self._backend
        untied = UNTIED_FIELDS | self._joined_fields
        tying = next((name for name in chunk.choice_fields or () if name not in untied), "")
        tying = tying or next((name for name in chunk.answer_fields or () if name not in UNTIED_FIELDS), "")
        if tying:
            if not record.immovable_because:  # otherwise an option of this request may cause the field
                backend.tying_field = tying
            record.immovable_because = record.immovable_because or f"{tying}: it describes one undivided answer"
        if not self._continues:
            return chunk
        if tying:
            lost = "the answer starts over" if not record.delivered else "the field is dropped"
            logger.warning(
                "request %s was moved, and %s returns %s for its last part: %s", record.id, backend.id, tying, lost
            )
            self.joinable = record.delivered
        portable = PORTABLE_FIELDS | self._joined_fields
        fields = {name: value for name, value in (chunk.choice_fields or {}).items() if name in portable}
        if WEIGHT_VERSIONS in fields:
            fields[WEIGHT_VERSIONS] = joined_labels(record.versions, self._start, fields[WEIGHT_VERSIONS])
        kept = {name: value for name, value in (chunk.answer_fields or {}).items() if name in PORTABLE_FIELDS}
        return replace(chunk, choice_fields=fields or None, answer_fields=kept or None, usage=None)

    def _relay(self, chunk: Chunk) -> None:
        """Append to the record an event, or a whole answer, that is forwarded unchanged."""
        record, backend = self._record, self._backend
        was, context_before = record.state, record.context_tokens
        passed_on = chunk.answer or chunk.event or {"choices": ()}
        usage = passed_on.get("usage")
        if isinstance(usage, Mapping):
            record.usage = usage
            record.prompt_tokens_estimate = _count(usage, "prompt_tokens", record.prompt_tokens_estimate)
        if any(choice.get("routed_experts") is not None for choice in passed_on["choices"]):
            backend.whole_field = "routed_experts"
        if chunk.event and not passed_on["choices"]:  # the last one, which describes the whole answer
            record.answer_fields.update(other_answer_fields(passed_on))
        version = backend.policy_version if chunk.event else self._version
        record.relay(chunk, _added_tokens(passed_on, record.relayed_tokens), self._fleet.clock.now_s(), version)
        if chunk.answer is not None and backend.policy_version != self._version:
            record.versions.add(None, 0)  # the weights changed while the answer was generated
        backend.advance(record, context_before, was, self._fleet.clock.now_s())
        if was is not record.state or chunk.answer is not None:
            self._fleet.trust(backend)

    def _take(
        self, endpoint: CompletionEndpoint, chunk: Chunk, text: str, parsed: Mapping[str, Any] | None = None
    ) -> None:
        """Append a chunk to the record. `parsed` has the fields that were parsed out of the whole answer."""
        record, backend = self._record, self._backend
        now_s = self._fleet.clock.now_s()
        was, context_before = record.state, record.context_tokens
        if self._announced and chunk.token_ids:
            chunk = replace(chunk, choice_fields={**(chunk.choice_fields or {}), **self._announced})
            self._announced = {}
        extra = _parsed_fields(chunk) if endpoint is CompletionEndpoint.CHAT else parsed
        version = backend.policy_version
        if version != self._version:
            # Some tokens of a multi-token chunk may predate the change, so all of them count as older.
            gathered = self._gathered and len(chunk.token_ids) > 1
            version, self._version = (self._version if gathered else version), version
        self._gathered = self._gathered or len(chunk.token_ids) > 1
        record.append(chunk, text, extra, now_s, version)
        if self._generates:
            correct_versions(record.versions, chunk.choice_fields)
        if chunk.usage is not None:
            record.usage = chunk.usage
            if not record.generated_ids:  # vLLM omits the token ids of a chat without its reasoning
                record.relayed_tokens = _count(chunk.usage, "completion_tokens", 0)
        backend.advance(record, context_before, was, now_s)
        if chunk.token_ids:
            # An engine that returns text with a single token withholds none.
            record.text_complete = bool(text) and len(chunk.token_ids) == 1
        if extra and not record.parsed_after_moves:
            record.immovable_because = record.immovable_because or "the engine parses the answer"
        if was is not record.state:
            self._first_token()

    def _first_token(self) -> None:
        """Handle the first token of the attempt: decide whether its answer can continue on another engine."""
        record, backend = self._record, self._backend
        self._began = record.progressed_s, len(record.generated_ids)
        self._beside = backend.running
        if self._to_prefill:
            times = backend.load_times if self._loads_kv else backend.prefill_times
            times.add(self._to_prefill, record.progressed_s - self._entered_s)
        self._fleet.keep_context(backend, record, ended=False)
        self._fleet.trust(backend)
        if record.prompt_ids is None:
            record.immovable_because = record.immovable_because or "the engine does not return the prompt's token ids"
        elif record.max_tokens is None and backend.capabilities is not None:
            longest = backend.capabilities.max_model_len_tokens
            if longest is None:
                record.immovable_because = record.immovable_because or "the engine's context length is unknown"
            else:
                record.max_tokens = longest - len(record.prompt_ids)

    async def _learn_context_length(self) -> None:
        """Read the engine's context length. A request without max_tokens may fill the context. If such a request
        continues on another engine, its new body must contain the remaining number of tokens."""
        try:
            await self._fleet.capabilities(self._backend)
        except OrchestrRLError as error:
            logger.debug("capabilities of %s: %s", self._backend.id, error)
            self._record.immovable_because = "the engine's context length is unknown"


def _added_tokens(passed_on: Mapping[str, Any], before: int) -> int:
    """Return the number of tokens that an event or a whole answer adds to `before`, the number of tokens counted so
    far. The result is negative if the reported usage shows that `before` was too high. Without usage, a choice that has
    no token ids is counted as one token."""
    usage = passed_on.get("usage")
    if isinstance(usage, Mapping):
        return _count(usage, "completion_tokens", before) - before
    return sum(len(choice.get("token_ids") or "?") for choice in passed_on["choices"])


def _count(usage: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = usage.get(name)
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else otherwise


def _whole_field(backend: EngineBackend) -> str:
    """Return the name of a field that the engine's non-streamed answers have and its streams lack, or "" if none is
    known."""
    if backend.capabilities is not None and backend.capabilities.routed_experts:
        return "routed_experts"
    return backend.whole_field


def _unfinished(chunk: Chunk) -> Chunk:
    return Chunk(chunk.token_ids, chunk.text, chunk.prompt_token_ids, chunk.logprobs)


def _parsed_fields(chunk: Chunk) -> Mapping[str, Any] | None:
    """Return the fields that a chat engine parsed out of the text, such as reasoning and tool calls, or None if the
    chunk has none."""
    delta = chunk.raw.get("delta") if chunk.raw is not None else None
    if not delta:
        return None
    extra = {name: value for name, value in delta.items() if name not in ("role", "content") and value}
    return extra or None
