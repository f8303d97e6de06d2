"""A problem for `orchestrrl plan solve` to begin with: a 14B model on two nodes, in the middle of a generation step."""

import random
from typing import Any

GPUS, PER_NODE = 16, 8
REQUESTS = 96
MAX_TOKENS = 15_000

# id, GPUs, alpha_s, beta_s, gamma_s, KV tokens, prefill tokens/s, switch_s: those of `orchestrrl check-config
# --print-example`, and the next wider one.
CONFIGURATIONS = (
    ("tp2", 2, 0.0184, 0.000081, 4.1e-8, 582_885, 18_000.0, 1.7),
    ("tp4", 4, 0.0155, 0.000078, 2.0e-8, 1_315_307, 36_000.0, 1.9),
    ("tp8", 8, 0.0143, 0.0000765, 1.0e-8, 2_780_151, 72_000.0, 2.3),
)


def example(seed: int = 0) -> dict[str, Any]:
    """Eight engines of TP=2; heavy-tailed answers of which the short ones have ended, a few prompts still queued."""
    draw = random.Random(seed)
    current = [{"id": f"e{i}", "configuration": "tp2", "gpus": [2 * i, 2 * i + 1]} for i in range(GPUS // 2)]
    requests = []
    for number in range(REQUESTS):
        waits = number % 12 == 11
        generated = 0 if waits else 1_500
        length = min(max(int(draw.lognormvariate(7.8, 0.9)), generated + 1), MAX_TOKENS)
        requests.append(
            {
                "id": f"r{number:03}",
                "context_tokens": draw.randint(128, 512) + generated,
                "remaining_tokens": length - generated,
                "instance": f"e{draw.randrange(3) if number % 3 else number % len(current)}",
                "state": "waiting" if waits else "running",
            }
        )
    return {
        "gpus": {"count": GPUS, "per_node": PER_NODE},
        "configurations": [
            {
                "id": name,
                "gpus": gpus,
                "alpha_s": alpha_s,
                "beta_s": beta_s,
                "gamma_s": gamma_s,
                "kv_capacity_tokens": kv_tokens,
                "max_sequences": 1024,
                "prefill_tokens_per_s": prefill,
                "switch_s": switch_s,
            }
            for name, gpus, alpha_s, beta_s, gamma_s, kv_tokens, prefill, switch_s in CONFIGURATIONS
        ],
        "kv_bytes_per_token": 196_608,
        "transfer": {"inter_node_gbps_per_gpu": 200, "intra_node_gbps_per_gpu": 1600, "latency_s": 0.002},
        "current": current,
        "requests": requests,
        "kv_balance": None,
        "epsilon_s": 1.0,
    }
