"""Generation by verl's LLM server clients through a router class. Usage: client.py URL MODEL_FOLDER REQUESTS OUT

The output is a JSON list: the token ids and log-probabilities of each sample as verl returned them.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

# Ray reads this when it is imported. A busy machine needs longer than the default of 30 s.
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.router import get_router_handle

TOKENS = 64
AT_ONCE = 16


async def generate(client: LLMServerClient, slots: asyncio.Semaphore, number: int) -> dict[str, Any]:
    """Generate one sample; every fourth one is greedy."""
    greedy = number % 4 == 3
    sampling_params = {
        "temperature": 0.0 if greedy else 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": 1000 + number,
    }
    async with slots:
        output = await client.generate(
            f"conversation-{number}", prompt_ids=[40, 41, 42, 60 + number], sampling_params=sampling_params
        )
    return {"token_ids": output.token_ids, "logprobs": output.log_probs}


async def main() -> None:
    url, model_folder, requests, out = sys.argv[1:]
    router = {"router_class": "gateway_router.GatewayRouter", "gateway_url": url, "model": Path(model_folder).name}
    router_config = Path(out).with_name("router.yaml")
    router_config.write_text(json.dumps(router))  # JSON is YAML
    handle = get_router_handle(servers={}, router_config_path=str(router_config))
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": TOKENS}}})
    slots = asyncio.Semaphore(AT_ONCE)
    clients = [client(config, load_balancer_handle=handle) for client in (LLMServerClient, FullyAsyncLLMServerClient)]
    received = await asyncio.gather(*(generate(clients[number % 2], slots, number) for number in range(int(requests))))
    Path(out).write_text(json.dumps(received))


# Ray's actors import the router from this folder.
environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=environment)
asyncio.run(main())
