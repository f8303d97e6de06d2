"""What the scheduler of an engine decides about handing KV over: which finished request is saved, what a new one loads.

One desk per engine. It keeps book by request id and answers in microseconds; only a look at an entry that a request
waits for reads a few small headers. Standard library only: vLLM's side is kv_handover.py, the files are kv_entries.py.

A request says what it wants in `kv_transfer_params` of its body:

    {"handover": {"weights": "step-7", "save": "ENTRY", "load": "ENTRY", "wait_s": 2.0}}

weights  the version of the weights that this attempt starts under; an entry of another version is never used
save     if this attempt is aborted, its KV becomes this entry (a fresh id per attempt)
load     this prompt continues that entry; what the entry does not hold is computed
wait_s   how long to wait for the entry to be complete (it may still be written) before everything is recomputed
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
WEIGHTS, SAVE, LOAD, WAIT_S = "weights", "save", "load", "wait_s"
DEFAULT_WAIT_S = 2.0
MAX_WAIT_S = 60.0
POLL_PERIOD_S = 0.005

logger = logging.getLogger("vllm.orchestrrl.kv_scheduler")


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What one request asked for. Read from `kv_transfer_params`."""

    weights: str
    save: str | None = None
    load: str | None = None
    wait_s: float = DEFAULT_WAIT_S


@dataclass(frozen=True, slots=True)
class SaveJob:
    """For the workers: write these blocks. Without blocks it says that there is nothing, and nobody need wait."""

    request_id: str
    entry: str
    contents: kv_entries.KvEntryContents
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """For the workers: fill `block_ids` with the blocks of the entry from `first_block` on."""

    request_id: str
    entry: str
    identity: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Waiting:
    """A request that has not loaded yet."""

    entry: str
    found: kv_entries.KvEntryContents | None = None
    computed: int = 0  # tokens that were there already when the rest was offered
    first_poll_s: float | None = None
    last_poll_s: float = -math.inf


def read_transfer_params(params: object) -> TransferParams | None:
    """The wish in `kv_transfer_params`, None without one. Raises ValueError with every fault at once."""
    if not isinstance(params, Mapping) or PARAMETER not in params:
        return None
    path = f"kv_transfer_params.{PARAMETER}"
    given: Any = params[PARAMETER]
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: must be an object, got {given!r}")
    faults = [f"{path}.{name}: is not a known field" for name in given if name not in (WEIGHTS, SAVE, LOAD, WAIT_S)]
    weights, wait_s = given.get(WEIGHTS), given.get(WAIT_S, DEFAULT_WAIT_S)
    if not isinstance(weights, str) or not weights:
        faults.append(f"{path}.{WEIGHTS}: must be a version's name, got {weights!r}")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
        faults.append(f"{path}.{WAIT_S}: must be 0 to {MAX_WAIT_S:g}, got {wait_s!r}")
    for name in (SAVE, LOAD):
        entry = given.get(name)
        if entry is not None and not (isinstance(entry, str) and kv_entries.is_entry_id(entry)):
            faults.append(f"{path}.{name}: must be 1 to 128 letters, digits, '.', '_', '~' or '-', got {entry!r}")
    if given.get(SAVE) is not None and given.get(SAVE) == given.get(LOAD):
        faults.append(f"{path}.{SAVE}: must differ from {LOAD}, got {given[SAVE]!r} for both")
    if faults:
        raise ValueError("; ".join(faults))
    return TransferParams(str(weights), given.get(SAVE), given.get(LOAD), float(wait_s))


