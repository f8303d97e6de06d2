"""The record of every request: what was asked, every token generated so far, where it runs and where it has been. Pure.

The record is the truth about a request; the engines and the client's connection come and go around it. What the client
is sent is read from here, so a request that changes engines shows no gap, no repetition and no reordering.
"""

import io
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.fleet.reports import FinishedRequest
from orchestrrl.gateway.http.field_types import HttpRefusal
from planner.model import EngineId, RequestId, RequestState, RequestView

# Reported of a request in flight and of one that has ended.
_REPORTED = ("id", "engine", "prompt_tokens", "generated_tokens", "group", "tag", "moves", "group_enough")
_reported_values = attrgetter(*_REPORTED)


# --- policy versions -------------------------------------------------------------------------------------------------
# A version is the trainer's name of the weights, a number. It usually grows; a trainer that goes back to a checkpoint
# takes it back. An answer's lag is how far the fleet's version is ahead of the one that its oldest token came from, the
# gap that bounds off-policy data in asynchronous training (ROLL Flash's asynchronous ratio).


class VersionSpan(NamedTuple):
    """Tokens `start` to `end`, without the latter, and the policy that they are from; None: nobody told its version."""

    version: int | None
    start: int
    end: int


class OnStale(StrEnum):
    """What becomes of an answer that is older than its bound."""

    ABORT = "abort"  # it ends with what it has
    RESTART = "restart"  # it begins anew, unless its client has had some of it


class PolicyVersions:
    """Records at which token of an answer the policy version changed."""

    __slots__ = ("_starts", "newest", "oldest")

    def __init__(self) -> None:
        self._starts: list[tuple[int, int | None]] = []
        self.newest: int | None = None
        self.oldest: int | None = None  # the least that is known

    def add(self, version: int | None, start: int) -> None:
        """Record that tokens from `start` on are of this version. Calls come in order."""
        if self._starts and version == self.newest:
            return
        self._starts.append((start, version))
        self.newest = version
        if version is not None and (self.oldest is None or version < self.oldest):
            self.oldest = version

    def changes(self, start: int) -> list[tuple[int, int | None]]:
        """The version of token `start`, and the changes after it, each with the first token that it holds for."""
        if not self._starts or self._starts[-1][0] <= start:
            return [(start, self.newest)]
        return [(span.start, span.version) for span in self.spans(self._starts[-1][0] + 1) if span.end > start]

    def spans(self, tokens: int) -> tuple[VersionSpan, ...]:
        """Return the spans of an answer of so many tokens."""
        ends = [*(start for start, _ in self._starts[1:]), tokens][: len(self._starts)]
        return tuple(
            VersionSpan(version, start, end)
            for (start, version), end in zip(self._starts, ends, strict=True)
            if end > start
        )

    def lag(self, newest: int | None) -> int:
        """Return how many versions the answer is behind; 0 where either is not known, or the trainer went back."""
        return 0 if self.oldest is None or newest is None else max(0, newest - self.oldest)


# --- records and groups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A chunk that was added to a record, or whose event is to be passed on unchanged; `extra` holds chat fields that
    the engine parsed out of it."""

    chunk: Chunk
    text: str = ""  # that it adds: not always the chunk's own
    extra: Mapping[str, Any] | None = None
    version: int | None = None  # of the policy that generated its tokens


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request has no answer, as the client is told: an HTTP status and an OpenAI error object."""

    status: int
    error: Mapping[str, Any]


