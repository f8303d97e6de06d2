"""Between protobuf and the model, both ways: what an engine serves, and on what. Part of telemetry.py."""

import math
from dataclasses import fields

from orchestrrl.engines.serving import MOST_RANKS, MOST_SIZE, ServingFacts
from orchestrrl.rpc.pb import telemetry_pb2
from planner.cost.models import Model

MOST_BITS = 64.0

_SIZES = tuple(field.name for field in fields(Model))
# By the names of ServingFacts, those of the message.
_OPTIONAL = {
    "weight_bits": "weight_bits",
    "kv_bits": "kv_bits",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dp": "data_parallel",
    "ep": "expert_parallel",
}


def serving_to_pb(facts: ServingFacts) -> telemetry_pb2.ServingFacts:
    return telemetry_pb2.ServingFacts(
        model=facts.model,
        sizes=None if facts.sizes is None else _sizes_to_pb(facts.sizes),
        device=facts.device,
        gpu=facts.gpu,
        gpu_detail=facts.gpu_detail,
        **{message: getattr(facts, own) for own, message in _OPTIONAL.items()},
    )


def serving_from_pb(message: telemetry_pb2.ServingFacts) -> ServingFacts:
    """Raises ValueError with the field's name for a number that is out of range."""
    optional = {own: getattr(message, name) for own, name in _OPTIONAL.items() if message.HasField(name)}  # type: ignore[arg-type]
    for name in ("weight_bits", "kv_bits"):
        if name in optional:
            _check_bits(f"serving.{name}", optional[name])
    for own, name in (("tp", "tensor_parallel"), ("pp", "pipeline_parallel"), ("dp", "data_parallel")):
        if own in optional and not 1 <= optional[own] <= MOST_RANKS:
            raise ValueError(f"serving.{name}: must be within 1..{MOST_RANKS}, got {optional[own]}")
    return ServingFacts(
        model=message.model,
        sizes=_sizes_from_pb(message.sizes) if message.HasField("sizes") else None,
        device=message.device,
        gpu=message.gpu,
        gpu_detail=message.gpu_detail,
        **optional,
    )


def _sizes_to_pb(model: Model) -> telemetry_pb2.ModelSizes:
    return telemetry_pb2.ModelSizes(**{name: getattr(model, name) for name in _SIZES})


def _sizes_from_pb(message: telemetry_pb2.ModelSizes) -> Model:
    values = {name: getattr(message, name) for name in _SIZES}
    for name, value in values.items():
        if name.endswith("_bits"):
            _check_bits(f"serving.sizes.{name}", value)
        elif isinstance(value, int) and value > MOST_SIZE:
            raise ValueError(f"serving.sizes.{name}: must be <= {MOST_SIZE}, got {value}")
    try:
        return Model(**values)
    except ValueError as error:
        name, _, wrong = str(error).partition(" ")
        raise ValueError(f"serving.sizes.{name}: {wrong}") from error


def _check_bits(path: str, bits: float) -> None:
    if not (math.isfinite(bits) and 0 < bits <= MOST_BITS):
        raise ValueError(f"{path}: must be above 0 and at most {MOST_BITS:g}, got {bits}")
