"""The constants of the scoreboard's figures, with their sources. Constants of models, GPUs, kernels and components are
in the files that `ELSEWHERE` lists.

A value whose source is "assumption" is given neither by the paper nor by another public source. It was chosen before
any figure was computed.
"""

from collections.abc import Mapping
from typing import Any

from orchestrrl.lab.scoreboard.claims import Constant
from orchestrrl.lab.sim.net.fabrics.mixnet import SERVERS_PER_REGION

_PAPER = "arXiv 2601.01209, "
_OURS = "assumption: "

GPU = Constant("GPU", "h800", "", _PAPER + "sections 6 and 7.2")
NIC_GBPS = Constant("NIC rate", 200.0, "Gbps", _PAPER + "section 7.2")
LINK_RATES_GBPS = Constant("link rates of the frontier", (100.0, 200.0, 400.0, 800.0), "Gbps", _PAPER + "figure 16")
COST_RATES_GBPS = Constant("link rates of the costs", (200, 400), "Gbps", _PAPER + "figure 15")
OVERSUBSCRIPTION = Constant("oversubscription", 3.0, "down to up", _PAPER + "section 7.2")
MIXNET_REGION = Constant(
    "MixNet region",
    SERVERS_PER_REGION,
    "servers",
    _OURS + "as large as a PoD of the trees; the simulator of MixNet's authors uses EP times TP degree GPUs, per job",
)
DEVICES = Constant(
    "optical switches of the sensitivity study",
    ("rotornet_infocus", "mems_3d_calient", "piezo_polatis", "liquid_crystal_coherent", "robotic_telescent"),
    "",
    _PAPER + "table 2; all other figures use piezo_polatis, 25 ms, as section 7.2",
)

# --- Workload
BATCH = Constant("requests per step on the testbed", 512, "requests", _PAPER + "section 2.1")
STEP_SAMPLES = Constant(
    "samples per optimiser step, where a step's samples are divided", 512, "", _PAPER + "section 7.1, global batch"
)
REQUESTS_PER_GPU = Constant("requests per step at scale", 16, "per generation GPU", _PAPER + "appendix F")
SAMPLES = Constant("samples per prompt", 8, "", _OURS + "GRPO's groups usually have 8 or 16")
PROMPT_TOKENS = Constant("tokens per prompt", (64, 512), "minimum, maximum", _OURS + "mathematics problems")
LENGTH_MEDIAN = Constant(
    "median length of an answer", 3000.0, "tokens", _OURS + "most are under 7,500 in figure 3a; lognormal"
)
LENGTH_SIGMA = Constant("standard deviation of the logarithm of lengths", 0.9, "", _OURS + "figure 3a has a heavy tail")
CORRELATION = Constant(
    "correlation of lengths of a prompt's samples", 0.6, "", _OURS + "as in the scenarios of sim gen"
)
MAX_TOKENS = Constant("maximum lengths on the testbed", (15_000, 25_000), "tokens", _PAPER + "section 6.1")
MAX_TOKENS_AT_SCALE = Constant(
    "maximum length at scale", 15_000, "tokens", _OURS + "the shorter one of section 6.1; section 7 gives none"
)

