"""A KV connector for vLLM that moves the KV cache of a running request to another server through a shared directory.

vLLM loads the connector if it is started with this option and this folder is on PYTHONPATH:

    --kv-transfer-config '{"kv_connector": "KvHandover", "kv_connector_module_path": "kv_handover",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": "/some/dir"}}'

An aborted request whose `kv_transfer_params` name an entry (see kv_scheduler.py) keeps its blocks until they are saved
in the shared directory. A request on another server that names the same entry loads the blocks. Threads save and load
blocks concurrently with the engine's steps. All servers must have the same vLLM version, block size, number of ranks
and KV layout.
"""

import contextlib
import platform
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument.kv_entries import KvBlockLayout, KvEntryStore, KvEvictor, UnusableEntry
    from orchestrrl.integrations.instrument.kv_scheduler import POLL_PERIOD_S, KvTransferScheduler, LoadJob, SaveJob
else:  # in vLLM's process, where this folder is on the path
    from kv_entries import KvBlockLayout, KvEntryStore, KvEvictor, UnusableEntry
    from kv_scheduler import POLL_PERIOD_S, KvTransferScheduler, LoadJob, SaveJob

DEFAULT_MAX_AGE_S = 300.0
DEFAULT_MAX_BYTES = 16 << 30
STAGE_BYTES = 32 << 20  # size of one copy between a GPU and its host

logger = init_logger("vllm.orchestrrl.kv_handover")


