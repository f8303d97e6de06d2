"""Schedule the KV transfers of an engine. The scheduler decides for which ended requests the KV cache is saved, and
which entry a new request loads.

There is one scheduler per engine. It tracks transfers by request id. Its methods return in microseconds, except that a
poll of an awaited entry reads a few small headers. This module uses only the standard library. kv_handover.py is the
connector to vLLM, and kv_entries.py handles the files.

A request selects its transfers in `kv_transfer_params` of its body:

    {"handover": {"weights": "step-7", "save": "ENTRY", "load": "ENTRY", "wait_s": 2.0}}

weights  the weight version with which this attempt starts; an entry of another version is never used
save     the entry in which the attempt's KV is saved if the attempt is aborted (a new id per attempt)
at_end   true: the KV is also saved if the attempt ends by itself
load     the entry from which the prompt's KV is loaded; tokens that the entry lacks are computed
wait_s   the longest time, in seconds, to wait for the entry to be complete; after it, all tokens are recomputed
"""

import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument import kv_entries
else:  # in vLLM's process, where this folder is on the path
    import kv_entries

PARAMETER = "handover"
WEIGHTS, SAVE, LOAD, WAIT_S, AT_END = "weights", "save", "load", "wait_s", "at_end"
DEFAULT_WAIT_S = 2.0
MAX_WAIT_S = 60.0
POLL_PERIOD_S = 0.005

logger = logging.getLogger("vllm.orchestrrl.kv_scheduler")


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The transfers that a request selects in `kv_transfer_params`: the entry in which its KV is saved, and the
    entry from which its KV is loaded. `wait_s` is the longest time, in seconds, to wait until the entry to load is
    complete."""

    weights: str
    save: str | None = None
    load: str | None = None
    wait_s: float = DEFAULT_WAIT_S
    at_end: bool = False  # save the KV even if the request is not aborted


@dataclass(frozen=True, slots=True)
class SaveJob:
    """An order to the workers to save the KV blocks `block_ids` as an entry. If there are no blocks, an empty entry is
    saved, so that no reader waits for the entry in vain."""

    request_id: str
    entry: str
    contents: kv_entries.KvEntryContents
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """An order to the workers to fill the engine's blocks `block_ids` with consecutive blocks of an entry, beginning
    with the entry's block `first_block`."""

    request_id: str
    entry: str
    identity: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Waiting:
    """The state of a request that waits for its entry, or for vLLM to allocate the blocks into which the entry is
    loaded."""

    entry: str
    found: kv_entries.KvEntryContents | None = None
    computed: int = 0  # tokens already computed when the rest was offered
    first_poll_s: float | None = None
    last_poll_s: float = -math.inf


def read_transfer_params(params: object) -> TransferParams | None:
    """Parse a request's `kv_transfer_params`; return None if they have no `handover` field. Raises ValueError, listing
    all faults, if the field is invalid."""
    if not isinstance(params, Mapping) or PARAMETER not in params:
        return None
    path = f"kv_transfer_params.{PARAMETER}"
    given: Any = params[PARAMETER]
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: must be an object, got {given!r}")
    faults = [
        f"{path}.{name}: is an unknown field" for name in given if name not in (WEIGHTS, SAVE, LOAD, WAIT_S, AT_END)
    ]
    weights, wait_s = given.get(WEIGHTS), given.get(WAIT_S, DEFAULT_WAIT_S)
    if not isinstance(weights, str) or not weights:
        faults.append(f"{path}.{WEIGHTS}: must be a non-empty string, got {weights!r}")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
        faults.append(f"{path}.{WAIT_S}: must be 0 to {MAX_WAIT_S:g}, got {wait_s!r}")
    if not isinstance(at_end := given.get(AT_END, False), bool):
        faults.append(f"{path}.{AT_END}: must be true or false, got {at_end!r}")
    for name in (SAVE, LOAD):
        entry = given.get(name)
        if entry is not None and not (isinstance(entry, str) and kv_entries.is_entry_id(entry)):
            faults.append(f"{path}.{name}: must be 1 to 128 letters, digits, '.', '_', '~' or '-', got {entry!r}")
    if given.get(SAVE) is not None and given.get(SAVE) == given.get(LOAD):
        faults.append(f"{path}.{SAVE}: must differ from {LOAD}, got {given[SAVE]!r} for both")
    if faults:
        raise ValueError("; ".join(faults))
    return TransferParams(str(weights), given.get(SAVE), given.get(LOAD), float(wait_s), at_end)


