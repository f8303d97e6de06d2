"""The record of every request: its body, every token generated so far, its engine and its history. This module performs
no I/O.

The record is the authoritative state of a request, whose engine and client connection may change. All output to the
client is read from the record, so the output has no gap, no repetition and no reordering when a request changes
engines.
"""

import io
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.engines.handover import LeftKv
from orchestrrl.fleet.reports import FinishedRequest
from orchestrrl.gateway.http.field_types import HttpRefusal
from planner.model import EngineId, RequestId, RequestState, RequestView

# Fields reported for requests in flight and for ended requests.
_REPORTED = ("id", "engine", "prompt_tokens", "generated_tokens", "group", "tag", "moves", "group_enough")
_reported_values = attrgetter(*_REPORTED)


# --- policy versions -------------------------------------------------------------------------------------------------
# A version is the trainer's number for its weights. It usually grows; it decreases when a trainer returns to a
# checkpoint. An answer's lag is the difference between the fleet's version and that of the answer's oldest token. It
# bounds off-policy data in asynchronous training (ROLL Flash's asynchronous ratio).


class VersionSpan(NamedTuple):
    """The tokens [start, end) of an answer and the policy version that generated them. `version` is None if the policy
    version is unknown."""

    version: int | None
    start: int
    end: int


class OnStale(StrEnum):
    """The action to take for an answer that exceeds its maximum version lag."""

    ABORT = "abort"  # end it with the tokens it has
    RESTART = "restart"  # start it over, unless the client has received a part of it


