"""The model, precision, parallel layout and hardware of an engine, which determine its step times."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from planner.cost.models import BF16_BITS, Model

CPU, CUDA = "cpu", "cuda"

# Bits per weight by vLLM's name of the quantization. Four-bit formats also store a scale per group of weights.
QUANTIZED_BITS = {"fp8": 8.0, "int8": 8.0, "w8a8": 8.0, "awq": 4.5, "gptq": 4.5, "int4": 4.5, "w4a16": 4.5, "fp4": 4.5}
MOST_SIZE = 1 << 24  # limit of each layer size and of the vocabulary
MOST_RANKS = 1 << 16
MOST_NAME = 512  # characters

DTYPE_BITS = {"float32": 32.0, "float": 32.0, "bfloat16": 16.0, "float16": 16.0, "half": 16.0}


# Keys in the config.json of models whose attention the cost model does not support: latent, linear, state space.
OTHER_ATTENTION = frozenset({"kv_lora_rank", "linear_num_key_heads", "mamba_d_state", "ssm_state_size"})


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """The facts about an engine that determine its step times. Empty strings and None mean unknown."""

    model: str = ""  # published name, or folder on the engine's host
    sizes: Model | None = None  # read from the model's config.json
    weight_bits: float | None = None
    kv_bits: float | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: bool | None = None
    device: str = ""  # cpu | cuda | ...
    gpu: str = ""  # product name, e.g. NVIDIA H100 80GB HBM3
    gpu_detail: str = ""  # why `gpu` is empty


UNKNOWN_SERVING = ServingFacts()


def model_from_config(name: str, document: object) -> Model | None:
    """Return the model sizes from a Hugging Face `config.json`. Return None if a size is missing or out of range, or if
    the kind of attention is not supported."""
    if not isinstance(document, dict):
        return None
    nested = document.get("text_config")  # multimodal models keep the language model's sizes there
    config: Mapping[str, Any] = nested if isinstance(nested, dict) else document
    if any(config.get(key) for key in OTHER_ATTENTION):
        return None
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    bits = weight_bits(config.get("dtype") or config.get("torch_dtype"), method) or BF16_BITS
    try:
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
        heads = int(config["num_attention_heads"])
        ffn = int(config.get("intermediate_size") or 0)
        model = Model(
            name=named(name),
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            q_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            ffn=int(config.get("shared_expert_intermediate_size") or 0) if experts else ffn,
            vocab=int(config["vocab_size"]),
            experts=experts,
            experts_per_token=_first(config, "num_experts_per_tok", "experts_per_token") or (1 if experts else 0),
            expert_ffn=int(config.get("moe_intermediate_size") or ffn) if experts else 0,
            tied_embeddings=config.get("tie_word_embeddings") is True,
            weight_bits=bits,
            expert_bits=bits,
        )
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
    sizes = (getattr(model, field.name) for field in fields(Model))
    return model if all(0 <= size <= MOST_SIZE for size in sizes if isinstance(size, int)) else None


def named(text: object) -> str:
    """Return a name from an engine's report as valid Unicode of limited length. Return "" if the value is not a
    string."""
    return text.encode(errors="replace").decode()[:MOST_NAME] if isinstance(text, str) else ""


def ranks(count: object) -> int | None:
    """Return `count`, a number of ranks from an engine's report, or None if it is not an integer in 1..MOST_RANKS."""
    return count if type(count) is int and 1 <= count <= MOST_RANKS else None


def weight_bits(dtype: object, quantization: object = None) -> float | None:
    """Return the bits per weight for vLLM's or Hugging Face's names of dtype and quantization. Return None if the
    number is unknown."""
    if isinstance(quantization, str) and quantization:
        return next((bits for word, bits in QUANTIZED_BITS.items() if word in quantization.lower()), None)
    return DTYPE_BITS.get(str(dtype).removeprefix("torch.")) if dtype else None


def kv_bits(cache_dtype: object) -> float | None:
    """Return the bits per KV cache element for vLLM's `cache_dtype`. The value is 8 for fp8 and int8, 16 for all other
    dtypes including `auto`, and None if no dtype is given."""
    if not isinstance(cache_dtype, str) or not cache_dtype:
        return None
    return 8.0 if cache_dtype.startswith(("fp8", "int8")) else 16.0


def gpu_of(names: Iterable[str]) -> tuple[str, str]:
    """Return a pair: the product name that all GPUs of a host share, and the reason why there is no such name. One of
    the two is always empty."""
    found = sorted({named(name).strip() for name in names if name.strip()})
    if not found:
        return "", "the engine's host reports no GPU"
    if len(found) > 1:
        return "", f"the engine's host has GPUs of several kinds: {', '.join(found)}"[:MOST_NAME]
    return found[0], ""


def listed_gpus(listing: object) -> list[str]:
    """Return the product names in `nvidia-smi -L` output, which vLLM's /server_info includes. A line has the form
    `GPU 0: NVIDIA H100 80GB HBM3`."""
    if not isinstance(listing, str):
        return []
    lines = (re.match(r"GPU \d+: (.+?)(?: \(UUID.*)?$", line.strip()) for line in listing.splitlines())
    return [line[1] for line in lines if line is not None]


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if config.get(name) is not None), None)
