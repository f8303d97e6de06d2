"""Predict initial step times for engines without a configuration, from the model and GPU that they report. The
functions in this module have no side effects.

A prior is a prediction of the cost model (planner/cost/predict.py). If the cost model does not contain the LLM or the
GPU, the shape of a typical engine's step times is assumed, and their scale is learned from observed batches
(live_profile.py).
"""

import hashlib
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.engines.serving import QUANTIZED_BITS, ServingFacts
from planner.cost.engines import ENGINES, EngineModel
from planner.cost.hardware import GpuModel, UnknownGpu, gpu_of_product
from planner.cost.models import MODELS, Model, UnknownModel, model_named
from planner.cost.predict import DoesNotFit, identifier, predict
from planner.cost.profile import EngineProfile
from planner.cost.roofline import Precision
from planner.model import ConfigurationId, EngineId, Parallelism

PREFIX = "auto:"  # prefix of implicit ids; these are not in fleet.configurations
USUAL_ENGINE = "vllm"
# The engine whose shape of step times is assumed if nothing is known: only the scale is learned at first.
TYPICAL = "qwen2.5-14b", "NVIDIA H100"
TP_TRIED = (1, 2, 4, 8)  # used if the engine does not report its own: the first that fits
USUAL_CONTEXT_TOKENS = 4096
SAME_SIZE = 1.25  # a dense model can represent another one whose size differs by at most this factor


@dataclass(frozen=True, slots=True)
class AssumedProfile:
    """The implicit configuration of an engine that has no configured one. Engines that report the same facts share one
    implicit configuration."""

    profile: EngineProfile
    prior: str = ""  # e.g. `qwen2.5-14b on H100, TP=2`; empty: only the shape is assumed
    unknown: str = ""  # why there is no prior


class NoPrior(ValueError):
    """Raised if no prediction is possible from the facts that an engine reports. The message states the reason."""


def assumed_of(engine: EngineId, capabilities: EngineCapabilities) -> AssumedProfile:
    """Return the prior for the engine's reported facts. If no prediction is possible, return a typical shape of step
    times, with the reason why there is no prior."""
    facts = capabilities.serving
    try:
        return _prior(facts, capabilities.engine, capabilities.max_model_len_tokens or USUAL_CONTEXT_TOKENS)
    except NoPrior as why:
        return AssumedProfile(replace(_typical(), id=_shape_id(engine, facts)), unknown=str(why))


def model_of(facts: ServingFacts) -> tuple[Model, str]:
    """Return the model for the prediction, and a text that describes how the model was identified. Raises NoPrior if
    the facts do not identify a model."""
    if facts.sizes is not None:
        return facts.sizes, f"{facts.sizes.name} (sizes of its config.json)"
    try:
        model = model_named(facts.model)
    except UnknownModel:
        similar = similar_model(facts.model)
        if similar is None:
            reason = (
                f"the engine's model is unknown: {facts.model}"
                if facts.model
                else "the engine does not report its model"
            )
            raise NoPrior(f"{reason}, and the config.json of the model cannot be read") from None
        return similar, f"like {similar.name} (by its name)"
    return model, model.name


def similar_model(name: str) -> Model | None:
    """Return the known model closest to an unknown name: a model of about the same size, preferably of the same family.

    For example, `DeepSeek-R1-Distill-Qwen-14B` maps to qwen2.5-14b, and `Mistral-7B-v0.3` maps to the known 7B model.
    Return None if the name contains no size, or no model of about that size is known.
    """
    words = re.split(r"[-_/ ]+", name.strip().lower())
    sizes = {word for word in words if re.fullmatch(r"a?\d+(\.\d+)?b", word)}
    if not sizes:
        return None
    alike = [model for model in MODELS.values() if sizes == set(re.findall(r"(?<![a-z0-9.])a?\d+b\b", model.name))]
    families = [model for model in alike if _family(model) in "-".join(words)]
    if families or alike:
        return (families or alike)[0]
    if len(sizes) > 1:
        return None
    (size,) = sizes
    if size.startswith("a"):
        return None
    params = float(size.removesuffix("b")) * 1e9
    if not 0 < params < math.inf:
        return None
    dense = [(abs(math.log(model.params / params)), model.name) for model in MODELS.values() if not model.moe]
    distance, closest = min(dense)
    return MODELS[closest] if distance <= math.log(SAME_SIZE) else None


# --- inside


@lru_cache(maxsize=256)
def _prior(facts: ServingFacts, product: str, longest_tokens: int) -> AssumedProfile:
    gpu = _gpu(facts)
    model, words = model_of(facts)
    engine = ENGINES.get(product, ENGINES[USUAL_ENGINE])
    precision = _precision(facts, model)
    profile = _predicted(facts, model, gpu, engine, precision, longest_tokens)
    layout = profile.parallelism
    prior = f"{words} on {gpu.name.upper()}, {_layout(layout)}{'' if facts.tp else ' assumed'}"
    name = _implicit_id(model, gpu, profile, precision)
    return AssumedProfile(replace(profile, id=name), prior=prior)


