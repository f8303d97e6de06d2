"""What a redeployment asks of a simulated engine, in the forms of vLLM: layout, sleep, elastic expert parallelism.

Its weights are of weights.py.
"""

import asyncio
import json
from typing import Any

from aiohttp import web

from orchestrrl.core.clock import Clock
from orchestrrl.core.operations import PauseMode
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.requests import refusal
from orchestrrl.lab.simulated_engine.runtime import Runtime
from orchestrrl.lab.simulated_engine.weights import WeightsFace, json_of


class ManagedFace:
    """The routes, and what is behind them: whether it sleeps, how many replicas it has."""

    def __init__(self, options: SimulatedOptions, runtime: Runtime, clock: Clock) -> None:
        self.asleep = False
        self._options = options
        self._runtime = runtime
        self._clock = clock
        self._changing = asyncio.Lock()  # one order after the other
        self._weights = WeightsFace(options, runtime, clock, self._changing)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/server_info", self._server_info),
            *self._weights.routes(),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/scale_elastic_ep", self._scale_elastic_ep),
        ]

    async def _server_info(self, request: web.Request) -> web.Response:
        options, said = self._options, self._options.misreport
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
                "tensor_parallel_size": said.get("tp", options.tensor_parallel_size),
                "pipeline_parallel_size": said.get("pp", options.pipeline_parallel_size),
                "data_parallel_size": said.get("dp", options.data_parallel_size),
                "enable_expert_parallel": bool(said.get("ep", options.enable_expert_parallel)),
                "enable_elastic_ep": options.enable_elastic_ep,
            },
            "scheduler_config": {"max_num_seqs": options.max_num_seqs},
            "device_config": {"device": "cuda" if options.gpu else "cpu"},
            "weight_transfer_config": self._weights.config,
        }
        if request.query.get("config_format", "text") != "json":
            config = json.dumps(config)
        gpus = options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
        listing = "\n".join(f"GPU {number}: {options.gpu}" for number in range(gpus)) if options.gpu else None
        system = {"nvidia_gpu_models": listing}
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": system})

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
