"""What an inference engine makes of its hardware: a few efficiencies and fixed times, their priors, by name. Pure.

All models share one set; an engine differs from TensorRT-LLM by five factors. Every constant has a prior: a value that
is known in general (how close to the data sheet kernels come, what an all-reduce takes) with the factor by which it may
plausibly be off. `fitted.py` holds the values after fitting, one set for each model that was left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64] | float  # one value, or one per row


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Of one engine, or with an array in each field for rows of several engines."""

    hbm_efficiency: Numbers  # of the data sheet's bandwidth, reading weights
    kv_efficiency: Numbers  # the same, reading the KV cache
    gemm_efficiency: Numbers  # of the data sheet's rate, in decode
    prefill_efficiency: Numbers  # of the data sheet's rate, 16-bit
    prefill_fp8_efficiency: Numbers
    moe_prefill_efficiency: Numbers  # of experts, on top of the former
    four_bit_efficiency: Numbers  # reading experts held in 4 bits, on top of hbm_efficiency
    all_reduce_s: Numbers  # latency of one, at one GPU; grows with each doubling
    all_reduce_doubling_s: Numbers
    link_efficiency: Numbers  # of the data sheet's NVLink rate
    layer_s: Numbers  # launching and small kernels of a layer, whatever the batch
    quantised_layer_s: Numbers  # more of them where activations are quantised
    moe_layer_s: Numbers  # more of them where tokens are routed to experts
    step_s: Numbers  # host, each iteration
    sequence_s: Numbers  # host, each sequence in each iteration; does not shrink with TP
    element_s: Numbers  # each sequence, layer and element of the hidden state: norms, activations, sampling
    expert_token_s: Numbers  # sorting a token to one expert and back, each layer; does not shrink with EP
    prompt_s: Numbers  # host, each prompt
    prefill_share: Numbers  # of others' prefill that falls into a request's decode, when the engine is busy
    lockstep_sequences: Numbers  # requests that are prefilled together, and so do not disturb each other
    routing_exponent: Numbers  # n tokens visit the distinct experts that n**this would, were they independent
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
    # Heaps' law: what is new among n draws from a skewed lot grows as a power of n, of 0.4 to 0.8 in most lots.
    "routing_exponent": ConstantPrior(0.6, 0.1),
    "ep_imbalance_exponent": ConstantPrior(0.35, 0.2),
}

# SGLang prefills whatever waits before it decodes on, so requests that start together stay together, and their prefill
# shows as time to first token instead.
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

# Constants that only models with experts show; they are fitted on those, with the others held.
MOE_ONLY = (
    "moe_prefill_efficiency",
    "four_bit_efficiency",
    "moe_layer_s",
    "expert_token_s",
    "routing_exponent",
    "ep_imbalance_exponent",
)


def flat_priors() -> dict[str, ConstantPrior]:
    """Every number that is fitted, by name; a backend's factors as `vllm.layer_s`."""
    factors = {
        f"{backend}.{name}": prior for backend, priors in BACKEND_PRIORS.items() for name, prior in priors.items()
    }
    return PRIORS | factors


def prior_values() -> dict[str, float]:
    return {name: prior.value for name, prior in flat_priors().items()}


class UnknownBackend(ValueError):
    """No constants for it; the message lists what is known."""


def constants_of(values: Mapping[str, float], backend: str) -> EngineConstants:
    """The constants of one engine out of the flat `values`."""
    if backend not in BACKENDS:
        raise UnknownBackend(f"unknown backend {backend!r}, known: {', '.join(BACKENDS)}")
    return EngineConstants(**{name: values[name] * values.get(f"{backend}.{name}", 1.0) for name in PRIORS})
