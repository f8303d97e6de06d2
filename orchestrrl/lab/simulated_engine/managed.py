"""The management API of a simulated engine, as in vLLM. It covers the layout, sleep, elastic expert parallelism, and
new weights by `reload_weights` or through OrchestrRL's weight-transfer backend."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, shorten
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.vllm_weight_flags import BACKEND, METHOD, WorkerReport
from orchestrrl.integrations.instrument.checkpoint_files import BrokenCheckpoint, check_same_model
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal
from orchestrrl.lab.simulated_engine.runtime import Runtime
from orchestrrl.lab.simulated_engine.weights import model_of, read_weights

TORN = 0x7042  # XORed to the seed for weights that are a mixture of old and new ones
START = WorkerReport(None, "", is_read_back=False, not_read_back="", fault="", is_torn=False, is_updating=False)


class ManagedFace:
    """The management routes of an engine, with their state: sleep, number of replicas, and weights."""

    def __init__(
        self, options: SimulatedOptions, runtime: Runtime, clock: Clock, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Create the routes. `shapes` contains the shapes of the initial weights, keyed by tensor name. It is empty if
        the engine starts without a weights folder."""
        self.asleep = False
        self._options = options
        self._runtime = runtime
        self._clock = clock
        self._changing = asyncio.Lock()  # one operation at a time
        self._reported = START
        self._is_updating = False
        self._shapes = shapes
        self._loads = 0

    def routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/server_info", self._server_info),
            web.get("/get_world_size", self._world_size),
            web.get("/weight_info", self._weight_info),
            web.post("/update_weight_version", self._update_weight_version),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/scale_elastic_ep", self._scale_elastic_ep),
        ]
        if self._options.weight_transfer:
            routes += [
                web.post("/init_weight_transfer_engine", self._init_transfer),
                web.post("/start_weight_update", self._start_update),
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish_update),
            ]
        return routes

    async def _server_info(self, request: web.Request) -> web.Response:
        options, reported = self._options, self._options.misreport
        config: Any = {
            "model_config": {
                "model": str(options.weights or options.model_name),
                "max_model_len": options.max_model_len_tokens,
                "dtype": "torch.bfloat16",
                "quantization": None,
                "enable_sleep_mode": options.enable_sleep_mode,
            },
            "cache_config": {
                "block_size": options.block_tokens,
                "num_gpu_blocks": options.shape.blocks // options.data_parallel_size,
                "cache_dtype": "auto",
            },
            "parallel_config": {
                "tensor_parallel_size": reported.get("tp", options.tensor_parallel_size),
                "pipeline_parallel_size": reported.get("pp", options.pipeline_parallel_size),
                "data_parallel_size": reported.get("dp", options.data_parallel_size),
                "enable_expert_parallel": bool(reported.get("ep", options.enable_expert_parallel)),
                "enable_elastic_ep": options.enable_elastic_ep,
            },
            "scheduler_config": {"max_num_seqs": options.max_num_seqs},
            "device_config": {"device": "cuda" if options.gpu else "cpu"},
            "weight_transfer_config": {"backend": BACKEND} if options.weight_transfer else None,
        }
        if request.query.get("config_format", "text") != "json":
            config = json.dumps(config)
        gpus = options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
        listing = "\n".join(f"GPU {number}: {options.gpu}" for number in range(gpus)) if options.gpu else None
        system = {"nvidia_gpu_models": listing}
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": system})

    async def _world_size(self, request: web.Request) -> web.Response:
        options = self._options
        workers = options.tensor_parallel_size * options.pipeline_parallel_size
        include_dp = request.query.get("include_dp", "true").lower()
        if include_dp not in ("true", "1", "false", "0"):
            raise refusal(
                f"include_dp must be true or false, got {include_dp!r}", "query.include_dp", kind="Bad Request"
            )
        replicas = options.data_parallel_size if include_dp in ("true", "1") else 1
        return web.json_response({"world_size": workers * replicas})

    # --- sleep

    async def _sleep(self, request: web.Request) -> web.Response:
        """Put the engine to sleep, even without --enable-sleep-mode, as vLLM does. Clients must check that option
        first."""
        mode, level = request.query.get("mode", PauseMode.ABORT.value), request.query.get("level", "1")
        if mode not in list(PauseMode) or level not in ("0", "1", "2"):
            raise refusal(f"mode must be abort, wait or keep, and level 0, 1 or 2, got {mode!r}, {level!r}", "query")
        async with self._changing:
            await self._runtime.pause(PauseMode(mode), level != "0")
            await self._take_s(self._options.sleep_s)
            self.asleep = level != "0"
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, _: web.Request) -> web.Response:
        async with self._changing:
            if self.asleep:
                await self._take_s(self._options.sleep_s)
            self.asleep = False
            self._runtime.resume()
        return web.json_response({"status": "awake", "tags": None})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        """Return whether the engine sleeps. As in vLLM, a paused engine is also reported as sleeping."""
        return web.json_response({"is_sleeping": self.asleep or self._runtime.pause_mode is not None})

    # --- elastic expert parallelism

    async def _scale_elastic_ep(self, request: web.Request) -> web.Response:
        wanted = (await object_of(request)).get("new_data_parallel_size")
        if not isinstance(wanted, int) or wanted <= 0:
            raise refusal("new_data_parallel_size must be a positive integer", kind="Bad Request")
        if self._changing.locked():
            return web.json_response({"error": "The model is currently scaling. Please try again later."}, status=503)
        async with self._changing:
            if wanted != self._options.data_parallel_size:
                if not self._options.enable_elastic_ep:
                    raise refusal("Scale failed", status=500, kind="Internal Server Error")
                await self._take_s(self._options.scale_s)
                self._options = self._options.model_copy(update={"data_parallel_size": wanted})
                self._runtime.reshape(self._options.shape)
        return web.json_response({"message": f"Scaled to {wanted} data parallel engines"})

    # --- weights

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._runtime.weight_version})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await object_of(request)
        name = body.get("new_version")
        if not isinstance(name, str):
            raise refusal(f"new_version must be a string, got {shorten(body)}", "body.new_version", kind="Bad Request")
        self._runtime.name_weights(name)
        return web.json_response({"success": True, "new_version": name})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        """Call the worker method that the request names. After a failed `reload_weights`, the weights are a mixture of
        old and new weights."""
        body = await object_of(request)
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

    async def _init_transfer(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "Weight transfer initialized"})

    async def _start_update(self, _: web.Request) -> web.Response:
        if self._is_updating:
            return _failed_call("start_weight_update", "start_weight_update called while one is already active")
        self._is_updating = True
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        update = (await object_of(request)).get("update_info")
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

    async def _finish_update(self, _: web.Request) -> web.Response:
        if not self._is_updating:
            return _failed_call("finish_weight_update", "called without a matching start_weight_update.")
        self._is_updating = False
        return web.json_response({"message": "Weight update finished"})

    async def _load(self, folder: Path, version: int | None, *, checked: bool) -> None:
        """Load weights from a folder. `version` is the version to report, or None if the caller gives none. If
        `checked` is true, report faults as OrchestrRL's backend does, which checks the weights before loading. Raises
        Permanent if the weights are invalid or an option makes this load fail."""
        self._loads += 1
        try:
            weights = await asyncio.to_thread(read_weights, folder)
            if self._shapes:
                check_same_model(weights.shapes, self._shapes)
            if self._loads in self._options.refuse_load:
                raise Permanent("the option --refuse-load refuses this load")
        except (Permanent, BrokenCheckpoint) as fault:
            if checked:
                self._reported = replace(self._reported, fault=str(fault))
            raise Permanent(str(fault)) from fault
        await self._take_s(self._options.load_s)
        if self._loads in self._options.tear_load:
            self._tear("the option --tear-load fails this load")
            raise Permanent(self._reported.fault)
        self._shapes = self._shapes or weights.shapes
        self._runtime.take_weights(model_of(self._options, weights.seed))
        self._reported = (
            START if version is None else replace(START, version=version, sum=weights.sum, is_read_back=True)
        )

    def _tear(self, fault: str) -> None:
        self._runtime.take_weights(model_of(self._options, self._runtime.model.weights_seed ^ TORN))
        self._reported = replace(START, fault=fault, is_torn=True)

    async def _take_s(self, virtual_s: float) -> None:
        if virtual_s:
            await self._clock.sleep(virtual_s / self._options.speed)


def _failed_call(method: str, because: str) -> web.Response:
    message = f"Call to {method} method failed: Worker failed with error '{because}'"
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return web.json_response({"error": error}, status=500)


async def object_of(request: web.Request) -> dict[str, Any]:
    body = await json_of(request)
    if not isinstance(body, dict):
        raise refusal("Request body must be a JSON object", kind="Bad Request")
    return body


async def json_of(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise refusal(f"JSON decode error: {error}", "body", kind="Bad Request") from error