@dataclass
class KvJobs(KVConnectorMetadata):  # type: ignore[misc]  # vllm is not installed where types are checked
    """The save and load jobs that the scheduler's connector sends to the workers' connectors with one engine step."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)


class KvHandover(KVConnectorBase_V1):  # type: ignore[misc]
    """The KV connector. vLLM creates one in the scheduler and one in each worker. Raises ValueError if vLLM's
    configuration is not supported."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        shared = transfer.get_from_extra_config("shared_storage_path", None)
        max_age_s = float(transfer.get_from_extra_config("max_age_s", DEFAULT_MAX_AGE_S))
        max_bytes = int(transfer.get_from_extra_config("max_bytes", DEFAULT_MAX_BYTES))
        groups = kv_cache_config.kv_cache_groups
        claims = {
            f"kv_connector_extra_config.shared_storage_path: must be an absolute path, got {shared!r}": (
                isinstance(shared, str) and Path(shared).is_absolute()
            ),
            f"kv_connector_extra_config.max_age_s: must be > 0, got {max_age_s}": max_age_s > 0,
            f"kv_connector_extra_config.max_bytes: must be > 0, got {max_bytes}": max_bytes > 0,
            "kv_load_failure_policy: must be 'recompute', so that an unreadable entry is recomputed, "
            f"got {transfer.kv_load_failure_policy!r}": transfer.kv_load_failure_policy == "recompute",
            f"model: must have one KV cache group, got {len(groups)}": len(groups) == 1,
        }
        if faults := [fault for fault, holds in claims.items() if not holds]:
            raise ValueError("KvHandover: " + "; ".join(faults))
        parallel = vllm_config.parallel_config
        store = KvEntryStore(Path(shared), ranks=parallel.world_size)
        if role == KVConnectorRole.SCHEDULER:
            self._keeper = KvEvictor(store, max_age_s, max_bytes)
            sizes = [int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors]
            self._scheduler = KvTransferScheduler(
                store,
                self._keeper,
                block_tokens=groups[0].kv_cache_spec.block_size,
                bytes_per_block=parallel.world_size * (sum(sizes) // int(kv_cache_config.num_blocks)),
                clock=time.monotonic,
            )
            self._keeper.start()
        else:
            self._worker = KvWorker(store, parallel.rank, kv_cache_config.num_blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # KV that is not transferred is recomputed

    # Methods called in the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request.request_id, request.kv_transfer_params)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.loadable_tokens(request.request_id, request.all_token_ids, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loaded(tuple(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        keep = self._scheduler.finished(
            request.request_id,
            request.all_token_ids,
            request.num_computed_tokens,
            block_ids,
            aborted=request.status == RequestStatus.FINISHED_ABORTED,
            portable=not (request.lora_request or request.mm_features or request.prompt_embeds is not None),
        )
        return keep, None

    def build_connector_meta(self, scheduler_output: Any) -> KvJobs:
        # vLLM's scheduler spins while a request waits and nothing runs, which would take CPU time from another engine
        # on the host, possibly the one that is saving.
        if self._scheduler.waiting and not scheduler_output.total_num_scheduled_tokens:
            time.sleep(POLL_PERIOD_S)
        return KvJobs(*self._scheduler.jobs())

    def reset_cache(self) -> bool:
        self._scheduler.caches_cleared()
        return True

    # Methods called in workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for job in self._get_connector_metadata().loads:
            self._worker.load(job)

    def wait_for_save(self) -> None:
        for job in self._get_connector_metadata().saves:
            self._worker.save(job)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        saved, loaded, failed = self._worker.ended()
        return KVConnectorTransferResults(finished_sending=saved, finished_recving=loaded, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self._keeper.stop()
        else:
            self._worker.stop()


class KvWorker:
    """Copies blocks between the KV cache of one rank and the rank's files in a `KvEntryStore`. One thread saves blocks
    and another thread loads blocks."""

    def __init__(self, store: KvEntryStore, rank: int, num_blocks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_blocks = num_blocks
        self._caches: list[torch.Tensor] = []  # [block, ...] each, one per layer
        self._layout = KvBlockLayout((), ())
        self._stream: torch.cuda.Stream | None = None
        self._saver = ThreadPoolExecutor(1, "kv-save")
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV cache tensors, by layer name. A tensor that several layers share is copied once.

        Raises ValueError if a tensor does not consist of the engine's number of blocks, or is not on a CPU or CUDA
        device.
        """
        names, seen = [], set()
        self._caches = []
        for name, cache in kv_caches.items():
            if not isinstance(cache, torch.Tensor) or cache.shape[0] % self._num_blocks:
                raise ValueError(
                    f"the KV cache of layer {name} must be a tensor whose first dimension is a multiple of"
                    f" {self._num_blocks} blocks, got {getattr(cache, 'shape', type(cache).__name__)}"
                )
            if cache.device.type not in ("cpu", "cuda"):
                raise ValueError(f"the KV cache of layer {name} must be on a cpu or cuda device, got {cache.device}")
            if cache.data_ptr() in seen:
                continue
            seen.add(cache.data_ptr())
            grouped = cache.unflatten(0, (self._num_blocks, -1))
            self._caches.append(grouped)
            names.append(f"{name} {cache.dtype} {list(grouped.shape[1:])} {_packing(cache)} vllm {vllm.__version__}")
        self._layout = KvBlockLayout(
            tuple(names), tuple(cache[0].numel() * cache.element_size() for cache in self._caches)
        )
        if self._caches and self._caches[0].is_cuda:
            self._stream = torch.cuda.Stream(self._caches[0].device)

    def save(self, job: SaveJob) -> None:
        ready = self._now()
        self._saver.submit(self._save, job, ready)

    def load(self, job: LoadJob) -> None:
        ready = self._now()
        self._loader.submit(self._load, job, ready)

    def ended(self) -> tuple[set[str], set[str], set[str]]:
        """Return three sets of request ids: requests whose save has ended since the last call, requests whose load has
        ended since then, and requests whose load has failed. A request with a failed load is in both of the last two
        sets. Saves without blocks are left out."""
        ended: dict[str, set[str]] = {"saved": set(), "loaded": set(), "failed": set()}
        while not self._ended.empty():
            what, request_id = self._ended.get()
            ended[what].add(request_id)
        return ended["saved"], ended["loaded"] | ended["failed"], ended["failed"]

    def stop(self) -> None:
        self._saver.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _now(self) -> Any:
        """Record and return a CUDA event that follows the work submitted to the current stream so far. Return None on a
        CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._caches[0].device).record_event()

    def _save(self, job: SaveJob, ready: Any) -> None:
        started_s = time.monotonic()
        try:
            with self._beside(ready):
                pieces = (self._pieces(cache, job.block_ids) for cache in self._caches)
                size = self._store.write(job.entry, self._rank, job.contents, self._layout, pieces)
            elapsed_s = time.monotonic() - started_s
            tokens = len(job.contents.token_ids)
            logger.info("saved %d tokens of %s (%d bytes, %.4f s)", tokens, job.request_id, size, elapsed_s)
        except Exception as error:  # noqa: BLE001  # in any case the request is recomputed and its blocks are freed
            logger.warning("entry %s of %s was not saved: %r", job.entry, job.request_id, error)
        if job.block_ids:
            self._ended.put(("saved", job.request_id))

    def _load(self, job: LoadJob, ready: Any) -> None:
        started_s = time.monotonic()
        outcome = "failed"
        try:
            wanted = range(job.first_block, job.first_block + len(job.block_ids))
            with self._beside(ready):
                pieces = (self._pieces(cache, job.block_ids, fill=True) for cache in self._caches)
                size = self._store.read(job.entry, self._rank, job.identity, self._layout, wanted, pieces)
            outcome = "loaded"
            elapsed_s = time.monotonic() - started_s
            logger.info("loaded %d blocks of %s (%d bytes, %.4f s)", len(wanted), job.request_id, size, elapsed_s)
        except UnusableEntry as error:
            logger.warning("%s is recomputed, entry %s cannot be loaded: %s", job.request_id, job.entry, error)
        except Exception:
            logger.exception("%s is recomputed, entry %s cannot be loaded", job.request_id, job.entry)
        self._store.discard(job.entry, self._rank)
        self._ended.put((outcome, job.request_id))

    @contextlib.contextmanager
    def _beside(self, ready: Any) -> Iterator[None]:
        """Run the copies of the enclosed code on a separate CUDA stream, after the event `ready` and concurrently with
        engine steps. Has no effect on a CPU."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def _pieces(self, cache: torch.Tensor, block_ids: Sequence[int], *, fill: bool = False) -> Iterator[memoryview]:
        """Yield the bytes of the blocks `block_ids` of one layer's `cache`, in pieces of whole blocks. If `fill` is
        set, the bytes that the caller writes to a piece are stored in `cache`.

        If the blocks are contiguous in host memory, each block is one piece. Otherwise the blocks are copied through
        staging buffers.
        """
        if not cache.is_cuda and cache[0].is_contiguous():
            for block in block_ids:
                yield _bytes_of(cache[block])
            return
        per_piece = max(1, STAGE_BYTES // (cache[0].numel() * cache.element_size()))
        for at in range(0, len(block_ids), per_piece):
            index = torch.tensor(block_ids[at : at + per_piece], device=cache.device)
            shape = (len(index), *cache.shape[1:])
            staged = torch.empty(shape, dtype=cache.dtype, pin_memory=cache.is_cuda)
            if not fill:
                staged.copy_(cache.index_select(0, index))
            yield _bytes_of(staged)
            if fill:
                cache.index_copy_(0, index, staged.to(cache.device))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory without a copy."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _packing(cache: torch.Tensor) -> str:
    """Return a text that describes the properties, other than the shape, that determine a block's byte layout. On CPUs,
    the instruction set is one of these properties, because attention kernels arrange the keys for it."""
    strides = list(cache[0].stride())
    if cache.is_cuda:
        return f"cuda strides {strides}"
    amx = torch.cpu._is_amx_tile_supported()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' if amx else ''} strides {strides}"