@dataclass(slots=True, eq=False)
class KvTransferScheduler:
    """The state of one engine's KV transfers, and the jobs for the workers' next step. `block_tokens` is the number of
    tokens per block. `clock` returns a monotonic time in seconds."""

    _store: kv_entries.KvEntryStore
    _keeper: kv_entries.KvEvictor
    _: KW_ONLY
    block_tokens: int
    bytes_per_block: int  # sum over all ranks
    clock: Callable[[], float]
    _wishes: dict[str, TransferParams] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _loading: set[str] = field(default_factory=set)
    _stale: set[str] = field(default_factory=set)
    _saves: list[SaveJob] = field(default_factory=list)
    _loads: list[LoadJob] = field(default_factory=list)

    def arrived(self, request_id: str, params: object) -> None:
        """Register a new request with its `kv_transfer_params`. Invalid parameters are logged and ignored; the request
        itself is served."""
        try:
            wish = read_transfer_params(params)
        except ValueError as error:
            logger.warning("%s is served without a KV transfer: %s", request_id, error)
            return
        if wish is not None:
            self._wishes[request_id] = wish
            if wish.load is not None:
                self._waiting[request_id] = _Waiting(wish.load)

    def loadable_tokens(self, request_id: str, token_ids: Sequence[int], computed: int) -> int | None:
        """Return how many tokens after the first `computed` tokens can be loaded from the request's entry. Return None
        if the entry may still arrive; the caller must then call again.

        At least one token of the prompt is never loaded, because computing it yields the next token.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return 0
        try:
            if waiting.found is None and not self._poll(request_id, waiting):
                return None
            assert waiting.found is not None
            usable = _continued(waiting.found, token_ids)
        except kv_entries.UnusableEntry as error:
            self._expire(request_id, str(error))
            return 0
        if usable <= computed:
            self._expire(request_id, f"only {usable} of its tokens can be used, and {computed} are computed already")
            return 0
        waiting.computed = computed
        return usable - computed

    def _poll(self, request_id: str, waiting: _Waiting) -> bool:
        """Look up the request's entry, at most once per `POLL_PERIOD_S`; return whether the lookup has found it
        complete. Raises UnusableEntry if the entry is unusable or is not complete within the request's `wait_s`."""
        now_s = self.clock()
        if now_s - waiting.last_poll_s < POLL_PERIOD_S:
            return False
        wish = self._wishes[request_id]
        waiting.last_poll_s = now_s
        if waiting.first_poll_s is None:
            waiting.first_poll_s = now_s
        waiting.found = self._store.lookup(waiting.entry, wish.weights, self.block_tokens)
        if waiting.found is None and now_s - waiting.first_poll_s >= wish.wait_s:
            raise kv_entries.UnusableEntry(f"the KV entry did not arrive within {wish.wait_s:g} s")
        return waiting.found is not None

    def _expire(self, request_id: str, why: str) -> None:
        entry = self._waiting.pop(request_id).entry
        logger.info("%s is recomputed, entry %s is not used: %s", request_id, entry, why)
        self._keeper.discard(entry)

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """Queue a request's load into the blocks `block_ids`, which vLLM has allocated. `external_tokens` is the number
        of tokens to load; if it is 0, the load is dropped."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        if not external_tokens or waiting.found is None:
            self._expire(request_id, "vLLM's scheduler did not use it")
            return
        del self._waiting[request_id]
        self._loading.add(request_id)
        first = waiting.computed // self.block_tokens
        stop = -(-(waiting.computed + external_tokens) // self.block_tokens)
        blocks = tuple(block_ids[first:stop])
        self._loads.append(LoadJob(request_id, waiting.entry, waiting.found.identity, first, blocks))

    def loaded(self, request_ids: Sequence[str]) -> None:
        """Mark the loads of these requests as ended, successfully or not."""
        self._loading.difference_update(request_ids)

    def finished(
        self,
        request_id: str,
        token_ids: Sequence[int],
        computed: int,
        block_ids: Sequence[int],
        *,
        aborted: bool,
        portable: bool,
    ) -> bool:
        """Handle the end of a request. Return whether its blocks are being saved; if so, the caller must keep them
        until the workers report the end of the save.

        The blocks `block_ids` contain the KV of the first `computed` tokens, or will contain it after the running
        steps. Running steps may compute tokens that are not yet in `token_ids`; their KV is not saved. `portable` is
        False if the KV depends on more than weights and token ids.
        """
        wish = self._wishes.pop(request_id, None)
        here = portable and request_id not in self._loading and request_id not in self._stale
        self._stale.discard(request_id)
        if request_id in self._waiting:
            self._expire(request_id, "the request has ended")
        if wish is None or wish.save is None or not (aborted or wish.at_end):
            return False
        count = min(computed, len(token_ids), len(block_ids) * self.block_tokens) if here else 0
        blocks = -(-count // self.block_tokens)
        if blocks and not self._keeper.reserve(blocks * self.bytes_per_block):
            logger.warning("KV of %s is not saved: %s is full", request_id, self._store.root)
            count = blocks = 0
        contents = kv_entries.KvEntryContents(
            wish.weights, self._store.ranks, self.block_tokens, array("I", islice(token_ids, count))
        )
        self._saves.append(SaveJob(request_id, wish.save, contents, tuple(block_ids[:blocks])))
        return blocks > 0

    def caches_cleared(self) -> None:
        """Handle a reset of the engine's caches, for example for new weights. The KV of a running request may then
        belong to more than one weight version, so an empty entry is saved if the request is moved."""
        self._stale.update(self._wishes)

    @property
    def waiting(self) -> bool:
        """Return whether any request waits for its entry, or for the blocks into which the entry is loaded."""
        return bool(self._waiting)

    def jobs(self) -> tuple[list[SaveJob], list[LoadJob]]:
        """Return the save and load jobs for the workers' next step, and clear the queues."""
        saves, loads = self._saves, self._loads
        self._saves, self._loads = [], []
        return saves, loads


def _continued(found: kv_entries.KvEntryContents, token_ids: Sequence[int]) -> int:
    """Return the number of leading tokens of `token_ids` whose KV can be taken from the entry `found`. The last token
    of `token_ids` is never included. Raises UnusableEntry if `token_ids` and the entry's tokens diverge."""
    common = min(len(found.token_ids), len(token_ids))
    if found.token_ids[:common] != array("I", islice(token_ids, common)):
        raise kv_entries.UnusableEntry("the tokens of the KV entry differ from those of the request")
    return min(common, len(token_ids) - 1)
