"""Split answers into pieces to be stored on disk, and reassemble answers from stored pieces. This module performs no
I/O.

A piece holds the growth of a record since the previous piece. Pieces are numbered from 0. Piece 0 replaces all earlier
pieces of the answer. After a gap in the numbers, pieces are ignored until the next piece 0. If pieces are lost, the
reassembled answer is therefore a prefix of the real answer and never contains tokens of another attempt.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.ledger.weight_labels import correct_versions
from orchestrrl.gateway.moves.generate_fields import is_multimodal
from orchestrrl.gateway.moves.reseed import RESEEDED

_FINAL_FIELDS = ("stop_reason", "answer_fields", "usage")
# Lists in a choice that grow with the answer.
_GROWING_FIELDS = (RESEEDED, "sampling_mask")
# Fields that shape the response but do not identify the request.
_FORM = frozenset({"stream", "stream_options", "return_policy_versions", "request_id"})
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_compact = json.JSONEncoder(separators=(",", ":")).encode


class AnswerPiece(NamedTuple):
    """The growth of an answer since its previous piece. Each token id has 4 bytes, and text is encoded as UTF-8."""

    answer: int  # index of the answer within the request
    number: int
    ids: bytes
    text: bytes
    prompt_ids: bytes | None  # in one piece only, if the engine returned them and they will be needed
    prompt_tokens: int
    max_tokens: int | None
    attempt: int
    version: int | None  # policy version of the first token
    finish_reason: str | None
    more: str | None  # JSON of the fields that most pieces lack

    @property
    def memory_bytes(self) -> int:
        return len(self.ids) + len(self.text) + len(self.prompt_ids or b"") + len(self.more or "")

    @property
    def others(self) -> dict[str, Any]:
        """The fields that are stored in `more`, decoded from JSON."""
        found: dict[str, Any] = json.loads(self.more) if self.more is not None else {}
        return found


def key_of(name: str) -> int:
    """Return a hash of the name, as an integer below 2**63."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def digest_of(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> bytes:
    """Return a digest of the endpoint and the body. The digest does not depend on the order of fields or on fields that
    only shape the response."""
    rest = {name: value for name, value in body.items() if name not in _FORM}
    digest = hashlib.blake2b(endpoint.encode(), digest_size=16)
    # Prompts are long, and JSON encoding of numbers is slow.
    name = "token_ids" if endpoint is CompletionEndpoint.GENERATE else "prompt"
    prompt = rest.get(name)
    if isinstance(prompt, str):
        rest[name] = "text"
        digest.update(prompt.encode("utf-8", "surrogatepass"))
    elif isinstance(prompt, list) and set(map(type, prompt)) == {int}:
        rest[name] = "ids"
        digest.update(array("I", prompt).tobytes())
    digest.update(b"\0")
    digest.update(_canonical(rest).encode())
    return digest.digest()


class RecordCutter:
    """Splits the growth of one record into the pieces that are stored on disk."""

    def __init__(self, answer: int, record: RequestRecord, *, prompt_wanted: bool) -> None:
        """Create the cutter of one answer. `answer` is its index within the request. `prompt_wanted` is True if the
        response includes the prompt's token ids."""
        self.record = record
        self._prompt_wanted = prompt_wanted
        self._answer = answer
        # The client sent token ids, and will send them again.
        if record.endpoint is CompletionEndpoint.GENERATE:
            self._prompt_given = not is_multimodal(record.body)
        else:
            self._prompt_given = isinstance(record.body.get("prompt"), list)
        self.restart()

    def restart(self) -> None:
        """Start over, so that the next piece has number 0 and contains the whole answer so far."""
        self._ids = self.record.generated_ids
        self._number = self._tokens = self._chars = self._logprobs = self._extras = 0
        self._listed = dict.fromkeys(_GROWING_FIELDS, 0)
        self._prompt_logged = self._prompt_given
        self._ended = False

    def resume(self, pieces: Sequence[AnswerPiece]) -> None:
        """Continue after `pieces`, from which the record was reassembled."""
        record = self.record
        self._ids = record.generated_ids
        self._number = len(pieces)
        self._tokens = len(record.generated_ids)
        self._chars = len(record.text)
        self._logprobs = len(record.logprobs or ())
        self._extras = len(record.extras)
        self._listed = {name: len(record.choice_fields.get(name) or ()) for name in _GROWING_FIELDS}
        self._prompt_logged = True
        self._ended = record.finish_reason is not None

    def cut(self) -> AnswerPiece | None:
        """Return the next piece, or None if there is nothing new to store. If the answer started over, is relayed or
        was refused, the piece invalidates the earlier pieces."""
        record = self.record
        if record.failure is not None and record.failure.status < 500:  # continued, it would fail again
            return self.forget() if self._number else None
        if record.relayed:  # relayed answers are not stored
            return self.forget() if self._tokens else None
        tokens = len(record.generated_ids)
        ends = record.finish_reason if not self._ended else None
        if record.generated_ids is not self._ids:  # the answer started over
            if self._number and not tokens and ends is None:
                return self.forget()
            self.restart()
        if tokens == self._tokens and ends is None:
            return None
        text = record.text_from(self._chars) if self._chars else record.text
        prompt_ids = None
        if not self._prompt_logged and record.prompt_ids is not None and (ends is None or self._prompt_wanted):
            prompt_ids = array("I", record.prompt_ids).tobytes()
            self._prompt_logged = True
        changes = record.versions.changes(self._tokens)
        more = self._more(ends, changes)
        piece = AnswerPiece(
            self._answer,
            self._number,
            self._ids[self._tokens :].tobytes(),
            text.encode("utf-8", "surrogatepass"),
            prompt_ids,
            record.prompt_tokens,
            record.max_tokens,
            record.attempt,
            changes[0][1],
            ends,
            _compact(more) if more else None,
        )
        self._number += 1
        self._tokens = tokens
        self._chars += len(text)
        self._ended = ends is not None
        return piece

    def forget(self) -> AnswerPiece:
        """Return an empty piece 0. It invalidates all earlier pieces, so that the answer is not continued from them."""
        self.restart()
        self._number = 1
        return AnswerPiece(self._answer, 0, b"", b"", None, 0, None, self.record.attempt, None, None, None)

    def _more(self, ends: str | None, changes: Sequence[tuple[int, int | None]]) -> dict[str, Any]:
        record = self.record
        more: dict[str, Any] = {}
        if len(changes) > 1:
            more["changes"] = changes[1:]
        if record.logprobs is not None:
            new = record.logprobs[self._logprobs :]
            self._logprobs += len(new)
            more["logprobs"] = [
                (item.token, item.logprob, item.top, *([item.ranks] if item.ranks else [])) for item in new
            ]
        if len(record.extras) > self._extras:
            more["extras"] = record.extras[self._extras :]
            self._extras = len(record.extras)
        if record.immovable_because:
            more["immovable_because"] = record.immovable_because
        fields = {}
        for name, listed in self._listed.items():
            if new_entries := (record.choice_fields.get(name) or [])[listed:]:
                fields[name] = new_entries
                self._listed[name] += len(new_entries)
        if ends is not None:
            final = {name: getattr(record, name) for name in _FINAL_FIELDS}
            more.update({name: value for name, value in final.items() if value not in (None, {})})
            fields = {k: value for k, value in record.choice_fields.items() if k not in _GROWING_FIELDS} | fields
        if fields:
            more["choice_fields"] = fields
        return more


