"""vLLM's weight-transfer endpoints, one call each: a trainer's bytes go into a server's workers by the backend that it
was started with (`--weight-transfer-config '{"backend": NAME}'`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent
from orchestrrl.engines.base import TransferEnds
from orchestrrl.engines.vllm_managed import LOADING, ManagedVllm

NEEDED = frozenset(
    {
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/pause", "/is_paused", "/server_info", "/update_weight_version", "/weight_info"),
    }
)


class VllmTransfers:
    """Of one server."""

    def __init__(self, server: ManagedVllm) -> None:
        self._server = server
        self._url = server.where  # for messages

    async def ends(self) -> TransferEnds:
        if missing := NEEDED - await self._server.paths():
            raise Permanent(f"{self._url}: has not {', '.join(sorted(missing))}, which VLLM_SERVER_DEV_MODE=1 offers")
        info = await self._server.info()
        layout = info.layout
        return TransferEnds(info.weight_backend or "", (layout.tp or 1) * (layout.pp or 1) * (layout.dp or 1))

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        """Workers wait for the trainer, and do nothing else meanwhile."""
        if "/shutdown_weight_transfer_engine" in (await self._server.as_started()).paths:
            with suppress(OrchestrRLError):  # one that has no connection, or whose last update was broken off
                await self._server.order("/shutdown_weight_transfer_engine")
        await self._server.order("/init_weight_transfer_engine", {"init_info": init_info}, within_s)

    async def start(self) -> None:
        await self._at_rest()
        name = await self._server.weight_name()
        if name == LOADING:  # an update before was broken off: vLLM may wait for the rest of it
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
