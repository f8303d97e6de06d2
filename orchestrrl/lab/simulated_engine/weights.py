"""New weights for a simulated engine that runs, in the forms of vLLM: by `reload_weights`, or through a weight-transfer
backend, OrchestrRL's own.

A folder holds safetensors files, of which every byte is read, and its tokens then depend on every byte; or a file
`simulated.json` that names a seed, e.g. `{"seed": 7}`.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, shorten
from orchestrrl.engines.vllm_weight_flags import BACKEND, METHOD
from orchestrrl.engines.vllm_weights import WorkerReport
from orchestrrl.integrations.instrument.checkpoint_files import (
    BrokenCheckpoint,
    check_same_model,
    content_sum,
    mapped,
    read_checkpoint,
    shapes_of,
)
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.requests import refusal
from orchestrrl.lab.simulated_engine.runtime import Runtime
from orchestrrl.lab.simulated_engine.tokens import TokenModel

WEIGHTS_FILE = "simulated.json"
UNNAMED = "default"  # what vLLM calls weights that nobody has named
# Weights that are neither the old nor the new, and those of an engine that answers wrongly, are of seeds far away.
TORN, WRONG = 0x7042, 0xBAD
START = WorkerReport(None, "", is_read_back=False, not_read_back="", fault="", is_torn=False, is_updating=False)


@dataclass(frozen=True, slots=True)
class SimulatedWeights:
    """What a folder holds. Without tensors it has a seed alone."""

    seed: int
    sum: str
    bytes: int
    shapes: dict[str, tuple[int, ...]]


def read_weights(folder: Path) -> SimulatedWeights:
    """Raises Permanent."""
    if (folder / WEIGHTS_FILE).exists() or not any(folder.glob("*.safetensors*")):
        seed = _read_seed(folder / WEIGHTS_FILE)
        return SimulatedWeights(seed, f"seed:{seed}", 0, {})
    try:
        tensors = read_checkpoint(folder)
        content = content_sum(tensors, mapped(tensors))
    except BrokenCheckpoint as fault:
        raise Permanent(str(fault)) from fault
    data_bytes = sum(stored.end - stored.begin for stored in tensors.values())
    return SimulatedWeights(int(content.rpartition(":")[2], 16), content, data_bytes, shapes_of(tensors))


def _read_seed(file: Path) -> int:
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Permanent(f"{file}: cannot be read: {error}") from error
    seed = told.get("seed") if isinstance(told, dict) else None
    if not isinstance(seed, int):
        raise Permanent(f'{file}: must be like {{"seed": 7}}, got {shorten(told)}')
    return seed


def first_model(options: SimulatedOptions) -> TokenModel:
    """Of the weights that it begins with. Raises Permanent where they cannot be read."""
    return model_of(options, options.seed if options.weights is None else read_weights(options.weights).seed)


def model_of(options: SimulatedOptions, seed: int) -> TokenModel:
    return TokenModel(options.vocab_size, options.lengths, seed ^ WRONG if options.wrong_answers else seed)


class WeightsFace:
    """The routes, and what is behind them. `changing`: one order of its owner after the other."""

    def __init__(self, options: SimulatedOptions, runtime: Runtime, clock: Clock, changing: asyncio.Lock) -> None:
        self._options = options
        self._runtime = runtime
        self._clock = clock
        self._changing = changing
        self._name = UNNAMED
        self._reported = START
        self._is_updating = False
        # Of what it began with, or loaded first.
        self._shapes = {} if options.weights is None else read_weights(options.weights).shapes
        self._loads = 0

    def routes(self) -> list[web.RouteDef]:
        always = [
            web.get("/weight_info", self._weight_info),
            web.post("/update_weight_version", self._update_weight_version),
            web.post("/collective_rpc", self._collective_rpc),
        ]
        if not self._options.weight_transfer:
            return always
        return [
            *always,
            web.post("/init_weight_transfer_engine", self._agree),
            web.post("/start_weight_update", self._start),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", self._finish),
        ]

    @property
    def config(self) -> dict[str, Any] | None:
        return {"backend": BACKEND} if self._options.weight_transfer else None

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._name})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await _object_of(request)
        name = body.get("new_version")
        if not isinstance(name, str):
            raise refusal(f"new_version must be a string, got {shorten(body)}", "body.new_version", kind="Bad Request")
        self._name = name
        return web.json_response({"success": True, "new_version": name})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        """What it fails at leaves weights that are neither the old nor the new."""
        body = await _object_of(request)
        if (method := body.get("method")) is None:
            raise refusal("Missing 'method' in request body", kind="Bad Request")
        if method == METHOD and self._options.weight_transfer:
            workers = self._options.tensor_parallel_size * self._options.pipeline_parallel_size
            return web.json_response(
                {"results": [{**asdict(self._reported), "is_updating": self._is_updating}] * workers}
            )
        if method != "reload_weights":
            return _failed_call("collective_rpc", f"'SimulatedWorker' object has no attribute '{method}'")
        async with self._changing:
            folder = Path(str((body.get("kwargs") or {}).get("weights_path")))
            try:
                await self._load(folder, None, checked=False)
            except Permanent as error:
                if not self._reported.is_torn:
                    self._tear(str(error))
                return _failed_call("collective_rpc", str(error))
        return web.json_response({"results": [None]})

    async def _agree(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "Weight transfer initialized"})

    async def _start(self, _: web.Request) -> web.Response:
        if self._is_updating:
            return _failed_call("start_weight_update", "start_weight_update called while one is already active")
        self._is_updating = True
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        update = (await _object_of(request)).get("update_info")
        if not isinstance(update, dict) or not {"folder", "version"} <= update.keys():
            raise refusal(
                f"update_info must have folder and version, got {shorten(update)}", "body", kind="Bad Request"
            )
        if not self._is_updating:
            return _failed_call("update_weights", "start_weight_update must be called before update_weights.")
        async with self._changing:
            try:
                await self._load(Path(str(update["folder"])), int(update["version"]), checked=True)
            except Permanent as error:
                self._is_updating = False
                return _failed_call("update_weights", str(error))
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, _: web.Request) -> web.Response:
        if not self._is_updating:
            return _failed_call("finish_weight_update", "called without a matching start_weight_update.")
        self._is_updating = False
        return web.json_response({"message": "Weight update finished"})

    async def _load(self, folder: Path, version: int | None, *, checked: bool) -> None:
        """`checked`: as our backend does it, before anything changes. Raises Permanent."""
        self._loads += 1
        try:
            weights = await asyncio.to_thread(read_weights, folder)
            if self._shapes and weights.shapes:
                check_same_model(weights.shapes, self._shapes)
            if self._loads in self._options.refuse_load:
                raise Permanent("the engine was told to refuse it (--refuse-load)")
        except (Permanent, BrokenCheckpoint) as fault:
            if checked:
                self._reported = WorkerReport(**{**asdict(self._reported), "fault": str(fault)})
            raise Permanent(str(fault)) from fault
        await self._take_s(self._options.load_s + self._options.load_s_per_gb * weights.bytes / 1e9)
        if self._loads in self._options.tear_load:
            self._tear("the engine was told to fail at it (--tear-load)")
            raise Permanent(self._reported.fault)
        self._shapes = self._shapes or weights.shapes
        self._runtime.take_weights(model_of(self._options, weights.seed))
        known = {"version": version, "sum": weights.sum, "is_read_back": True} if version is not None else {}
        self._reported = WorkerReport(**{**asdict(START), **known})

    def _tear(self, fault: str) -> None:
        self._runtime.take_weights(model_of(self._options, self._runtime.model.weights_seed ^ TORN))
        self._reported = WorkerReport(**{**asdict(START), "fault": fault, "is_torn": True})

    async def _take_s(self, virtual_s: float) -> None:
        if virtual_s:
            await self._clock.sleep(virtual_s / self._options.speed)


def _failed_call(method: str, because: str) -> web.Response:
    message = f"Call to {method} method failed: Worker failed with error '{because}'"
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return web.json_response({"error": error}, status=500)


async def _object_of(request: web.Request) -> dict[str, Any]:
    body = await json_of(request)
    if not isinstance(body, dict):
        raise refusal("Request body must be a JSON object", kind="Bad Request")
    return body


async def json_of(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise refusal(f"JSON decode error: {error}", "body", kind="Bad Request") from error