@dataclass(slots=True)
class KeptAnswer:
    """The stored part of an answer: its pieces up to the first missing piece."""

    attempt: int = 0
    pieces: list[AnswerPiece] = field(default_factory=list)

    @property
    def ids(self) -> "array[int]":
        return array("I", b"".join(piece.ids for piece in self.pieces))


def put_together(pieces: Iterable[AnswerPiece]) -> dict[int, KeptAnswer]:
    """Return the stored answers by index. `pieces` must be in the order in which they were written."""
    kept: dict[int, KeptAnswer] = {}
    for piece in pieces:
        answer = kept.get(piece.answer)
        if piece.number == 0 or answer is None:
            answer = kept[piece.answer] = KeptAnswer(answer.attempt if answer is not None else 0)
        answer.attempt = max(answer.attempt, piece.attempt)  # attempt ids are never reused
        if piece.number == len(answer.pieces):
            answer.pieces.append(piece)
    return kept


def give_back(record: RequestRecord, kept: KeptAnswer, now_s: float) -> bool:
    """Restore a stored answer into the record of a repeated request. Returns False if the answer cannot be continued
    and must start over."""
    record.attempt = kept.attempt
    if not kept.pieces:
        return False
    last, more = kept.pieces[-1], kept.pieces[-1].others
    stored_prompt = next((piece.prompt_ids for piece in reversed(kept.pieces) if piece.prompt_ids is not None), None)
    prompt_ids = record.prompt_ids or (None if stored_prompt is None else tuple(array("I", stored_prompt)))
    immovable_because = more.get("immovable_because", "")
    if last.finish_reason is None:
        tied = record.immovable_because or immovable_because
        if tied or not kept.ids or prompt_ids is None or last.max_tokens is None:
            return False
    record.prompt_ids = prompt_ids
    record.prompt_tokens_estimate = last.prompt_tokens
    record.max_tokens = last.max_tokens
    record.immovable_because = immovable_because
    for piece in kept.pieces:
        _append(record, piece, now_s)
    record.text_complete = False  # unknown; False is the safe value
    if last.finish_reason is not None:
        record.usage = more.get("usage")
        record.finish(last.finish_reason, more.get("stop_reason"), now_s)
    else:
        record.detach()
    return True


def _append(record: RequestRecord, piece: AnswerPiece, now_s: float) -> None:
    """Append the piece's tokens to the record, one chunk per policy version. The last chunk contains the text."""
    more = piece.others
    for extra in more.get("extras", ()):
        record.append(Chunk(), "", extra, now_s)
    ids = array("I", piece.ids)
    start = len(record.generated_ids)
    begins = [(start, piece.version), *more.get("changes", ())]
    ends = [begin for begin, _ in begins[1:]] + [start + len(ids)]
    logprobs = [
        TokenLogprob(token, value, tuple(map(tuple, top)), *map(tuple, ranks))
        for token, value, top, *ranks in more.get("logprobs", ())
    ]
    by_token = len(logprobs) == len(ids)  # otherwise all logprobs go with the last tokens
    for (begin, version), end in zip(begins, ends, strict=True):
        last = end == start + len(ids)
        found = logprobs[begin - start : end - start] if by_token else logprobs if last else ()
        chunk = Chunk(
            tuple(ids[begin - start : end - start]),
            logprobs=tuple(found) or None,
            choice_fields=more.get("choice_fields") if last else None,
            answer_fields=more.get("answer_fields") if last else None,
        )
        record.append(chunk, piece.text.decode("utf-8", "surrogatepass") if last else "", None, now_s, version)
    if record.endpoint is CompletionEndpoint.GENERATE:
        correct_versions(record.versions, more.get("choice_fields"))