@dataclass(slots=True, eq=False)
class KvTransferScheduler:
    """Who wants what, and what the workers are told next. `clock` gives seconds that never go back."""

    _store: kv_entries.KvEntryStore
    _keeper: kv_entries.KvEvictor
    _: KW_ONLY
    block_tokens: int
    bytes_per_block: int  # over all ranks
    clock: Callable[[], float]
    _wishes: dict[str, TransferParams] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _loading: set[str] = field(default_factory=set)
    _stale: set[str] = field(default_factory=set)
    _saves: list[SaveJob] = field(default_factory=list)
    _loads: list[LoadJob] = field(default_factory=list)

    def arrived(self, request_id: str, params: object) -> None:
        """A new request. A wish that cannot be read is told in the log and ignored: the request itself is fine."""
        try:
            wish = read_transfer_params(params)
        except ValueError as error:
            logger.warning("%s is served without a handover: %s", request_id, error)
            return
        if wish is not None:
            self._wishes[request_id] = wish
            if wish.load is not None:
                self._waiting[request_id] = _Waiting(wish.load)

    def loadable_tokens(self, request_id: str, token_ids: Sequence[int], computed: int) -> int | None:
        """How many tokens after the first `computed` can be loaded; None: ask again, the entry may be on its way.

        At least one token is always left to compute, since the next one comes out of it.
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
            self._expire(request_id, f"{usable} tokens of it can be used, {computed} are here already")
            return 0
        waiting.computed = computed
        return usable - computed

    def _poll(self, request_id: str, waiting: _Waiting) -> bool:
        """Look whether the entry is complete. Raises Unusable when it will not do, or does not come in time."""
        now_s = self.clock()
        if now_s - waiting.last_poll_s < POLL_PERIOD_S:
            return False
        wish = self._wishes[request_id]
        waiting.last_poll_s = now_s
        if waiting.first_poll_s is None:
            waiting.first_poll_s = now_s
        waiting.found = self._store.lookup(waiting.entry, wish.weights, self.block_tokens)
        if waiting.found is None and now_s - waiting.first_poll_s >= wish.wait_s:
            raise kv_entries.UnusableEntry(f"it did not come within {wish.wait_s:g} s")
        return waiting.found is not None

    def _expire(self, request_id: str, why: str) -> None:
        entry = self._waiting.pop(request_id).entry
        logger.info("%s recomputes, entry %s is not used: %s", request_id, entry, why)
        self._keeper.discard(entry)

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The scheduler took what was offered (or with 0 tokens did not), with `block_ids` for the whole request."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        if not external_tokens or waiting.found is None:
            self._expire(request_id, "the scheduler went ahead without it")
            return
        del self._waiting[request_id]
        self._loading.add(request_id)
        first = waiting.computed // self.block_tokens
        stop = -(-(waiting.computed + external_tokens) // self.block_tokens)
        blocks = tuple(block_ids[first:stop])
        self._loads.append(LoadJob(request_id, waiting.entry, waiting.found.identity, first, blocks))

    def loaded(self, request_ids: Sequence[str]) -> None:
        """These loads have ended, well or not."""
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
        """A request is over. True: its blocks are being saved and must stay until the workers say so.

        `computed` tokens have their KV in `block_ids` or get it in steps that are under way. Steps may run ahead of the
        tokens that are known: what belongs to unknown tokens is left out. `portable` is False for KV that depends on
        more than weights and token ids.
        """
        wish = self._wishes.pop(request_id, None)
        here = portable and request_id not in self._loading and request_id not in self._stale
        self._stale.discard(request_id)
        if request_id in self._waiting:
            self._expire(request_id, "the request is over")
        if wish is None or wish.save is None or not aborted:
            return False
        count = min(computed, len(token_ids), len(block_ids) * self.block_tokens) if here else 0
        blocks = -(-count // self.block_tokens)
        if blocks and not self._keeper.reserve(blocks * self.bytes_per_block):
            logger.warning("%s is not saved: %s is full", request_id, self._store.root)
            count = blocks = 0
        contents = kv_entries.KvEntryContents(
            wish.weights, self._store.ranks, self.block_tokens, array("I", islice(token_ids, count))
        )
        self._saves.append(SaveJob(request_id, wish.save, contents, tuple(block_ids[:blocks])))
        return blocks > 0

    def caches_cleared(self) -> None:
        """The engine was told to forget its caches, as for new weights: what runs now has no KV of one known version,
        and says so when it is moved."""
        self._stale.update(self._wishes)

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its entry, or for a place to load it to."""
        return bool(self._waiting)

    def jobs(self) -> tuple[list[SaveJob], list[LoadJob]]:
        """What the workers are to do with the next step. Each is told once."""
        saves, loads = self._saves, self._loads
        self._saves, self._loads = [], []
        return saves, loads


def _continued(found: kv_entries.KvEntryContents, token_ids: Sequence[int]) -> int:
    """How many of these tokens' KV the entry has. Raises Unusable when neither is the beginning of the other."""
    common = min(len(found.token_ids), len(token_ids))
    if found.token_ids[:common] != array("I", islice(token_ids, common)):
        raise kv_entries.UnusableEntry("it belongs to other tokens")
    return min(common, len(token_ids) - 1)
