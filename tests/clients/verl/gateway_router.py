"""A router for verl that sends every request to the gateway. The file `rollout.router_config_path` names the class."""

from typing import Any

import aiohttp
import ray
from verl.workers.rollout.replica import TokenOutput


class GatewayRouter:
    """verl's router, which selects a server for each request, and the only server that it selects: the gateway."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        self.url = config["gateway_url"]
        self.model = config["model"]

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        return self.url, ray.get_runtime_context().current_actor

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Do nothing: the gateway counts its requests itself."""

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        logprobs = 0 if sampling_params.pop("logprobs", False) else None
        body = {"model": self.model, "prompt": prompt_ids, "logprobs": logprobs, "return_token_ids": True}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.post(
                f"{self.url}/v1/completions", json={**sampling_params, **body}, headers={"X-Request-Id": request_id}
            ) as response,
        ):
            response.raise_for_status()
            (choice,) = (await response.json())["choices"]
        log_probs = None if logprobs is None else choice["logprobs"]["token_logprobs"]
        return TokenOutput(token_ids=choice["token_ids"], log_probs=log_probs, stop_reason=choice["finish_reason"])
