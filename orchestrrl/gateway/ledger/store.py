"""Store the answers of requests that were named by their clients, so that a client that reconnects finds its answer.

A client that lost its connection, or its gateway, repeats the request with the same id and body. A complete answer is
returned again, and an incomplete answer continues from its tokens. Nothing is generated for clients that do not return.
Requests without an id are not stored, because no client could ask for their answers again.

Requests do not wait for the disk. The growth of their answers is collected every `PROGRESS_S` seconds and when they
end, and a thread writes it in batches. A killed gateway loses only the most recent tokens, which are generated again.
If the disk is full or fails, requests continue without the ledger, and the failure is logged once and counted. When a
request arrives, the file's index is searched synchronously for the request's key. A thread reads the stored answer.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.gateway.http.completion_requests import CompletionRequest
from orchestrrl.gateway.http.responses import ResponseForm
from orchestrrl.gateway.ledger.file import AnswerFile, AnswerRow, NamedRequest, RequestClaims
from orchestrrl.gateway.ledger.ledger import DuplicateRequest, RequestRecord
from orchestrrl.gateway.ledger.pieces import AnswerPiece, RecordCutter, digest_of, give_back, key_of, put_together

logger = logging.getLogger(__name__)

PROGRESS_S = 0.5  # interval between collections of the answers' growth
ENTRIES_AT_ONCE = 64  # entries collected before the event loop runs other tasks
BATCH_S = 0.2  # duration for which pieces are gathered into one write
PRUNE_EVERY_S = 5.0
RETRY_AFTER_S = 1.0  # after a disk error
MOST_QUEUED_BYTES = 64 << 20  # if the disk is slower than the engines, pieces beyond this are dropped
READ_WITHIN_S = 0.05  # blocks the event loop; a reader waits only while another process repairs the file after a crash
# The previous connection of a returning client may not be closed yet.
CLAIM_WITHIN_S = 1.0
CLAIM_POLL_S = 0.02
ORDER_BYTES = 500  # memory of a queued order without its pieces
PRUNER = 0  # key of the claim of the process that prunes

# Errors of a disk that is full, broken, locked or missing, and of text that cannot be encoded.
_FAILURES = (sqlite3.Error, OSError, UnicodeError, OverflowError, Permanent)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The path of the ledger and the limits on what it stores. Requests that take less than `from_s` seconds are not
    stored, since they are quickly generated again. Answers are removed after `answers_s` seconds without growth, or
    earlier if the file exceeds `answers_bytes`."""

    path: Path
    from_s: float = BATCH_S
    answers_s: float = 3600.0
    answers_bytes: int = 1 << 30


@dataclass(slots=True)
class StoreCounts:
    """Counters of the ledger's store for the metrics page."""

    replayed: int = 0  # requests answered with a stored answer
    resumed: int = 0  # requests continued from stored tokens
    resumed_tokens: int = 0
    unwritten: int = 0  # pieces that could not be written
    pruned: int = 0


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """A named request that is being served. Only the event loop uses it, except that the writer thread sets `lost`."""

    key: int
    form: ResponseForm
    body: Mapping[str, Any]
    created_s: float
    records: Sequence[RequestRecord]
    opened_s: float
    cutters: Sequence[RecordCutter] = ()  # set when the first piece is written or restored
    named_request: NamedRequest | None = None  # likewise
    queued: bool = False  # pieces may be queued for the writer
    lost: bool = False  # set by the writer when pieces could not be written

    def begin(self) -> None:
        """Create the cutters and the NamedRequest before the first piece is cut. A repeated call has no effect."""
        if not self.cutters:
            wanted = bool(self.body.get("return_token_ids"))
            self.cutters = [
                RecordCutter(index, record, prompt_wanted=wanted) for index, record in enumerate(self.records)
            ]
        if self.named_request is None:
            digest = digest_of(self.form.endpoint, self.body)
            self.named_request = NamedRequest(self.form.request_id, digest, self.created_s)


@dataclass(slots=True)
class _Order:
    """An order to the writer thread to write pieces of one entry."""

    entry: LedgerEntry
    pieces: Sequence[AnswerPiece]
    written_s: float
    leaves: bool  # release the claim after the write, so that the request may be repeated
    memory_bytes: int


