"""Constants of inference engines, with priors: efficiencies relative to the hardware, and fixed times.

Examples are the efficiency of kernels relative to the data sheet and the latency of an all-reduce. All models share one
set of constants. TensorRT-LLM is the reference: vLLM and SGLang have the same constants, of which five are multiplied
by a factor of the engine. Every constant has a prior, which consists of a generally known value and the factor by which
this value may plausibly be wrong. `fitted.py` contains the fitted values: one set fitted on all models, and one set for
each model that is left out of the fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64] | float  # one value, or one per row


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """The constants of one engine. Each field is a single value, or an array with one value per row of the fit."""

    hbm_efficiency: Numbers  # share of the data sheet's bandwidth when reading weights
    kv_efficiency: Numbers  # the same when reading the KV cache
    gemm_efficiency: Numbers  # share of the data sheet's rate in decode
    prefill_efficiency: Numbers  # share of the data sheet's rate in prefill, 16-bit
    prefill_fp8_efficiency: Numbers
    moe_prefill_efficiency: Numbers  # factor on the prefill efficiency for experts
    four_bit_efficiency: Numbers  # factor on hbm_efficiency when reading 4-bit experts
    all_reduce_s: Numbers  # base latency of an all-reduce
    all_reduce_doubling_s: Numbers  # added for each doubling of the GPUs
    link_efficiency: Numbers  # share of the data sheet's NVLink rate
    layer_s: Numbers  # launches and small kernels of a layer, independent of the batch
    quantised_layer_s: Numbers  # added to layer_s if activations are quantised
    moe_layer_s: Numbers  # added to layer_s if tokens are routed to experts
    step_s: Numbers  # host time per iteration
    sequence_s: Numbers  # host time per sequence and iteration; not reduced by TP
    element_s: Numbers  # per sequence, layer and element of the hidden state: norms, activations, sampling
    expert_token_s: Numbers  # sorting a token to one expert and back, per layer; not reduced by EP
    prompt_s: Numbers  # host time per prompt
    prefill_share: Numbers  # share of other requests' prefill that delays a request's decode on a busy engine
    lockstep_sequences: Numbers  # requests that are prefilled together and do not delay each other
    routing_exponent: Numbers  # n tokens visit as many distinct experts as n**this independent tokens would
    ep_imbalance_exponent: Numbers  # the busiest of n ranks has n**this times the mean load


@dataclass(frozen=True, slots=True)
class ConstantPrior:
    value: float
    spread: float  # standard deviation of its logarithm


# The backend that the factors below are relative to.
REFERENCE_BACKEND = "trtllm"

PRIORS: dict[str, ConstantPrior] = {
    "hbm_efficiency": ConstantPrior(0.85, 0.05),
    "kv_efficiency": ConstantPrior(0.7, 0.2),
    "gemm_efficiency": ConstantPrior(0.6, 0.2),
    "prefill_efficiency": ConstantPrior(0.6, 0.1),
    "prefill_fp8_efficiency": ConstantPrior(0.45, 0.08),
    "moe_prefill_efficiency": ConstantPrior(0.5, 0.3),
    "four_bit_efficiency": ConstantPrior(0.6, 0.15),
    "all_reduce_s": ConstantPrior(4e-6, 0.4),
    "all_reduce_doubling_s": ConstantPrior(1.5e-6, 0.4),
    "link_efficiency": ConstantPrior(0.4, 0.4),
    "layer_s": ConstantPrior(30e-6, 0.5),
    "quantised_layer_s": ConstantPrior(10e-6, 0.5),
    "moe_layer_s": ConstantPrior(20e-6, 0.5),
    "step_s": ConstantPrior(1e-3, 0.5),
    "sequence_s": ConstantPrior(10e-6, 0.7),
    "element_s": ConstantPrior(0.1e-9, 1.0),
    "expert_token_s": ConstantPrior(50e-9, 0.5),
    "prompt_s": ConstantPrior(1e-3, 0.7),
    "prefill_share": ConstantPrior(0.9, 0.1),
    "lockstep_sequences": ConstantPrior(1.5, 0.3),
    # Heaps' law: the number of distinct items in n draws from a skewed distribution grows as n**k, k mostly 0.4 to 0.8.
    "routing_exponent": ConstantPrior(0.6, 0.1),
    "ep_imbalance_exponent": ConstantPrior(0.35, 0.2),
}

# SGLang prefills all waiting prompts before it continues to decode. Requests that start together stay together, and
# their prefill appears in the time to first token instead.
BACKEND_PRIORS: dict[str, dict[str, ConstantPrior]] = {
    "vllm": {
        "layer_s": ConstantPrior(1.0, 0.2),
        "step_s": ConstantPrior(1.0, 0.3),
        "sequence_s": ConstantPrior(1.0, 0.3),
        "prefill_share": ConstantPrior(1.0, 0.1),
        "lockstep_sequences": ConstantPrior(1.0, 0.2),
    },
    "sglang": {
        "layer_s": ConstantPrior(1.0, 0.2),
        "step_s": ConstantPrior(1.0, 0.3),
        "sequence_s": ConstantPrior(1.0, 0.3),
        "prefill_share": ConstantPrior(0.6, 0.08),
        "lockstep_sequences": ConstantPrior(1.0, 0.3),
    },
}

BACKENDS = (REFERENCE_BACKEND, *BACKEND_PRIORS)

# Constants that only affect models with experts. They are fitted on such models, with all other constants fixed.
MOE_ONLY = (
    "moe_prefill_efficiency",
    "four_bit_efficiency",
    "moe_layer_s",
    "expert_token_s",
    "routing_exponent",
    "ep_imbalance_exponent",
)


def flat_priors() -> dict[str, ConstantPrior]:
    """Return the priors of all fitted constants by name. The factors of a backend have names such as `vllm.layer_s`."""
    factors = {
        f"{backend}.{name}": prior for backend, priors in BACKEND_PRIORS.items() for name, prior in priors.items()
    }
    return PRIORS | factors


def prior_values() -> dict[str, float]:
    return {name: prior.value for name, prior in flat_priors().items()}


class UnknownBackend(ValueError):
    """Raised for an unknown backend; the message lists the known backends."""


def constants_of(values: Mapping[str, float], backend: str) -> EngineConstants:
    """Return the constants of the engine `backend`. `values` is keyed by the names of `flat_priors`. Raises
    UnknownBackend if the backend is unknown."""
    if backend not in BACKENDS:
        raise UnknownBackend(f"unknown backend {backend!r}; known backends: {', '.join(BACKENDS)}")
    return EngineConstants(**{name: values[name] * values.get(f"{backend}.{name}", 1.0) for name in PRIORS})