# --- Layouts
TRAIN_14B = Constant("training of Qwen2.5-14B", "tp8 pp2", "", _PAPER + "section 2")
TRAIN_32B = Constant("training of Qwen2.5-32B", "tp8", "", _OURS + "24 GPUs are not a multiple of section 2's 16")
TRAIN_57B = Constant("training of Qwen2-57B-A14B", "tp4 ep16", "", _PAPER + "appendix C")
TRAIN_72B = Constant("training of Qwen2.5-72B", "tp8 cp3 pp2", "", _PAPER + "appendix C")
TRAIN_235B = Constant(
    "training of Qwen3-235B-A22B", "tp4 pp2 ep16 recompute", "", _OURS + "the paper gives none; recomputes activations"
)
LOG_PROB_PASSES = Constant(
    "forward passes for log-probabilities, before an optimiser step on the whole batch",
    2,
    "",
    "GRPO (arXiv 2402.03300): old policy and reference; recomputed by the trainer, as in veRL",
)
AFD = Constant(
    "AFD instance",
    "afd24+16x3",
    "attention GPUs + FFN GPUs x micro-batches",
    _PAPER + "section 7.3.2 (3x8 and 2x8 GPUs); three micro-batches as in MegaScale-Infer (arXiv 2504.02263)",
)
GEN_LAYOUTS = Constant("engines of dense models at scale", ("tp4", "tp8"), "", _OURS + "the narrowest that hold 72B")
CODESIGN_LAYOUTS = Constant(
    "engines of Qwen3-235B-A22B", ("tp8", "tp16", "afd24+16x3"), "", _PAPER + "section 7.3.2; tp16 is an assumption"
)
TESTBED_LAYOUTS = Constant("engines on the testbed", ("tp1", "tp2", "tp4", "tp8"), "", _PAPER + "section 6, veRL-TO")
PAPERS_STATIC = Constant("engines of veRL-TO", "tp2", "", _PAPER + "section 6.2.2: eight TP=2 engines, Qwen2.5-14B")
SCALES = Constant("GPUs of figure 13", (512, 1024, 2048), "GPUs", _OURS + "the text names no scale below 2,048")
CODESIGN_GPUS = Constant(
    "GPUs of the co-design", (640, 1408), "training, generation", _PAPER + "section 7.3: 1,400 of 2,048"
)
GEN_OVER_TRAIN = Constant(
    "generation time over training time, for the co-design with fewer training GPUs", 1.49, "", _PAPER + "section 2.1"
)
PILOT_SHARE = Constant(
    "initial fraction of training GPUs",
    0.125,
    "",
    _OURS + "stages are timed with it, then the split that makes both equally long on a fat tree is used (StreamRL)",
)
SHARED_OUT_GPUS = Constant(
    "training GPUs of appendix I",
    (960, 1024),
    "for Qwen2.5-72B, Qwen2-57B-A14B",
    _OURS + "whole replicas, on more servers than a PoD's 32",
)
SHARED_OUT_STEP = Constant(
    "sequences per step of appendix I, and tokens of each", (8192, 4096), "", _OURS + "tokens as of a sample"
)
DELAYS_GPUS = Constant(
    "training GPUs of 512 for the comparison of reconfiguration delays",
    (96, 64),
    "for Qwen2.5-72B, Qwen2-57B-A14B",
    _OURS + "whole replicas, about an eighth",
)
SYNC_GPUS = Constant("training GPUs for the comparison of weight syncs", 64, "", _OURS + "an eighth of 512")
FAILURES_GPUS = Constant("training GPUs of 512 for failures of RFabric", 448, "", _OURS + "two PoDs")
PHASE_GPUS = Constant("generation GPUs of the case study and the ablation", (16, 24), "GPUs", _PAPER + "section 6.1")
WORKLOAD_GPUS = Constant("GPUs of section 2", (32, 40), "training, generation", _PAPER + "section 2")
LEFT_SHARES = Constant(
    "fractions of requests left when engines change",
    (0.05, 0.1, 0.2, 0.3, 0.5),
    "",
    _OURS + "the one with the shortest step on the oversubscribed tree is used",
)

# --- Inputs, where the paper's own figure cannot be derived
CASE_AT_S = Constant("time at which the case study changes engines", 272.0, "s", _PAPER + "section 6.2.2")
TP_HIDDEN = Constant(
    "hidden fraction of TP communication in a backward pass",
    0.5,
    "",
    "Megatron-LM, core/tensor_parallel/layers.py: it overlaps the reduction of input gradients, 2 of the 4"
    " collectives of a layer's backward pass, with the product for weight gradients; the same on every fabric",
)
SEEDS = Constant("seeds of figures 9 and 10", (1, 2), "", _OURS + "quick: 1")
SLOW_INTERVAL_S = Constant("seconds between plans", 30.0, "s", _OURS + "the daemon's default")
FAST_INTERVAL_S = Constant("seconds between moves", 1.0, "s", _OURS + "5 at scale, where a tick takes long")

ELSEWHERE: Mapping[str, str] = {
    "planner/cost/models.py": "layers, heads and experts of each model (appendix C; the checkpoints' configurations)",
    "planner/cost/hardware.py": "rates and sizes of GPUs, from data sheets",
    "planner/cost/engine_constants.py, planner/cost/fitted.py": "efficiencies of engines, fitted to measurements",
    "planner/cost/paper.py": "the paper's engine: host time, fitted to the six times of section 2.1",
    "orchestrrl/lab/sim/train/model.py": "efficiency of kernels, and Megatron's overlap of communication",
    "orchestrrl/lab/sim/net/model.py": "latencies, MTU, NVLink of a server (section 7.2)",
    "orchestrrl/lab/sim/net/collectives.py": "NCCL's algorithms",
    "orchestrrl/lab/sim/net/fabrics/": "the components of each fabric",
    "orchestrrl/lab/sim/cost.py": "prices of components (table 4) and of GPUs",
}


def every() -> list[Constant[Any]]:
    """Return all constants of this module, in the order of their definition."""
    return [value for value in globals().values() if isinstance(value, Constant)]
