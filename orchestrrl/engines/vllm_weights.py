"""Load new weights into a running vLLM server, from a folder on its host or from a trainer's process.

If the server's workers have OrchestrRL's backend (`--weight-transfer-config '{"backend": "orchestrrl"}'`,
integrations/instrument/vllm_weights.py), a version is loaded through vLLM's weight-transfer endpoints. Each worker then
reports a checksum of the loaded bytes and whether the weights in its memory match them. Without this backend, a version
is loaded through `reload_weights`, which needs only VLLM_SERVER_DEV_MODE=1. The checksum is then computed in this
process, if the folder is visible on this host, and the engine's memory is not verified.

A trainer's weights are transferred to the workers by the backend that the server was started with
(`--weight-transfer-config '{"backend": NAME}'`).
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent
from orchestrrl.engines.base import LoadedWeights, TransferEnds
from orchestrrl.engines.vllm_info import VllmServerInfo
from orchestrrl.engines.vllm_managed import LOAD_NEEDS, LOAD_TIMEOUT_S, LOADING, ManagedVllm
from orchestrrl.engines.vllm_weight_flags import BACKEND, METHOD, WorkerReport
from orchestrrl.integrations.instrument import checkpoint_files
from orchestrrl.integrations.instrument.checkpoint_files import BrokenCheckpoint

NAMING = "/update_weight_version"
BACKEND_NEEDS = frozenset({"/collective_rpc", "/start_weight_update", "/update_weights", "/finish_weight_update"})
TRANSFER_NEEDS = frozenset(
    {
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/pause", "/is_paused", "/server_info", NAMING, "/weight_info"),
    }
)
EMPTY_WITHIN_S = 2.0  # the metrics count ended requests for a moment longer
POLL_S = 0.1
RECHECK_S = 1.0  # interval of checks that an engine is not paused while it answers a probe


_WORKERS: TypeAdapter[list[WorkerReport]] = TypeAdapter(list[WorkerReport])


class VllmWeights:
    """Loads weights into one server, from a folder or from a trainer's process."""

    def __init__(self, server: ManagedVllm) -> None:
        self._server = server
        self._url = server.where  # for messages

    async def load_weights(self, folder: Path | str, version: int, known_sum: str | None = "") -> LoadedWeights:
        page = await self._server.metrics_page()
        started = await self._server.as_started(page)
        await self._server.check_load(LOAD_NEEDS if known_sum is None else LOAD_NEEDS | {NAMING}, started.paths, page)
        has_backend = _has_backend(started)
        given = ""
        if not has_backend and known_sum is not None:
            # vLLM does not check the folder: if tensors are missing, it silently keeps the old ones.
            given = await asyncio.to_thread(_checked_sum, Path(folder), started.serving.model, known_sum)
        async with self._server.loading(folder, str(version), takes_names=NAMING in started.paths) as before:
            if has_backend:
                return await self._transfer(folder, version)
            # After a failed load, vLLM's layers may wait for the rest of its weights and take them from the next load.
            # Only the load after that starts every layer at its beginning.
            for _ in range(2 if before == LOADING else 1):
                await self._server.reload(str(folder))
            return LoadedWeights(version, given)

    async def loaded(self) -> LoadedWeights | None:
        version = await self._server.weight_version()
        if version is None:
            return None
        if await self.has_backend():
            workers = await self._workers()
            if any(worker.is_torn for worker in workers):
                return None
            if (agreed := self._agreed(workers, version)) is not None:
                return agreed
        # The version was set by a load through `reload_weights`, or for the initial weights.
        return LoadedWeights(version)

    async def takes_sums(self) -> bool:
        return not await self.has_backend()

    async def has_backend(self) -> bool:
        """Return whether the server has OrchestrRL's backend, according to its configuration. The workers are not
        called, because calling a method that they lack could disturb vLLM."""
        return _has_backend(await self._server.as_started())

    async def continue_greedily(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        was_paused = await self._server.is_paused()
        if was_paused:
            await self._until_empty()
        try:
            await self._server.resume_if(was_paused)
            asked = self._server.go_on(prompt_ids, max_tokens)
            return await (self._kept_running(asked) if was_paused else asked)
        finally:
            if was_paused:
                with self._open_outcome("was paused before a probe and may now run"):
                    await self._server.order("/pause?mode=keep&clear_cache=false")

    async def _kept_running(self, asked: Coroutine[Any, Any, tuple[int, ...]]) -> tuple[int, ...]:
        """Await the answer of an engine that was paused before the request, and resume the engine if it is paused
        again. This is necessary because a gateway that attaches while the pause barrier is closed pauses every engine,
        and the answer would then never arrive."""
        task = asyncio.create_task(asked)
        try:
            while not (await asyncio.wait({task}, timeout=RECHECK_S))[0]:
                await self._server.resume_if(await self._server.is_paused())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _transfer(self, folder: Path | str, version: int) -> LoadedWeights:
        if any(worker.is_updating for worker in await self._workers()):  # an earlier update was not finished
            await self._server.order("/finish_weight_update")
        failed: OrchestrRLError | None = None
        try:
            await self._server.order("/start_weight_update")
            update = {"update_info": {"folder": str(folder), "version": version}}
            await self._server.order("/update_weights", update, LOAD_TIMEOUT_S)
            await self._server.order("/finish_weight_update")
        except OrchestrRLError as error:
            failed = error
        with self._open_outcome(f"{failed or 'loaded weights'}, but its workers do not report"):
            workers = await self._workers()
        faults = [worker.fault for worker in workers if worker.fault]
        because = "; ".join(dict.fromkeys(faults))
        if len(faults) == len(workers) and not any(worker.is_torn for worker in workers):
            raise Permanent(f"{self._url}: the workers refused the weights: {because}") from failed
        if faults:
            raise OutcomeUnknown(f"{self._url}: may have loaded only part of the weights: {because}") from failed
        if failed is not None:
            raise OutcomeUnknown(f"{self._url}: failed to load {folder}: {failed}") from failed
        if (agreed := self._agreed(workers, version)) is None:
            raise OutcomeUnknown(f"{self._url}: loaded {folder}, but not all workers have version {version}: {workers}")
        return agreed

    async def _until_empty(self) -> None:
        """Wait until the paused engine has no requests, because frozen requests would continue when it is resumed.
        Raises Permanent if the engine still has requests after `EMPTY_WITHIN_S`."""
        for _ in range(round(EMPTY_WITHIN_S / POLL_S)):
            now = await self._server.metrics()
            if not now.running + now.waiting:
                return
            await asyncio.sleep(POLL_S)
        raise Permanent(
            f"{self._url}: cannot be resumed for a probe while it has {now.running + now.waiting} frozen requests,"
            " because they would continue"
        )

    async def _workers(self) -> list[WorkerReport]:
        answer = await self._server.ask("POST", "/collective_rpc", {"method": METHOD})
        with self._server.reading("/collective_rpc"):
            try:
                workers = _WORKERS.validate_python(answer["results"])
            except ValidationError as error:
                raise ValueError(f"the workers' reports are malformed: {error}") from error
            if not workers:
                raise ValueError("the response must contain a report from at least one worker, got none")
            return workers

    def _agreed(self, workers: Sequence[WorkerReport], version: int) -> LoadedWeights | None:
        """Return the weights that all workers have. Return None if a worker does not have complete weights of
        `version`."""
        if {(worker.version, worker.is_torn) for worker in workers} != {(version, False)}:
            return None
        sums = list(dict.fromkeys(worker.sum for worker in workers))  # hosts with other parts have other sums
        return LoadedWeights(version, "+".join(sums), all(worker.is_read_back for worker in workers))

    # --- from a trainer's process, over vLLM's weight-transfer endpoints

    async def ends(self) -> TransferEnds:
        info = await self._server.description()
        if missing := TRANSFER_NEEDS - info.paths:
            absent = ", ".join(sorted(missing))
            raise Permanent(f"{self._url}: lacks the endpoints {absent}; start the server with VLLM_SERVER_DEV_MODE=1")
        facts = info.serving
        return TransferEnds(info.weight_backend or "", (facts.tp or 1) * (facts.pp or 1) * (info.replicas or 1))

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        """Connect the workers to the trainer. Until the trainer connects, the workers only wait for it."""
        if "/shutdown_weight_transfer_engine" in (await self._server.as_started()).paths:
            with suppress(OrchestrRLError):  # it fails without a connection, or after an interrupted update
                await self._server.order("/shutdown_weight_transfer_engine")
        await self._server.order("/init_weight_transfer_engine", {"init_info": init_info}, within_s)

    async def start(self) -> None:
        await self._at_rest()
        if await self._server.weight_name() == LOADING:
            # An earlier update was interrupted: vLLM may wait for the rest of it.
            with suppress(OrchestrRLError):
                await self._server.order("/finish_weight_update")
        await self.begin()
        with self._open_outcome("did not start the weight update"):
            await self._server.order("/start_weight_update")

    async def begin(self) -> None:
        await self._at_rest()
        await self._server.pause_without_kv()
        # During the transfer, the old name would be wrong.
        await self._server.set_weight_name(LOADING)

    async def call_workers(self, method: str, arguments: Sequence[Any], within_s: float) -> None:
        order = {"method": method, "args": list(arguments), "timeout": within_s}
        with self._open_outcome("may have loaded only part of the weights"):
            await self._server.order("/collective_rpc", order, within_s)

    async def end(self, version: int) -> None:
        with self._open_outcome("has new weights, but setting their version failed"):
            await self._server.set_weight_name(str(version))

    async def update(self, update_info: Mapping[str, Any] | Sequence[Any], within_s: float) -> None:
        with self._open_outcome("may have loaded only part of the weights"):
            await self._server.order("/update_weights", {"update_info": update_info}, within_s)

    async def finish(self, version: int, within_s: float) -> None:
        with self._open_outcome("may have loaded only part of the weights"):
            await self._server.order("/finish_weight_update", timeout_s=within_s)
        await self.end(version)

    @contextmanager
    def _open_outcome(self, what: str) -> Iterator[None]:
        """Convert every error of the enclosed block into OutcomeUnknown. The message contains `what`."""
        try:
            yield
        except OrchestrRLError as error:
            raise OutcomeUnknown(f"{self._url}: {what}: {error}") from error

    async def _at_rest(self) -> None:
        if not await self._server.is_paused():
            raise Permanent(f"{self._url}: must be paused before its weights are updated")


def _has_backend(started: VllmServerInfo) -> bool:
    return started.weight_backend == BACKEND and started.paths >= BACKEND_NEEDS


def _checked_sum(folder: Path, model: str, known_sum: str) -> str:
    """Return the checksum of the checkpoint in `folder`. The checksum is computed only if `known_sum` is empty. Return
    "" if the folder is not visible on this host. Raises Permanent if the checkpoint is incomplete, or if its tensors or
    shapes differ from those of the server's initial model. The tensors and shapes are checked only if the initial model
    is visible on this host."""
    if not folder.exists():
        return ""
    wanted = None
    if model and Path(model).is_dir():
        with suppress(BrokenCheckpoint):  # the initial weights may have another format, or be absent
            wanted = checkpoint_files.shapes_of(checkpoint_files.read_checkpoint(Path(model)))
    try:
        tensors = checkpoint_files.read_checkpoint(folder)
        if wanted is not None:
            checkpoint_files.check_same_model(checkpoint_files.shapes_of(tensors), wanted)
        return known_sum or checkpoint_files.content_sum(tensors, checkpoint_files.mapped(tensors))
    except BrokenCheckpoint as fault:
        raise Permanent(f"cannot load weights from {folder}: {fault}") from fault
