"""New weights for a vLLM server that runs: from a folder of its machine, by either of two ways, and what it then has.

With our backend in its workers (`--weight-transfer-config '{"backend": "orchestrrl"}'`,
integrations/instrument/vllm_weights.py) a version goes through vLLM's weight-transfer endpoints, and each worker says
what it was given, and whether it holds it. Else through `reload_weights`, which needs nothing but
VLLM_SERVER_DEV_MODE=1: what was given is then summed here, where the folder can be seen, and nobody says what it holds.

A trainer's bytes go into the workers by the backend that the server was started with (`--weight-transfer-config
'{"backend": NAME}'`).
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
EMPTY_WITHIN_S = 2.0  # requests that have ended are counted for a moment longer
POLL_S = 0.1
RECHECK_S = 1.0  # whether an engine that answers a probe still runs


_WORKERS: TypeAdapter[list[WorkerReport]] = TypeAdapter(list[WorkerReport])


class VllmWeights:
    """The weights of one server, from a folder or from a trainer's process."""

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
            # vLLM itself loads what it finds: of a folder without some tensors it keeps the old ones, and says nothing.
            given = await asyncio.to_thread(_checked_sum, Path(folder), started.serving.model, known_sum)
        async with self._server.loading(folder, str(version), takes_names=NAMING in started.paths) as before:
            if has_backend:
                return await self._transfer(folder, version)
            # Where a load before this one did not succeed, vLLM's layers may wait for the rest of its weights. They
            # take those of the next load for it, and only the one after that finds every layer at its beginning.
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
            if (told := self._agreed(workers, version)) is not None:
                return told
        # It was named so by a load that it knows nothing of, or for the weights that it began with.
        return LoadedWeights(version)

    async def takes_sums(self) -> bool:
        return not await self.has_backend()

    async def has_backend(self) -> bool:
        """From its configuration: a call of a method that its workers lack may unsettle vLLM."""
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
                with self._open_outcome("may run, which was paused"):
                    await self._server.order("/pause?mode=keep&clear_cache=false")

    async def _kept_running(self, asked: Coroutine[Any, Any, tuple[int, ...]]) -> tuple[int, ...]:
        """Await an answer of an engine that was paused before, and resume the engine where it is paused meanwhile: a
        gateway that attaches behind a closed pause barrier pauses every engine, and the answer would never come."""
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
        if any(worker.is_updating for worker in await self._workers()):  # whoever began it has gone
            await self._server.order("/finish_weight_update")
        failed: OrchestrRLError | None = None
        try:
            await self._server.order("/start_weight_update")
            update = {"update_info": {"folder": str(folder), "version": version}}
            await self._server.order("/update_weights", update, LOAD_TIMEOUT_S)
            await self._server.order("/finish_weight_update")
        except OrchestrRLError as error:
            failed = error
        with self._open_outcome(f"{failed or 'loaded something'}, and says no more"):
            workers = await self._workers()
        faults = [worker.fault for worker in workers if worker.fault]
        because = "; ".join(dict.fromkeys(faults))
        if len(faults) == len(workers) and not any(worker.is_torn for worker in workers):
            raise Permanent(f"{self._url}: refused {because}") from failed
        if faults:
            raise OutcomeUnknown(f"{self._url}: may have half of the weights: {because}") from failed
        if failed is not None:
            raise OutcomeUnknown(f"{self._url}: failed to load {folder}: {failed}") from failed
        if (told := self._agreed(workers, version)) is None:
            raise OutcomeUnknown(f"{self._url}: loaded {folder}, but its workers say {workers}")
        return told

    async def _until_empty(self) -> None:
        """Requests that are frozen would go on. Raises Permanent where there are any."""
        for _ in range(round(EMPTY_WITHIN_S / POLL_S)):
            now = await self._server.metrics()
            if not now.running + now.waiting:
                return
            await asyncio.sleep(POLL_S)
        raise Permanent(f"{self._url}: has {now.running + now.waiting} requests, which would go on with it")

    async def _workers(self) -> list[WorkerReport]:
        answer = await self._server.ask("POST", "/collective_rpc", {"method": METHOD})
        with self._server.reading("/collective_rpc"):
            try:
                workers = _WORKERS.validate_python(answer["results"])
            except ValidationError as error:
                raise ValueError(f"not what our workers say: {error}") from error
            if not workers:
                raise ValueError("no worker says anything")
            return workers

    def _agreed(self, workers: Sequence[WorkerReport], version: int) -> LoadedWeights | None:
        """What they all have; None where that is not this version, or not the same."""
        if {(worker.version, worker.is_torn) for worker in workers} != {(version, False)}:
            return None
        sums = list(dict.fromkeys(worker.sum for worker in workers))  # hosts that hold other parts say others
        return LoadedWeights(version, "+".join(sums), all(worker.is_read_back for worker in workers))

    # --- from a trainer's process, over vLLM's weight-transfer endpoints

    async def ends(self) -> TransferEnds:
        info = await self._server.description()
        if missing := TRANSFER_NEEDS - info.paths:
            raise Permanent(f"{self._url}: has not {', '.join(sorted(missing))}, which VLLM_SERVER_DEV_MODE=1 offers")
        facts = info.serving
        return TransferEnds(info.weight_backend or "", (facts.tp or 1) * (facts.pp or 1) * (info.replicas or 1))

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        """Workers wait for the trainer, and do nothing else meanwhile."""
        if "/shutdown_weight_transfer_engine" in (await self._server.as_started()).paths:
            with suppress(OrchestrRLError):  # one that has no connection, or whose last update was broken off
                await self._server.order("/shutdown_weight_transfer_engine")
        await self._server.order("/init_weight_transfer_engine", {"init_info": init_info}, within_s)

    async def start(self) -> None:
        await self._at_rest()
        if await self._server.weight_name() == LOADING:
            # An update before was broken off: vLLM may wait for the rest of it.
            with suppress(OrchestrRLError):
                await self._server.order("/finish_weight_update")
        await self.begin()
        with self._open_outcome("did not begin to take weights"):
            await self._server.order("/start_weight_update")

    async def begin(self) -> None:
        await self._at_rest()
        await self._server.pause_without_kv()
        # Until it has the new ones nobody shall take them for those that were named last.
        await self._server.set_weight_name(LOADING)

    async def call_workers(self, method: str, arguments: Sequence[Any], within_s: float) -> None:
        order = {"method": method, "args": list(arguments), "timeout": within_s}
        with self._open_outcome("may have half of the weights"):
            await self._server.order("/collective_rpc", order, within_s)

    async def end(self, version: int) -> None:
        with self._open_outcome("is not named after its weights"):
            await self._server.set_weight_name(str(version))

    async def update(self, update_info: Mapping[str, Any] | Sequence[Any], within_s: float) -> None:
        with self._open_outcome("may have half of the weights"):
            await self._server.order("/update_weights", {"update_info": update_info}, within_s)

    async def finish(self, version: int, within_s: float) -> None:
        with self._open_outcome("may have half of the weights"):
            await self._server.order("/finish_weight_update", timeout_s=within_s)
        await self.end(version)

    @contextmanager
    def _open_outcome(self, what: str) -> Iterator[None]:
        """Raise every error as OutcomeUnknown."""
        try:
            yield
        except OrchestrRLError as error:
            raise OutcomeUnknown(f"{self._url}: {what}: {error}") from error

    async def _at_rest(self) -> None:
        if not await self._server.is_paused():
            raise Permanent(f"{self._url}: is not at rest")


def _has_backend(started: VllmServerInfo) -> bool:
    return started.weight_backend == BACKEND and started.paths >= BACKEND_NEEDS


def _checked_sum(folder: Path, model: str, known_sum: str) -> str:
    """Of a checkpoint that can be seen here, taken unless it is known; of a folder of another machine nothing is known.
    Where the model that the server was started with can be seen, too, it must be of that form. Raises Permanent."""
    if not folder.exists():
        return ""
    wanted = None
    if model and Path(model).is_dir():
        with suppress(BrokenCheckpoint):  # it began with weights of another format, or with none
            wanted = checkpoint_files.shapes_of(checkpoint_files.read_checkpoint(Path(model)))
    try:
        tensors = checkpoint_files.read_checkpoint(folder)
        if wanted is not None:
            checkpoint_files.check_same_model(checkpoint_files.shapes_of(tensors), wanted)
        return known_sum or checkpoint_files.content_sum(tensors, checkpoint_files.mapped(tensors))
    except BrokenCheckpoint as fault:
        raise Permanent(f"{folder} is not loaded: {fault}") from fault
