"""Derive the intent of a Gen period: the traffic of the deployed engines until the next redeployment. Has no side
effects.

The traffic consists of the activations of every token that passes a layer, with the same volumes as in
`planner/cost/roofline.py`. The number of a rank is the number of its GPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.cost.models import Model
from planner.cost.roofline import ACTIVATION_BYTES
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.model import EngineId, GpuId, Parallelism

RESPONSE_BYTES_PER_TOKEN = 8.0  # the id and log-probability of a token
GPUS_PER_NODE = 8

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DeployedEngine:
    """An engine with its layout and its numbers of tokens. `gpus` are sorted by rank: by attention replica, then by
    pipeline stage, then by TP rank. Under AFD, attention GPUs come before FFN GPUs."""

    id: EngineId
    gpus: tuple[GpuId, ...]
    parallelism: Parallelism
    tokens: float  # through the model in the period, prompts included
    response_tokens: float = 0.0  # streamed to training

    def __post_init__(self) -> None:
        if len(self.gpus) != self.parallelism.gpus:
            raise ValueError(f"{self.id}: must have {self.parallelism.gpus} GPUs, got {len(self.gpus)}")
        for name in ("tokens", "response_tokens"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{self.id}: {name} must be finite and >= 0, got {getattr(self, name)}")


def deployment_intent(
    model: Model,
    engines: Iterable[DeployedEngine],
    *,
    period: str = "generation",
    trainers: Sequence[GpuId] = (),
    per_node: int = GPUS_PER_NODE,
) -> Intent:
    """Return the intent of the engines' traffic in a period. Engines of equal layout and volume share traffic entries.
    The engines send their responses to `trainers`, assigned round-robin."""
    ordered = sorted(engines, key=lambda engine: engine.id)
    alike: dict[tuple[TrafficOperation, Primitive, float, float, bool], list[tuple[tuple[int, ...], tuple[int, ...]]]]
    alike = defaultdict(list)
    for number, engine in enumerate(ordered):
        for each in _engine_traffic(model, engine, per_node):
            key = each.operation, each.primitive, each.bytes_per_rank, each.times, each.both_ways
            receivers = each.receivers or ((),) * len(each.groups)
            alike[key] += zip(each.groups, receivers, strict=True)
        if engine.response_tokens and trainers:
            sent_bytes = engine.response_tokens * RESPONSE_BYTES_PER_TOKEN
            stream = int(engine.gpus[0]), int(trainers[number % len(trainers)])
            alike[TrafficOperation.RESPONSES, Primitive.PIPELINE, sent_bytes, 1.0, False].append((stream, ()))
    return Intent(
        period,
        Stage.GEN,
        tuple(
            Traffic(
                operation,
                primitive,
                tuple(group for group, _ in both),
                sent_bytes,
                times,
                tuple(receivers for _, receivers in both) if primitive is Primitive.BIPARTITE else (),
                both_ways,
            )
            for (operation, primitive, sent_bytes, times, both_ways), both in alike.items()
        ),
    )


def _engine_traffic(model: Model, engine: DeployedEngine, per_node: int) -> Iterator[Traffic]:
    layout, gpus = engine.parallelism, tuple(map(int, engine.gpus))
    token_bytes = model.hidden * ACTIVATION_BYTES
    if layout.afd:
        yield from _afd_traffic(model, layout, gpus, engine.tokens * token_bytes, per_node)
        return
    layers = model.layers / layout.pp
    stages = [gpus[first : first + layout.tp] for first in range(0, len(gpus), layout.tp)]  # [replica, stage]
    replica_bytes = engine.tokens / layout.dp * token_bytes
    exchanges = model.moe and layout.dp > 1
    # With expert all-to-all, only attention has an all-reduce.
    yield from _all_reduce(tuple(stages), replica_bytes, layers * (1 if exchanges else 2), per_node)
    if exchanges:
        groups = tuple(tuple(gpu for each in stages[stage :: layout.pp] for gpu in each) for stage in range(layout.pp))
        # To the experts and back; tokens of a replica are split over its TP ranks.
        sent_bytes = model.experts_per_token * replica_bytes / layout.tp
        yield Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, groups, sent_bytes, 2 * layers)
    if layout.pp > 1:
        chains = tuple(
            tuple(stages[replica * layout.pp + stage][rank] for stage in range(layout.pp))
            for replica in range(layout.dp)
            for rank in range(layout.tp)
        )
        yield Traffic(TrafficOperation.PP, Primitive.PIPELINE, chains, replica_bytes / layout.tp)


def _afd_traffic(
    model: Model, layout: Parallelism, gpus: tuple[int, ...], all_bytes: float, per_node: int
) -> Iterator[Traffic]:
    """Yield the traffic of an AFD engine. In each layer, every token goes from its attention GPU to its experts' GPUs
    and back. A dense FFN is split over the FFN GPUs, which perform an all-reduce."""
    attention, ffn = gpus[: layout.attention_gpus], gpus[layout.attention_gpus :]
    copies = min(model.experts_per_token, len(ffn)) if model.moe else 1
    sent_bytes, layers = all_bytes * copies / len(attention), float(model.layers)
    yield Traffic(TrafficOperation.AFD, Primitive.BIPARTITE, (attention,), sent_bytes, layers, (ffn,), both_ways=True)
    replicas = tuple(attention[first : first + layout.tp] for first in range(0, len(attention), layout.tp))
    yield from _all_reduce(replicas, all_bytes / len(replicas), layers, per_node)
    if not model.moe:
        yield from _all_reduce((ffn,), all_bytes, layers, per_node)


def _all_reduce(groups: Groups, buffer_bytes: float, times: float, per_node: int) -> Iterator[Traffic]:
    """Yield the traffic of an all-reduce. It uses one ring if a group fits in a node. Otherwise it has two levels, and
    between nodes every NIC carries its share of the node's sum."""
    size = len(groups[0])
    if size == 1:
        return
    if size <= per_node:
        yield Traffic(TrafficOperation.TP, Primitive.RING_ALL_REDUCE, groups, buffer_bytes, times)
        return
    nodes = tuple(group[first : first + per_node] for group in groups for first in range(0, size, per_node))
    rings = tuple(group[rank::per_node] for group in groups for rank in range(per_node))
    yield Traffic(TrafficOperation.TP, Primitive.REDUCE_SCATTER, nodes, buffer_bytes, times)
    yield Traffic(TrafficOperation.TP, Primitive.RING_ALL_REDUCE, rings, buffer_bytes / per_node, times)
    yield Traffic(TrafficOperation.TP, Primitive.ALL_GATHER, nodes, buffer_bytes / per_node, times)