class LedgerStore:
    """Stores the answers of named requests. Call `start`, then `enter` and `leave` for each request, then `close`."""

    def __init__(self, keep: RetentionPolicy, clock: Clock) -> None:
        self.keep = keep
        self.counts = StoreCounts()
        self.failing = ""  # why writes currently fail; empty: they succeed
        self._clock = clock
        self._claims: RequestClaims | None = None
        self._reader: AnswerFile | None = None
        self._entries: dict[int, LedgerEntry] = {}
        self._progress: asyncio.TimerHandle | None = None
        self._orders: deque[_Order] = deque()
        self._queued_bytes = 0  # total queued so far; only the event loop writes it
        self._written_bytes = 0  # total handled so far; only the writer writes it
        self._news = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="ledger", daemon=True)

    @property
    def used_bytes(self) -> int | None:
        """The number of bytes in use in the file, or None while the file cannot be read."""
        try:
            return self._reader.used_bytes if self._reader is not None else None
        except sqlite3.Error:
            return None

    def start(self) -> None:
        """Open the file and start the writer thread. If the file cannot be opened, the writer retries."""
        try:
            self._open_for_requests()
        except _FAILURES as error:
            self._set_failing(str(error))
        self._writer.start()

    async def close(self) -> None:
        """Write the queued pieces and close the file."""
        if self._progress is not None:
            self._progress.cancel()
        self._closing.set()
        self._news.set()
        await asyncio.to_thread(self._writer.join)
        if self._reader is not None:
            self._reader.close()
        if self._claims is not None:
            self._claims.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def enter(self, request: CompletionRequest, body: Mapping[str, Any]) -> LedgerEntry | None:
        """Claim a request and restore the stored part of its answers into its records. The returned entry contains the
        creation time of the answer. Returns None if the ledger cannot be used. Raises DuplicateRequest if the id is in
        use or is stored with another body or credential."""
        claims = self._claims
        if claims is None:
            return None
        form, name = request.form, request.form.request_id
        key = key_of(name)
        try:
            if not claims.take(key) and not await self._claimed(claims, key):
                raise DuplicateRequest(f"request {name!r} is already in flight")
        except OSError as error:
            logger.error("%s: answers are no longer stored, since file locks fail: %s", self.keep.path, error)
            self._claims = None
            return None
        try:
            asked, pieces = await self._read(key, name) if self._may_have(key) else (None, [])
            if asked is not None and asked.digest != digest_of(form.endpoint, body):
                raise DuplicateRequest(
                    f"request id {name!r} was already used with another body or credential; use another id"
                )
            entry = LedgerEntry(key, form, body, form.created_unix_s, request.records, self._clock.now_s())
            if asked is not None:
                entry.named_request, entry.created_s = asked, asked.created_s
                entry.begin()
                self._give_back(entry, pieces)
        except BaseException:
            claims.free(key)
            raise
        self._entries[key] = entry
        if self._progress is None:
            self._progress = asyncio.get_running_loop().call_later(PROGRESS_S, self._collect_progress)
        return entry

    def leave(self, entry: LedgerEntry) -> None:
        """Queue the unwritten growth of the entry's answers, and release the claim after the write. Call this method
        when the records of the entry have ended. If the client has left, call it before the unfinished records are
        marked as ended, so that their stored answers can be continued."""
        del self._entries[entry.key]
        if entry.named_request is None and self._clock.now_s() - entry.opened_s < self.keep.from_s:
            if self._claims is not None:
                self._claims.free(entry.key)
            return
        self._queue(entry, leaves=True)
        # Free the memory now, since the entry may have to wait for the disk.
        entry.records, entry.cutters, entry.body = (), (), {}

    async def _claimed(self, claims: RequestClaims, key: int) -> bool:
        for _ in range(int(CLAIM_WITHIN_S / CLAIM_POLL_S)):
            await asyncio.sleep(CLAIM_POLL_S)
            if claims.take(key):
                return True
        return False

    def _may_have(self, key: int) -> bool:
        try:
            return self._reader is not None and not self.failing and self._reader.has(key)
        except sqlite3.Error as error:
            logger.warning("cannot look up a stored answer: %s", error)
            return False

    async def _read(self, key: int, name: str) -> tuple[NamedRequest | None, list[AnswerPiece]]:
        def read() -> tuple[NamedRequest | None, list[AnswerPiece]]:
            with closing(AnswerFile(self.keep.path)) as file:
                return file.read(key, name)

        try:
            return await asyncio.to_thread(read)
        except sqlite3.Error as error:
            logger.warning("request %s: cannot read its stored answer: %s", name, error)
            return None, []

    def _give_back(self, entry: LedgerEntry, pieces: Sequence[AnswerPiece]) -> None:
        kept = put_together(pieces)
        now_s = self._clock.now_s()
        for index, cutter in enumerate(entry.cutters):
            if index in kept and give_back(cutter.record, kept[index], now_s):
                cutter.resume(kept[index].pieces)
        records = entry.records
        if all(record.done for record in records):
            self.counts.replayed += 1
        elif tokens := sum(len(record.generated_ids) for record in records):
            self.counts.resumed += 1
            self.counts.resumed_tokens += tokens

    # --- growth of the answers ---------------------------------------------------------------------------------------

    def _collect_progress(self, after: Sequence[LedgerEntry] = ()) -> None:
        """Queue the growth of the answers of the entries in `after`. If `after` is empty, queue the growth of all
        requests that have been served for at least `PROGRESS_S` seconds. Younger requests may end before a write is
        worthwhile."""
        before_s = self._clock.now_s() - PROGRESS_S
        entries = after or [entry for entry in self._entries.values() if entry.opened_s <= before_s]
        for entry in entries[:ENTRIES_AT_ONCE]:
            if self._entries.get(entry.key) is entry:
                self._queue(entry, leaves=False)
        loop = asyncio.get_running_loop()
        if len(entries) > ENTRIES_AT_ONCE:
            self._progress = loop.call_later(0.0, self._collect_progress, entries[ENTRIES_AT_ONCE:])
        elif self._entries:
            self._progress = loop.call_later(PROGRESS_S, self._collect_progress)
        else:
            self._progress = None

    def _queue(self, entry: LedgerEntry, *, leaves: bool) -> None:
        entry.begin()
        if entry.lost:
            entry.lost = False
            for cutter in entry.cutters:
                cutter.restart()
        pieces = [piece for cutter in entry.cutters if (piece := cutter.cut()) is not None]
        if not pieces and not (leaves and entry.queued):
            if leaves and self._claims is not None:
                self._claims.free(entry.key)
            return
        memory_bytes = ORDER_BYTES + sum(piece.memory_bytes for piece in pieces)
        if self._queued_bytes - self._written_bytes > MOST_QUEUED_BYTES:
            pieces, entry.lost = [], True
        entry.queued = True
        self._queued_bytes += memory_bytes
        self._orders.append(_Order(entry, pieces, self._clock.now_s(), leaves, memory_bytes))
        if not self._news.is_set():
            self._news.set()

    # --- the writer's thread -----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        file: AnswerFile | None = None
        pruned_s = retry_s = 0.0
        pruner = False
        while True:
            self._news.wait(PRUNE_EVERY_S)
            closing_now = self._closing.wait(BATCH_S)  # returns at once when set
            self._news.clear()
            orders = [self._orders.popleft() for _ in range(len(self._orders))]
            now_s = time.monotonic()
            try:
                if self.failing and now_s < retry_s and not closing_now:
                    self._lose(orders)
                else:
                    file = file or self._opened()
                    written = self._write(file, orders)
                    if not pruner:
                        pruner = self._claims is not None and self._claims.take(PRUNER)
                    if pruner and now_s - pruned_s > PRUNE_EVERY_S:
                        pruned_s = now_s
                        self._prune(file)
                    if written:  # a file that can be opened may still reject writes
                        self._set_failing("")
            except _FAILURES as error:
                self._lose(orders)
                self._set_failing(str(error) or type(error).__name__)
                retry_s = now_s + RETRY_AFTER_S
                if file is not None:
                    file.close()
                    file = None
            for order in orders:
                if order.leaves and self._claims is not None:
                    self._claims.free(order.entry.key)
            self._written_bytes += sum(order.memory_bytes for order in orders)
            if closing_now:
                break
        if file is not None:
            file.close()

    def _opened(self) -> AnswerFile:
        self._open_for_requests()
        return AnswerFile(self.keep.path)

    def _open_for_requests(self) -> None:
        if self._reader is None:
            self._reader = AnswerFile(self.keep.path, READ_WITHIN_S)
        if self._claims is None:
            self._claims = RequestClaims(self.keep.path.with_name(self.keep.path.name + ".claims"))

    def _write(self, file: AnswerFile, orders: Sequence[_Order]) -> bool:
        """Write the pieces of the orders. Returns whether there were any pieces to write."""
        rows = [
            AnswerRow(order.entry.key, order.written_s, order.entry.named_request if piece.number == 0 else None, piece)
            for order in orders
            if not order.entry.lost
            for piece in order.pieces
        ]
        if rows:
            file.write(rows)
        return bool(rows)

    def _lose(self, orders: Sequence[_Order]) -> None:
        for order in orders:
            if order.pieces:
                order.entry.lost = True
                self.counts.unwritten += len(order.pieces)

    def _prune(self, file: AnswerFile) -> None:
        assert self._claims is not None
        before_s = self._clock.now_s() - self.keep.answers_s
        self.counts.pruned += file.prune(before_s, self.keep.answers_bytes, self._claims.take, self._claims.free)

    def _set_failing(self, failing: str) -> None:
        """Set the reason why writes fail, or "" if writes succeed. Changes between failure and success are logged."""
        if bool(failing) != bool(self.failing):
            if failing:
                logger.error("%s: answers cannot be stored: %s", self.keep.path, failing)
            else:
                logger.warning("%s: answers are stored again", self.keep.path)
        self.failing = failing
