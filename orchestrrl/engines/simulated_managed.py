"""What a switch asks of a simulated engine, in the forms of vLLM: layout, weights, sleep, elastic expert parallelism.

A folder of its weights has a file `simulated.json` that names their seed, e.g. `{"seed": 7}`.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrrl.clock import Clock
from orchestrrl.engines.base import PauseMode
from orchestrrl.engines.simulated_asks import refusal
from orchestrrl.engines.simulated_options import SimulatedOptions
from orchestrrl.engines.simulated_runtime import Runtime
from orchestrrl.engines.simulated_tokens import TokenModel
from orchestrrl.errors import Permanent, shorten

WEIGHTS_FILE = "simulated.json"
UNNAMED = "default"  # what vLLM calls weights that nobody has named
# Weights that are neither the old nor the new, and those of an engine that answers wrongly, are of seeds far away.
TORN, WRONG = 0x7042, 0xBAD


def read_seed(folder: Path) -> int:
    """Of the weights in a folder. Raises Permanent."""
    try:
        told = json.loads((folder / WEIGHTS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise Permanent(f"{folder / WEIGHTS_FILE}: cannot be read: {error}") from error
    seed = told.get("seed") if isinstance(told, dict) else None
    if not isinstance(seed, int):
        raise Permanent(f'{folder / WEIGHTS_FILE}: must be like {{"seed": 7}}, got {shorten(told)}')
    return seed


def first_model(options: SimulatedOptions) -> TokenModel:
    """Of the weights that it begins with. Raises Permanent where they cannot be read."""
    return model_of(options, options.seed if options.weights is None else read_seed(options.weights))


def model_of(options: SimulatedOptions, seed: int) -> TokenModel:
    return TokenModel(options.vocab_size, options.lengths, seed ^ WRONG if options.faults.wrong_answers else seed)


class ManagedFace:
    """The routes, and what is behind them: the name of the weights, whether it sleeps, how many replicas it has."""

    def __init__(self, options: SimulatedOptions, runtime: Runtime, clock: Clock) -> None:
        self.asleep = False
        self._options = options
        self._runtime = runtime
        self._clock = clock
        self._weight_version = UNNAMED
        self._changing = asyncio.Lock()  # one order after the other

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/server_info", self._server_info),
            web.get("/weight_info", self._weight_info),
            web.post("/update_weight_version", self._update_weight_version),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/scale_elastic_ep", self._scale_elastic_ep),
        ]

    async def _server_info(self, request: web.Request) -> web.Response:
        options, said = self._options, self._options.faults.misreport
        config: Any = {
            "model_config": {
                "model": options.model_name,
                "max_model_len": options.max_model_len_tokens,
                "enable_sleep_mode": options.enable_sleep_mode,
            },
            "cache_config": {
                "block_size": options.block_tokens,
                "num_gpu_blocks": options.shape.blocks // options.data_parallel_size,
            },
            "parallel_config": {
                "tensor_parallel_size": said.get("tp", options.tensor_parallel_size),
                "pipeline_parallel_size": said.get("pp", options.pipeline_parallel_size),
                "data_parallel_size": said.get("dp", options.data_parallel_size),
                "enable_expert_parallel": bool(said.get("ep", options.enable_expert_parallel)),
                "enable_elastic_ep": options.enable_elastic_ep,
            },
            "scheduler_config": {"max_num_seqs": options.max_num_seqs},
        }
        if request.query.get("config_format", "text") != "json":
            config = json.dumps(config)
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    # --- weights

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._weight_version})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await json_of(request)
        name = body.get("new_version") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise refusal(f"new_version must be a string, got {shorten(body)}", "body.new_version", kind="Bad Request")
        self._weight_version = name
        return web.json_response({"success": True, "new_version": name})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        """`reload_weights` alone. What it fails at leaves weights that are neither the old nor the new."""
        body = await json_of(request)
        if not isinstance(body, dict):
            raise refusal("Request body must be a JSON object", kind="Bad Request")
        if (method := body.get("method")) is None:
            raise refusal("Missing 'method' in request body", kind="Bad Request")
        if method != "reload_weights":
            return _failed_call(f"'SimulatedWorker' object has no attribute '{method}'")
        async with self._changing:
            await self._take_s(self._options.load_s)
            try:
                seed = read_seed(Path(str((body.get("kwargs") or {}).get("weights_path"))))
            except Permanent as error:
                self._runtime.take_weights(model_of(self._options, self._runtime.model.weights_seed ^ TORN))
                return _failed_call(str(error))
            self._runtime.take_weights(model_of(self._options, seed))
        return web.json_response({"results": [None]})

    # --- sleep

    async def _sleep(self, request: web.Request) -> web.Response:
        """Also without --enable-sleep-mode, as vLLM: whoever wants memory has to look first."""
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
        """vLLM says so of an engine that is only paused, too."""
        return web.json_response({"is_sleeping": self.asleep or self._runtime.pause_mode is not None})

    # --- elastic expert parallelism

    async def _scale_elastic_ep(self, request: web.Request) -> web.Response:
        body = await json_of(request)
        wanted = body.get("new_data_parallel_size") if isinstance(body, dict) else None
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

    async def _take_s(self, virtual_s: float) -> None:
        if virtual_s:
            await self._clock.sleep(virtual_s / self._options.speed)


def _failed_call(because: str) -> web.Response:
    message = f"Call to collective_rpc method failed: Worker failed with error '{because}'"
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return web.json_response({"error": error}, status=500)


async def json_of(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise refusal(f"JSON decode error: {error}", "body", kind="Bad Request") from error
