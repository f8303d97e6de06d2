"""Map each rank to its part of each parameter, in Megatron's layout (TP, PP, EP, replicas) and in vLLM's layout. Has no
side effects.

A rank's tensor consists of boxes of the whole tensor, stacked along one axis. The boxes describe both the owners of
elements and their place in memory. Sources: Megatron-core's parallel_state (rank order tp-cp-ep-dp-pp; linear_qkv is
ordered by KV groups), vLLM's parallel_state, QKVParallelLinear, VocabParallelEmbedding and FusedMoE.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.sync_tree.parameters import Box, Parameter, ParameterSplit, Where

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of a tensor that one rank stores."""

    axis: int  # the axis that the boxes are stacked along; they are equal on all others
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The layout of one vLLM engine. The rank is (dp * PP + stage) * TP + tp. Experts are divided over all DP x TP
    ranks of a stage. Each rank has whole experts if `has_expert_parallel` is True, otherwise a part of every expert."""

    endpoints: tuple[int, ...]  # [rank]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    has_expert_parallel: bool = False
    vocab_multiple: int = 64  # the embedding's rows are padded to a multiple of this
    stage_of_layer: tuple[int, ...] = ()  # required if PP > 1: `vllm_stages`

    def __post_init__(self) -> None:
        _check_grid(self.endpoints, {"dp": self.dp, "pp": self.pp, "tp": self.tp})
        _check_stages(self.stage_of_layer, self.pp)

    def stages(self, where: Where) -> tuple[int, ...]:
        return _stages(where, self.pp, self.stage_of_layer)

    def local(self, parameter: Parameter, rank: int) -> tuple[LocalShard, ...]:
        """Return the rank's shards of a parameter. Raises ValueError if vLLM cannot divide the parameter in this
        layout."""
        dp, stage, tp = rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp
        if stage not in self.stages(parameter.where):
            return ()
        shape, split = parameter.shape, parameter.split
        if not split.has_experts:
            return _blocks(shape, split, tp, self.tp, self.vocab_multiple)
        number, of = dp * self.tp + tp, self.dp * self.tp
        if not self.has_expert_parallel:
            return _blocks(shape, split, number, of, 1)
        each, more = divmod(shape[0], of)  # the first ranks have one more
        first = number * each + min(number, more)
        return _within(_blocks(shape, split, 0, 1, 1), first, first + each + (number < more))


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The layout of a Megatron trainer. The rank is (stage * replicas + replica) * TP + tp. Ranks of context
    parallelism count as replicas. Experts have their own grid inside a stage: (replica * EP + ep) * expert_tp + tp.
    Fused parameters are in Megatron's order: q, k and v are stored together for each KV group, and gate and up are
    stored together for each rank."""

    endpoints: tuple[int, ...]  # [rank]
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    ep: int = 1
    expert_tp: int = 1
    vocab_multiple: int = 1  # make_vocab_size_divisible_by times TP
    stage_of_layer: tuple[int, ...] = ()  # required if PP > 1: `megatron_stages`

    def __post_init__(self) -> None:
        _check_grid(self.endpoints, {"pp": self.pp, "replicas": self.replicas, "tp": self.tp})
        _check_stages(self.stage_of_layer, self.pp)
        width, experts = len(self.endpoints) // self.pp, self.ep * self.expert_tp
        if width % experts:
            raise ValueError(
                f"the number of ranks of a stage must be a multiple of EP x expert TP ({experts}), got {width}"
            )

    def stages(self, where: Where) -> tuple[int, ...]:
        return _stages(where, self.pp, self.stage_of_layer)

    def local(self, parameter: Parameter, rank: int) -> tuple[LocalShard, ...]:
        """Return the rank's shards of a parameter. Raises ValueError if Megatron cannot divide the parameter in this
        layout."""
        stage, number = divmod(rank, len(self.endpoints) // self.pp)
        if stage not in self.stages(parameter.where):
            return ()
        shape, split = parameter.shape, parameter.split
        if not split.has_experts:
            return self._divided(shape, split, number % self.tp, self.tp)
        tp, ep = number % self.expert_tp, number // self.expert_tp % self.ep
        if shape[0] % self.ep:
            raise ValueError(f"{parameter.name}: {shape[0]} experts cannot be divided by EP {self.ep}")
        each = shape[0] // self.ep
        return _within(self._divided(shape, split, tp, self.expert_tp), ep * each, (ep + 1) * each)

    def _divided(self, shape: tuple[int, ...], split: ParameterSplit, tp: int, of: int) -> tuple[LocalShard, ...]:
        if any(part.heads for part in split.parts):
            return _by_groups(shape, split, tp, of)
        return _blocks(shape, split, tp, of, self.vocab_multiple)


def vllm_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Return the pipeline stage of each layer in vLLM. Layers that remain after even division go to the last stage but
    one, then to earlier stages."""
    counts = [layers // pp] * pp
    for place in range(layers % pp):
        counts[-2 - place] += 1
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


def megatron_stages(layers: int, pp: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the pipeline stage of each layer in Megatron. If there are several `chunks` per stage (virtual pipeline),
    chunks are assigned to the stages round-robin. Raises ValueError if the layers cannot be divided evenly."""
    if layers % (pp * chunks):
        raise ValueError(f"{layers} layers cannot be divided evenly into {pp} stages of {chunks} chunks")
    each = layers // (pp * chunks)
    return tuple(layer // each % pp for layer in range(layers))


@lru_cache(maxsize=4096)
def _blocks(
    shape: tuple[int, ...], split: ParameterSplit, rank: int, of: int, vocab_multiple: int
) -> tuple[LocalShard, ...]:
    """Return a rank's even share of each part of a parameter that is divided among `of` ranks. If there are fewer heads
    than ranks, adjacent ranks have copies of a head."""
    axis = split.axis
    if axis is None:
        return _local(shape, 0, [(0, shape[0])])
    if split.is_vocab:
        each = _padded(shape, split, of, vocab_multiple) // of
        first, last = (min(shape[axis], each * number) for number in (rank, rank + 1))
        return _local(shape, axis, [(first, last)])
    if 0 < max((part.heads for part in split.parts), default=0) < of:
        raise ValueError(
            f"TP must be at most the number of query heads ({max(part.heads for part in split.parts)}), got {of}"
        )
    ranges, start = [], 0
    for length, heads in [(part.length, part.heads) for part in split.parts] or [(shape[axis], 0)]:
        shares, own = of, rank
        if heads and heads < of:
            if of % heads:
                raise ValueError(f"TP must be a multiple of the number of KV heads ({heads}), got {of}")
            shares, own = heads, rank // (of // heads)
        if (heads or length) % shares:
            raise ValueError(f"{heads or length} {'heads' if heads else 'rows'} cannot be divided by TP {of}")
        each = length // shares
        ranges.append((start + own * each, start + (own + 1) * each))
        start += length
    return _local(shape, axis, ranges)


@lru_cache(maxsize=4096)
def _by_groups(shape: tuple[int, ...], split: ParameterSplit, rank: int, of: int) -> tuple[LocalShard, ...]:
    """Return a rank's even share of the rows in Megatron's order, which is KV group by KV group."""
    axis = split.axis or 0
    if shape[axis] % of:
        raise ValueError(f"{shape[axis]} rows cannot be divided by TP {of}")
    groups = min(part.heads for part in split.parts)
    starts = list(itertools.accumulate((part.length for part in split.parts), initial=0))
    rows = [
        (start + part.length // groups * group, start + part.length // groups * (group + 1))
        for group in range(groups)
        for start, part in zip(starts, split.parts, strict=False)
    ]
    each = shape[axis] // of
    return _local(shape, axis, between(rows, rank * each, (rank + 1) * each))


def _padded(shape: tuple[int, ...], split: ParameterSplit, of: int, multiple: int) -> int:
    """Return the number of rows of a vocabulary, including padding."""
    rows = -(-shape[split.axis or 0] // multiple) * multiple
    if rows % of:
        raise ValueError(f"the {rows} rows of the padded vocabulary cannot be divided by TP {of}")
    return rows


def _local(shape: tuple[int, ...], axis: int, ranges: Sequence[Range]) -> tuple[LocalShard, ...]:
    whole = tuple((0, length) for length in shape)
    boxes = tuple((*whole[:axis], each, *whole[axis + 1 :]) for each in ranges if each[0] < each[1])
    return (LocalShard(axis, boxes),) if boxes else ()


def _within(whole: tuple[LocalShard, ...], first: int, last: int) -> tuple[LocalShard, ...]:
    """Return the shards restricted to experts [first, last)."""
    if first == last:
        return ()
    return tuple(LocalShard(each.axis, tuple(((first, last), *box[1:]) for box in each.boxes)) for each in whole)


def chunk(length: int, part: int, of: int) -> Range:
    """Return the range of part `part` if `length` is divided into `of` parts as by torch.chunk. The last parts may be
    smaller than the others."""
    each = -(-length // of)
    return min(length, part * each), min(length, (part + 1) * each)


def between(ranges: Sequence[Range], first: int, last: int) -> list[Range]:
    """Return the parts of `ranges` that are between the positions `first` and `last` of the concatenated ranges."""
    found, at = [], 0
    for start, end in ranges:
        a, b = max(start, start + first - at), min(end, start + last - at)
        if a < b:
            found.append((a, b))
        at += end - start
    return found


def _stages(where: Where, pp: int, stage_of_layer: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(where, int):
        if pp == 1:
            return (0,)
        if not 0 <= where < len(stage_of_layer):
            raise ValueError(
                f"layer must be >= 0 and less than the length of stage_of_layer ({len(stage_of_layer)}), got {where}"
            )
        return (stage_of_layer[where],)
    return {"first": (0,), "last": (pp - 1,), "both": tuple(sorted({0, pp - 1}))}[where]


def _check_grid(endpoints: tuple[int, ...], sizes: dict[str, int]) -> None:
    ranks = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
        ranks *= size
    if ranks != len(endpoints):
        raise ValueError(
            f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} need {ranks} endpoints,"
            f" got {len(endpoints)}"
        )
    if len(set(endpoints)) != ranks:
        raise ValueError(
            f"every rank must have a different endpoint, got {len(set(endpoints))} endpoints for {ranks} ranks"
        )


def _check_stages(stage_of_layer: tuple[int, ...], pp: int) -> None:
    if pp > 1 and not stage_of_layer:
        raise ValueError(f"stage_of_layer must not be empty if pp > 1, got () with pp {pp}")
    if stage_of_layer and not 0 <= min(stage_of_layer) <= max(stage_of_layer) < pp:
        raise ValueError(
            f"stage_of_layer must contain only stages >= 0 and less than pp ({pp}), got {sorted(set(stage_of_layer))}"
        )