def _gpu(facts: ServingFacts) -> GpuModel:
    if not facts.gpu:
        raise NoPrior(facts.gpu_detail or "the engine does not report its GPU")
    try:
        return gpu_of_product(facts.gpu)
    except UnknownGpu:
        raise NoPrior(f"GPU {facts.gpu} of the engine is not in the cost model") from None


def _predicted(
    facts: ServingFacts, model: Model, gpu: GpuModel, engine: EngineModel, precision: Precision, longest_tokens: int
) -> EngineProfile:
    """Return the prediction for the reported parallelism. If no TP degree is reported, use the first degree in TP_TRIED
    at which a request of `longest_tokens` fits in the KV cache, since an engine with less capacity does not start.
    Raises NoPrior if no prediction is possible."""
    if (facts.pp or 1) > 1:
        raise NoPrior(f"PP must be 1, because step times of pipeline stages are not modelled, got {facts.pp}")
    for tp in (facts.tp,) if facts.tp else TP_TRIED:
        dp = facts.dp or 1
        layout = Parallelism(tp=tp, dp=dp, ep=tp * dp if facts.ep and model.moe else 1)
        try:
            with np.errstate(all="ignore"):  # for absurd sizes; the result is checked
                profile = predict(model, gpu, layout, engine, precision)
        except DoesNotFit:
            continue
        except (ValueError, ArithmeticError) as error:
            raise NoPrior(f"the engine's step times cannot be predicted: {error}") from error
        if not facts.tp and profile.kv_capacity_tokens < longest_tokens:
            continue
        if not _sound(profile):
            raise NoPrior(
                f"the step times predicted from the sizes of model {model.name} are invalid: they must be finite and "
                "positive and must not decrease with load"
            )
        return profile
    raise NoPrior(
        f"model {model.name} does not fit into the memory of GPU {gpu.name.upper()} with TP={facts.tp or 'any'}, "
        "according to the facts that the engine reports"
    )


def _sound(profile: EngineProfile) -> bool:
    """Return whether the profile's step times and prefill rate are finite and positive, and its step times do not
    decrease with load."""
    step = profile.step
    ys = step.base_s.ys
    finite = all(math.isfinite(y) and y > 0 for y in ys) and 0 <= step.kv_s_per_token < math.inf
    rising = all(later >= sooner for sooner, later in pairwise(ys))
    return finite and rising and 0 < profile.prefill_tokens_per_s < math.inf


def _precision(facts: ServingFacts, model: Model) -> Precision:
    """Return the precision of weights and KV cache. The precision of the weights is the one that the engine reports or,
    if it reports none, the one in the checkpoint's name or, if there is none, that of the published model. The KV cache
    has 16 bits per element unless the engine reports another number."""
    words = re.split(r"[-_/. ]+", facts.model.lower())
    named = next((QUANTIZED_BITS[word] for word in words if word in QUANTIZED_BITS), None)
    bits = facts.weight_bits or named
    kv = facts.kv_bits or 16.0
    return Precision(bits or model.weight_bits, min(bits or model.expert_bits, model.expert_bits), kv)


@lru_cache(maxsize=1)
def _typical() -> EngineProfile:
    model, gpu = TYPICAL
    return predict(model_named(model), gpu_of_product(gpu), Parallelism(), ENGINES[USUAL_ENGINE])


def _implicit_id(model: Model, gpu: GpuModel, profile: EngineProfile, precision: Precision) -> ConfigurationId:
    """Return an id that is unique to the prediction. The id includes the precision if it differs from the published
    model's precision with a 16-bit KV cache. It includes a hash of the model's sizes if the table of known models does
    not contain these sizes."""
    parts = [_slug(model.name), gpu.name, identifier(profile.parallelism)]
    if precision != Precision(model.weight_bits, model.expert_bits):
        parts.append(f"w{precision.weight_bits:g}kv{precision.kv_bits:g}")
    if MODELS.get(model.name) != model:
        parts.append(hashlib.sha256(repr(model).encode()).hexdigest()[:6])
    return ConfigurationId(PREFIX + "-".join(parts))


def _shape_id(engine: EngineId, facts: ServingFacts) -> ConfigurationId:
    """Return the id of an implicit configuration without a prior. Engines that report the same model and facts share
    the id, so that their samples are combined. An engine that reports no model gets an id of its own."""
    if not facts.model:
        return ConfigurationId(f"{PREFIX}{engine}")
    digest = hashlib.sha256(repr(replace(facts, sizes=None)).encode()).hexdigest()[:6]
    return ConfigurationId(f"{PREFIX}{_slug(facts.model)}-{_slug(facts.gpu or facts.device or 'unknown')}-{digest}")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.rsplit("/", 1)[-1].lower()).strip("-")[:40] or "model"


def _family(model: Model) -> str:
    return re.split(r"[^a-z]", model.name)[0]


def _layout(layout: Parallelism) -> str:
    degrees = {"TP": layout.tp, "DP": layout.dp, "EP": layout.ep}
    return " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1 or name == "TP")
