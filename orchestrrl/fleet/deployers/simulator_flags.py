"""The flags of `orchestrrl engine simulated`, from a layout and from what a configuration is said to cost. Pure."""

from collections.abc import Mapping

from orchestrrl.fleet.deployers.user_arguments import SET, UNSET
from planner.model import Configuration, Parallelism

SIMULATED_PROGRAM = ("-m", "orchestrrl", "engine", "simulated")

# By itself it takes contexts of so many tokens, and wants KV for one of them, in blocks.
CONTEXT_TOKENS = 32_768
BLOCK_TOKENS = 16

# What a layout may decide, with what it does where they are left out.
SIMULATED_DECIDED: Mapping[str, str | None] = {
    "--host": None,
    "--port": None,
    "--tensor-parallel-size": "1",
    "--pipeline-parallel-size": "1",
    "--data-parallel-size": "1",
    "--enable-expert-parallel": UNSET,
}


def simulated_layout(p: Parallelism) -> dict[str, str]:
    flags = {"--tensor-parallel-size": str(p.tp)}
    if p.pp > 1:
        flags["--pipeline-parallel-size"] = str(p.pp)
    if p.dp > 1:
        flags["--data-parallel-size"] = str(p.dp)
    if p.ep > 1:
        flags["--enable-expert-parallel"] = SET
    return flags


def simulated_costs(configuration: Configuration, p: Parallelism) -> dict[str, str]:
    """So that it takes what the planner counts on. Its replicas have these each, for their share of the sequences."""
    kv_tokens = max(BLOCK_TOKENS, configuration.kv_capacity_tokens // p.dp)
    costs = {
        "--alpha-s": repr(configuration.alpha_s),
        "--beta-s": repr(configuration.beta_s * p.dp),
        "--gamma-s": repr(configuration.gamma_s * p.dp),
        "--prefill-tokens-per-s": repr(configuration.prefill_tokens_per_s / p.dp),
        "--kv-capacity-tokens": str(kv_tokens),
    }
    if kv_tokens < CONTEXT_TOKENS:
        costs["--max-model-len"] = str(kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    return costs
