"""How a report calls what results call by short names. Pure; what it does not know it shows as it is."""

from collections.abc import Mapping
from math import isfinite

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.net.model import LinkTier
from orchestrrl.lab.sim.rl.training import RESPONSE_STREAM

# In the order in which they are shown.
STAGES: Mapping[str, str] = {
    FabricStage.GEN: "generation",
    RESPONSE_STREAM: "answers to training",
    FabricStage.TRAIN: "training",
    FabricStage.WEIGHT_SYNC: "weight sync",
}
TIERS: Mapping[str, str] = {
    LinkTier.NVLINK: "NVLink",
    LinkTier.NIC: "server to ToR",
    LinkTier.AGG: "ToR to ToR in a PoD",
    LinkTier.CORE: "PoD to PoD",
    LinkTier.DIRECT: "circuits between NICs",
}
LANES: Mapping[str, str] = {"gen": "generation", "sync": "weight sync", "train": "training", "fault": "faults"}
OF_A_STEP: Mapping[str, str] = {
    "gen_s": "generation",
    "gen_waits_weights_s": "engines wait for weights",
    "gen_waits_room_s": "engines wait for room",
    "sync_s": "weight sync",
    "train_s": "training",
    "train_log_probs_s": "of it log-probabilities",
    "train_held_s": "training held up by weights on their way",
    "gen_held_s": "generation held up by weights on their way",
    "train_waits_samples_s": "trainer waits for samples",
    "train_waits_sync_s": "trainer waits for weight sync",
}
ARMS: Mapping[str, str] = {
    "verl_to": "static fleet of the best configuration, prompts dealt in turn",
    "verl_lo": "static fleet of the widest engines, prompts dealt in turn",
    "partial_rollout": "as verl_to, but a step ends early and the rest goes on in the next",
    "planning": "our planner alone",
    "balancing": "our balancer alone",
    "balancing_paper": "our balancer alone, moves by the paper's rule",
    "both": "our planner and balancer",
    "both_paper": "our planner and balancer, moves by the paper's rule",
    "mean_only": "as both, without a forecast of lengths",
    "oracle": "as both, the planner knows all lengths",
    "packed_known": "the best static fleet, packed with all lengths known",
    "prompts_known": "the best static fleet, the distribution of each prompt's lengths known",
}


def display_name(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name.replace("_", " "))


def rank(names: Mapping[str, str], name: str) -> tuple[int, str]:
    """To sort by: those we know in their order, others behind them."""
    order = list(names)
    return (order.index(name) if name in names else len(order), name)


def number(value: float) -> str:
    """For people: four digits, with thousands apart."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"