@dataclass(slots=True)
class RequestRecord:
    """One request: one prompt, one answer. The engine knows attempt k of it as `id~k`."""

    id: RequestId
    endpoint: CompletionEndpoint
    body: Mapping[str, Any]  # as the client sent it, less what the gateway itself answers (stream, n, ...)
    streaming: bool
    arrived_s: float
    max_tokens: int | None  # None: up to the engine's context length
    group: str = ""
    tag: str = ""
    group_enough: int = 0  # complete answers of its group that suffice; 0: all are wanted
    max_version_lag: int | None = None  # None: it may become as old as it likes
    on_stale: OnStale = OnStale.ABORT
    immovable_because: str = ""  # why it may not be continued elsewhere once it has tokens; empty: it may
    relayed_because: str = ""  # why the engine is sent the body unchanged and its answer relayed; empty: it is not
    pinned_because: str = ""  # why it may not leave its engine even before the first token; empty: it may
    form_fields: Mapping[str, Any] = field(default_factory=dict)  # of the body, about the form of the answer
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # for engines; credentials among them
    prompt_ids: tuple[int, ...] | None = None  # None: not tokenised yet
    prompt_tokens_estimate: int = 1

    engine: EngineId | None = None  # None: held by the gateway
    attempt: int = 0
    moves: int = 0
    state: RequestState = RequestState.WAITING
    generated_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] | None = None
    extras: list[Mapping[str, Any]] = field(default_factory=list)
    versions: PolicyVersions = field(default_factory=PolicyVersions)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    choice_fields: dict[str, Any] = field(default_factory=dict)  # of the engine's own, for the whole answer
    answer_fields: dict[str, Any] = field(default_factory=dict)
    usage: Mapping[str, Any] | None = None  # the engine's own, of an answer that it made alone
    relayed: bool = False  # the present attempt relays the engine's own answer
    relayed_answer: Mapping[str, Any] | None = None  # that answer, where it is not streamed
    relayed_tokens: int = 0  # generated in it
    failure: RequestFailure | None = None
    delivered: bool = False  # something of the answer has been sent to the client
    text_complete: bool = True  # False: the last tokens may end inside a character whose text is still to come
    started_s: float | None = None  # first token
    progressed_s: float = 0.0  # last token, or the start of the attempt
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
    def text(self) -> str:
        return self._text.getvalue()

    def text_from(self, start: int) -> str:
        """The text from a character on."""
        self._text.seek(start)
        return self._text.read()  # and what is written next goes to the end again

    @property
    def prompt_tokens(self) -> int:
        """Exact once the prompt was tokenised, before that an estimate."""
        return self.prompt_tokens_estimate if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + len(self.generated_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.generated_ids) or self.relayed_tokens

    @property
    def fixed_because(self) -> str:
        """Why the request may not leave its engine now; empty where it may. Without a token it starts anew elsewhere,
        unless its answer is relayed, which does not show how far it has come."""
        if self.engine is not None and self.pinned_because:
            return self.pinned_because
        return self.immovable_because if self.generated_ids or (self.relayed and self.engine is not None) else ""

    def begin_attempt(self, engine: EngineId, now_s: float) -> None:
        self.engine = engine
        self.relayed = False
        self.attempt += 1
        self.state = RequestState.WAITING
        self.progressed_s = now_s

    def append(
        self, chunk: Chunk, text: str, extra: Mapping[str, Any] | None, now_s: float, version: int | None = None
    ) -> None:
        """Take what an engine generated. `text` is what they add to the text: not always what the chunk says. `version`
        is that of the policy that generated them."""
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
        """Take what is passed on unchanged: an event, a whole answer, or a stream's end. `tokens`: generated in it."""
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
        """The gateway itself holds the request: it is on no engine."""
        self.engine = None
        self.relayed = False
        self.state = RequestState.WAITING

    def forget_answer(self) -> None:
        """Start over: for an answer that cannot be continued, and of which the client has seen nothing."""
        if self.delivered:
            raise ValueError(f"request {self.id} has been answered in part and cannot start over")
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

    def take_undelivered(self) -> list[AnswerDelta]:
        """What the client has not been sent yet. The caller sends it."""
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
    """Add the fields of a part of an answer: lists are concatenated, any other value replaces the one before."""
    for name, value in part.items():
        before = whole.get(name)
        whole[name] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


# Answers that are complete; the others were cut short.
COMPLETE = frozenset({"stop", "length"})


@dataclass(slots=True)
class _Group:
    in_flight: list[RequestRecord] = field(default_factory=list)
    complete: set[RequestId] = field(default_factory=set)  # an answer may be given again


class InFlightGroups:
    """Groups of the requests in flight: several samples of one prompt, of which only some may be needed.

    A trainer that wants k samples may ask for a few more and take those that end first. Once k answers of a group are
    complete, the others are redundant. A group is forgotten with its last request in flight: its name may be used
    again.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def enter(self, record: RequestRecord) -> None:
        if record.group:
            self._groups.setdefault(record.group, _Group()).in_flight.append(record)

    def redundant(self, record: RequestRecord) -> bool:
        """Return whether its group has enough complete answers without it."""
        group = self._groups.get(record.group)
        return group is not None and 0 < record.group_enough <= len(group.complete - {record.id})

    def members(self, group: str) -> tuple[RequestRecord, ...]:
        """Return the records in flight, in order of arrival."""
        found = self._groups.get(group)
        return () if found is None else tuple(found.in_flight)

    def ended(self, record: RequestRecord) -> tuple[RequestRecord, ...]:
        """Note that the record has its answer, or none. Return the others that are redundant now."""
        group = self._groups.get(record.group)
        if group is None:
            return ()
        if record.finish_reason in COMPLETE:
            group.complete.add(record.id)
        complete = len(group.complete)
        return tuple(other for other in group.in_flight if not other.done and 0 < other.group_enough <= complete)

    def leave(self, record: RequestRecord) -> None:
        """Forget the record."""
        group = self._groups.get(record.group)
        if group is None:
            return
        # By identity: records compare by their tokens.
        group.in_flight = [other for other in group.in_flight if other is not record]
        if not group.in_flight:
            del self._groups[record.group]


class DuplicateRequest(HttpRefusal):
    """A request of this id is in flight already."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=409)


class Ledger:
    """Every request in flight, and the last `keep_finished` that ended, without their tokens."""

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
        """Take all of them, or none: raises DuplicateRequest when an id is in flight already."""
        for record in records:
            if record.id in self._in_flight:
                raise DuplicateRequest(f"request {record.id!r} is in flight already")
        for record in records:
            self._in_flight[record.id] = record

    def close(self, record: RequestRecord) -> None:
        """The request has ended, however it ended."""
        if self._in_flight.get(record.id) is not record:  # it is closed, or never was here
            return
        del self._in_flight[record.id]
        summary = record.summary()
        self.finished_by_reason[summary.finish_reason] += 1
        self.generated_total += summary.generated_tokens
        self.finished.append(summary)
        self._unreported.append((self._sequence + 1, summary))

    def report(self) -> tuple[int, tuple[FinishedRequest, ...]]:
        """A new report's sequence number, and what ended since the last report that was acknowledged."""
        self._sequence += 1
        return self._sequence, tuple(summary for _, summary in self._unreported)

    def acknowledge(self, sequence: int) -> None:
        """The daemon holds everything up to this report. A number that was never sent is ignored."""
        if sequence > self._sequence:
            return
        while self._unreported and self._unreported[0][0] <= sequence:
            self._unreported.popleft()