class PolicyVersions:
    """The policy versions of an answer's tokens, stored as the token indices at which the version changes."""

    __slots__ = ("_starts", "newest", "oldest")

    def __init__(self) -> None:
        self._starts: list[tuple[int, int | None]] = []
        self.newest: int | None = None
        self.oldest: int | None = None  # the lowest known version

    def add(self, version: int | None, start: int) -> None:
        """Record that the tokens from index `start` on have policy version `version`. `start` must not decrease between
        calls."""
        if self._starts and version == self.newest:
            return
        self._starts.append((start, version))
        self.newest = version
        if version is not None and (self.oldest is None or version < self.oldest):
            self.oldest = version

    def changes(self, start: int) -> list[tuple[int, int | None]]:
        """Return pairs of a token index and the policy version from that token on. The first pair is for token `start`,
        and each later pair is for a change of version."""
        if not self._starts or self._starts[-1][0] <= start:
            return [(start, self.newest)]
        return [(span.start, span.version) for span in self.spans(self._starts[-1][0] + 1) if span.end > start]

    def spans(self, tokens: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of an answer with `tokens` tokens, in order."""
        ends = [*(start for start, _ in self._starts[1:]), tokens][: len(self._starts)]
        return tuple(
            VersionSpan(version, start, end)
            for (start, version), end in zip(self._starts, ends, strict=True)
            if end > start
        )

    def correct(self, spans: Sequence[VersionSpan]) -> None:
        """Replace the versions from the first token of `spans` on. `spans` are contiguous and in order."""
        if not spans:
            return
        kept, first = self._starts, spans[0].start
        self._starts, self.newest, self.oldest = [], None, None
        for start, version in kept:
            if start < first:
                self.add(version, start)
        for span in spans:
            self.add(span.version, span.start)

    def lag(self, newest: int | None) -> int:
        """Return the number of versions by which the answer's oldest token is behind `newest`. Return 0 if either
        version is unknown or `newest` is lower."""
        return 0 if self.oldest is None or newest is None else max(0, newest - self.oldest)


# --- records and groups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A chunk to be delivered to the client. It was appended to the record, or it contains an event that is forwarded
    unchanged. `extra` holds the chat fields that the engine parsed out of the text."""

    chunk: Chunk
    text: str = ""  # the added text, which may differ from the chunk's own
    extra: Mapping[str, Any] | None = None
    version: int | None = None  # policy version of the tokens


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The error response of a request that has no answer: an HTTP status and an OpenAI error object."""

    status: int
    error: Mapping[str, Any]


@dataclass(slots=True)
class RequestRecord:
    """One request: one prompt and one answer. Attempt k has the id `id~k` on the engine."""

    id: RequestId
    endpoint: CompletionEndpoint
    body: Mapping[str, Any]  # the client's body without the fields that the gateway handles (stream, n, ...)
    streaming: bool
    arrived_s: float
    max_tokens: int | None  # None: up to the engine's context length
    group: str = ""
    tag: str = ""
    session: str = ""  # its turns are requests whose prompts extend each other; empty: none
    group_enough: int = 0  # number of complete answers that its group needs; 0: all
    max_version_lag: int | None = None  # None: no limit
    on_stale: OnStale = OnStale.ABORT
    immovable_because: str = ""  # why it may not continue on another engine once it has tokens; empty: it may
    relayed_because: str = ""  # why the body is sent unchanged and the engine's answer relayed; empty: it is not
    parsed_after_moves: bool = False  # once moved, an engine parses the message out of the whole answer
    pinned_because: str = ""  # why it may not leave its engine even before the first token; empty: it may
    passed_path: str = ""  # the path of a request that is passed through (passed.py); empty: `endpoint` has the path
    form_fields: Mapping[str, Any] = field(default_factory=dict)  # fields of the body that shape the answer
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # for engines; may include credentials
    prompt_ids: tuple[int, ...] | None = None  # None: not tokenised yet
    prompt_tokens_estimate: int = 1

    engine: EngineId | None = None  # None: held by the gateway
    attempt: int = 0
    moves: int = 0
    saves_kv: LeftKv | None = None  # the KV that the engine saves when the answer ends
    cached_tokens: int = 0  # context that is expected in the engine's KV cache when the attempt begins
    state: RequestState = RequestState.WAITING
    generated_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] | None = None
    extras: list[Mapping[str, Any]] = field(default_factory=list)
    versions: PolicyVersions = field(default_factory=PolicyVersions)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    choice_fields: dict[str, Any] = field(default_factory=dict)  # the engine's further fields of the choice
    answer_fields: dict[str, Any] = field(default_factory=dict)  # the engine's further fields of the whole answer
    usage: Mapping[str, Any] | None = None  # the engine's own counts, if one engine generated the whole answer
    relayed: bool = False  # the current attempt relays the engine's own answer
    relayed_answer: Mapping[str, Any] | None = None  # that answer, if it is not streamed
    relayed_tokens: int = 0  # tokens generated in it, or in an answer without token ids
    failure: RequestFailure | None = None
    delivered: bool = False  # a part of the answer has been sent to the client
    text_complete: bool = True  # False: the tokens may end inside a character whose text is missing
    started_s: float | None = None  # time of the first token
    progressed_s: float = 0.0  # time of the last token, or of the attempt's start
    finished_s: float | None = None

    _text: io.StringIO = field(default_factory=io.StringIO)
    _undelivered: list[AnswerDelta] = field(default_factory=list)

    @property
    def attempt_id(self) -> str:
        return f"{self.id}~{self.attempt}"

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def textual(self) -> bool:
        """Return whether the answer has text. The generate endpoint returns text only if the request asks for it."""
        return self.endpoint is not CompletionEndpoint.GENERATE or self.body.get("output_mode") == "text"

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def text_from(self, start: int) -> str:
        """Return the answer's text from character index `start` on."""
        self._text.seek(start)
        return self._text.read()  # leaves the position at the end for the next write

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens. It is an estimate until the prompt is tokenised."""
        return self.prompt_tokens_estimate if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + len(self.generated_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.generated_ids) or self.relayed_tokens

    @property
    def fixed_because(self) -> str:
        """The reason why the request may not leave its engine now, or "" if it may leave. A request without generated
        tokens can usually start over on another engine. A relayed request cannot, because the progress of its answer is
        unknown.
        """
        if self.engine is not None and self.pinned_because:
            return self.pinned_because
        return self.immovable_because if self.generated_ids or (self.relayed and self.engine is not None) else ""

    def begin_attempt(self, engine: EngineId, now_s: float) -> None:
        self.engine = engine
        self.relayed = False
        self.saves_kv = None
        self.attempt += 1
        self.state = RequestState.WAITING
        self.progressed_s = now_s

    def append(
        self, chunk: Chunk, text: str, extra: Mapping[str, Any] | None, now_s: float, version: int | None = None
    ) -> None:
        """Append a chunk. `text` is the text that the chunk adds to the answer, which may differ from the chunk's text.
        `version` is the policy version of the chunk's tokens."""
        if self.prompt_ids is None and chunk.prompt_token_ids is not None:
            self.prompt_ids = chunk.prompt_token_ids
        self.progressed_s = now_s
        if chunk.token_ids:
            self.versions.add(version, len(self.generated_ids))
            self.generated_ids.extend(chunk.token_ids)
            self.state = RequestState.RUNNING
            if self.started_s is None:
                self.started_s = now_s
        if text:
            self._text.write(text)
        if chunk.logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(chunk.logprobs)
        if extra:
            self.extras.append(extra)
        fields, answer_fields = chunk.choice_fields, chunk.answer_fields
        if fields:
            _merge(self.choice_fields, fields)
        if answer_fields:
            _merge(self.answer_fields, answer_fields)
        if self.streaming and (chunk.token_ids or text or extra or fields or answer_fields):
            self._undelivered.append(AnswerDelta(chunk, text, extra, version))
        if chunk.finish_reason is not None:
            self.finish(chunk.finish_reason, chunk.stop_reason, now_s)

    def relay(self, chunk: Chunk, tokens: int, now_s: float, version: int | None = None) -> None:
        """Record a chunk that is forwarded unchanged: an event, a whole answer or the end of a stream. `tokens` is the
        number of tokens in the chunk, and `version` is their policy version."""
        self.progressed_s = now_s
        if chunk.event is not None or chunk.answer is not None:
            if chunk.event != {}:  # the end of a stream has no tokens
                self.versions.add(version, self.relayed_tokens)
            self.state = RequestState.RUNNING
            if self.started_s is None:
                self.started_s = now_s
        if chunk.event:
            self._undelivered.append(AnswerDelta(chunk, version=version))
        self.relayed_tokens += tokens
        if chunk.answer is not None:
            self.relayed_answer = chunk.answer
        if chunk.finish_reason is not None:
            self.finish(chunk.finish_reason, None, now_s)

    def finish(self, finish_reason: str, stop_reason: int | str | None, now_s: float) -> None:
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.finished_s = now_s

    def fail(self, failure: RequestFailure, now_s: float) -> None:
        self.failure = failure
        self.finished_s = now_s

    def detach(self) -> None:
        """Mark the request as held by the gateway. The request is then on no engine."""
        self.engine = None
        self.relayed = False
        self.cached_tokens = 0
        self.state = RequestState.WAITING

    def forget_answer(self) -> None:
        """Discard the answer so far. Raises ValueError if the client has received a part of it."""
        if self.delivered:
            raise ValueError(f"request {self.id} cannot start over, because a part of its response was delivered")
        self.generated_ids = array("I")
        self.logprobs = None
        self.choice_fields.clear()
        self.answer_fields.clear()
        self.usage = self.relayed_answer = None
        self.relayed_tokens = 0
        self.extras.clear()
        self._undelivered.clear()
        self._text = io.StringIO()
        self.versions = PolicyVersions()
        self.text_complete = True

    def forget_text(self) -> None:
        """Discard the text and the parsed fields of the answer so far, but not its tokens. The client must not have
        received a part of them."""
        self.generated_ids = self.generated_ids[:]  # another array, so that the answer is stored from its beginning
        self._text = io.StringIO()
        self.extras.clear()

    def take_undelivered(self) -> list[AnswerDelta]:
        """Return the deltas that the client has not received, and mark them as delivered. The caller must send them."""
        deltas = self._undelivered
        if deltas:
            self._undelivered = []
            self.delivered = True
        return deltas

    def view(self, now_s: float) -> RequestView:
        return RequestView(
            state=self.state,
            max_tokens=self.max_tokens,
            movable=not self.fixed_because,
            age_s=max(0.0, now_s - self.arrived_s),
            movable_detail=self.fixed_because,
            quiet_s=max(0.0, now_s - self.progressed_s),
            policy_version=self.versions.oldest,
            **self._reported(),
        )

    def summary(self) -> FinishedRequest:
        duration_s = (self.finished_s or self.arrived_s) - self.arrived_s
        return FinishedRequest(finish_reason=self.finish_reason or "error", duration_s=duration_s, **self._reported())

    def _reported(self) -> dict[str, Any]:
        return dict(zip(_REPORTED, _reported_values(self), strict=True))


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Merge the fields of a part of an answer into `whole`. Lists are concatenated, and any other value replaces the
    previous value."""
    for name, value in part.items():
        before = whole.get(name)
        whole[name] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


# Answers that are complete; the others were cut short.
COMPLETE = frozenset({"stop", "length"})


@dataclass(slots=True)
class _Group:
    in_flight: list[RequestRecord] = field(default_factory=list)
    complete: set[RequestId] = field(default_factory=set)  # a set, since a stored answer may be returned again


class InFlightGroups:
    """The groups of the requests in flight. A group consists of several samples of one prompt, of which only some may
    be needed.

    A trainer that needs k samples may request more than k and use the samples that end first. Once k answers of a group
    are complete, the group's other requests are redundant. A group is forgotten when its last request in flight ends,
    so its name can be reused.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def enter(self, record: RequestRecord) -> None:
        if record.group:
            self._groups.setdefault(record.group, _Group()).in_flight.append(record)

    def redundant(self, record: RequestRecord) -> bool:
        """Return whether the record's group has enough complete answers without the record."""
        group = self._groups.get(record.group)
        return group is not None and 0 < record.group_enough <= len(group.complete - {record.id})

    def members(self, group: str) -> tuple[RequestRecord, ...]:
        """Return the group's records in flight, in order of arrival."""
        found = self._groups.get(group)
        return () if found is None else tuple(found.in_flight)

    def ended(self, record: RequestRecord) -> tuple[RequestRecord, ...]:
        """Register the end of the record, and return the records of its group that are now redundant."""
        group = self._groups.get(record.group)
        if group is None:
            return ()
        if record.finish_reason in COMPLETE:
            group.complete.add(record.id)
        complete = len(group.complete)
        return tuple(other for other in group.in_flight if not other.done and 0 < other.group_enough <= complete)

    def leave(self, record: RequestRecord) -> None:
        """Remove the record from its group."""
        group = self._groups.get(record.group)
        if group is None:
            return
        # By identity: records compare by their tokens.
        group.in_flight = [other for other in group.in_flight if other is not record]
        if not group.in_flight:
            del self._groups[record.group]


class DuplicateRequest(HttpRefusal):
    """Raised if a request with the same id is already in flight, or is stored with another body. Clients receive HTTP
    status 409."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=409)


class Ledger:
    """The records of the requests in flight, and summaries of the last `keep_finished` ended requests."""

    def __init__(self, *, keep_finished: int = 2048) -> None:
        self._in_flight: dict[RequestId, RequestRecord] = {}
        self.finished: deque[FinishedRequest] = deque(maxlen=keep_finished)
        self._unreported: deque[tuple[int, FinishedRequest]] = deque(maxlen=keep_finished)
        self._sequence = 0
        self.finished_by_reason: Counter[str] = Counter()
        self.generated_total = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._in_flight.values())

    def get(self, request_id: RequestId) -> RequestRecord | None:
        return self._in_flight.get(request_id)

    def add(self, *records: RequestRecord) -> None:
        """Add all records. Raises DuplicateRequest, and adds no record, if one of the ids is already in flight."""
        for record in records:
            if record.id in self._in_flight:
                raise DuplicateRequest(f"request {record.id!r} is already in flight")
        for record in records:
            self._in_flight[record.id] = record

    def close(self, record: RequestRecord) -> None:
        """Remove the ended record from the requests in flight, and keep a summary of it. A repeated call has no
        effect."""
        if self._in_flight.get(record.id) is not record:  # already closed, or never added
            return
        del self._in_flight[record.id]
        summary = record.summary()
        self.finished_by_reason[summary.finish_reason] += 1
        self.generated_total += summary.generated_tokens
        self.finished.append(summary)
        self._unreported.append((self._sequence + 1, summary))

    def report(self) -> tuple[int, tuple[FinishedRequest, ...]]:
        """Return a new sequence number, and summaries of the requests that ended since the last acknowledged report."""
        self._sequence += 1
        return self._sequence, tuple(summary for _, summary in self._unreported)

    def acknowledge(self, sequence: int) -> None:
        """Forget the summaries of all reports up to sequence number `sequence`. A number that was never sent is
        ignored."""
        if sequence > self._sequence:
            return
        while self._unreported and self._unreported[0][0] <= sequence:
            self._unreported.popleft()
