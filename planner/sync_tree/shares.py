"""Compute the part of each tensor of a checkpoint that an engine's ranks load, by the tensor's Hugging Face name. Has
no side effects.

Tensors are divided as in vLLM's decoder models (`layout.py` lists the sources). Loading too much of a tensor wastes
bandwidth, but loading too little breaks the model. Therefore a tensor is loaded whole if names and shapes do not
determine its division. This applies to unknown names, uneven divisions, KV heads of unknown size, shared experts, and
the division inside experts that are stored as one tensor. The embedding also goes to the last stage, because tied
models load it there.

Ranks are those of one replica. Set TP and EP to 1 for data parallelism without expert parallelism, because vLLM then
divides experts over DP x TP. Do the same for dynamic expert placement (EPLB), because names then do not determine an
expert's rank.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from planner.sync_tree.layout import Range, vllm_stages
from planner.sync_tree.parameters import Box
from planner.sync_tree.ranges import ByteRanges

Shapes = Mapping[str, tuple[int, ...]]

_LAYER = re.compile(r"^(?:model\.|language_model\.model\.|model\.language_model\.)layers\.(\d+)\.")
_DRAFT = re.compile(r"\.(?:eh_proj|enorm|hnorm)\.")  # of layers for multi-token prediction, which belong to no stage
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERTS = re.compile(r"\.experts\.[a-z_]+(?:\.weight)?$")  # all in one tensor
_EXPERTS_PART = re.compile(r"\.experts\.\d+\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<kind>weight)$")
_DENSE = re.compile(
    r"\.(?:self_attn\.(?P<attention>[qkvo]_proj)|mlp\.(?P<mlp>gate_proj|up_proj|down_proj))\.(?P<kind>weight|bias)$"
)
_VOCAB = re.compile(r"^(?:model\.|language_model\.model\.|model\.language_model\.|language_model\.)?"
                    r"(?P<name>embed_tokens|lm_head)\.weight$")  # fmt: skip
_LAST_NORM = re.compile(r"^(?:model\.|language_model\.model\.|model\.language_model\.)norm\.weight$")
_ROWS_ARE_OUTPUTS = frozenset({"q_proj", "gate_proj", "up_proj", "w1", "w3"})
_COLUMNS_ARE_INPUTS = frozenset({"o_proj", "down_proj", "w2"})
_VOCAB_MULTIPLE = 64  # vLLM pads a vocabulary's rows to a multiple of this

# Limits for validating values that a process reports.
RankCount = Annotated[int, Interval(ge=1, lt=2**31)]
RankNumber = Annotated[int, Interval(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The part of the weights that an engine's peer needs: all weights, or the weights that its ranks of TP, PP and EP
    load. A tensor whose division cannot be determined is needed whole."""

    tp: RankCount = 1
    tp_ranks: tuple[RankNumber, ...] = (0,)
    pp: RankCount = 1
    pp_ranks: tuple[RankNumber, ...] = (0,)
    ep: RankCount = 1
    ep_ranks: tuple[RankNumber, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            size, ranks = getattr(self, name), getattr(self, f"{name}_ranks")
            if size < 1 or not ranks or not all(0 <= rank < size for rank in ranks):
                raise ValueError(
                    f"{name}_ranks must contain at least one rank, all >= 0 and less than {name} ({size}), got {ranks}"
                )


def needed_boxes(shapes: Shapes, share: EngineShare) -> dict[str, tuple[Box, ...]]:
    """Return, for each tensor, the boxes that any rank of the share loads. Tensors that no rank loads are omitted."""
    tp, pp, ep = share.tp, share.pp, share.ep
    stage_of_layer = _stages(shapes, pp)
    expert_counts = _experts(shapes)
    found: dict[str, tuple[Box, ...]] = {}
    for name, shape in shapes.items():
        whole = tuple((0, length) for length in shape)
        if pp > 1 and not _is_on(name, set(share.pp_ranks), pp, stage_of_layer):
            continue
        if ep > 1 and ".experts." in name:
            boxes = _of_experts(name, whole, expert_counts, ep, share.ep_ranks)
        else:
            axis, ranges = _divided(name, shape, shapes, tp, share.tp_ranks)
            boxes = [whole] if axis is None else [(*whole[:axis], each, *whole[axis + 1 :]) for each in ranges]
        if boxes:
            found[name] = tuple(boxes)
    return found


def _stages(shapes: Shapes, pp: int) -> tuple[int, ...]:
    """Return the pipeline stage of each layer, or an empty tuple if the layers cannot be counted."""
    layers, drafts = set(), set()
    for name in shapes:
        if match := _LAYER.match(name):
            layers.add(int(match[1]))
            if _DRAFT.search(name):
                drafts.add(int(match[1]))
    layers -= drafts
    return vllm_stages(len(layers), pp) if layers == set(range(len(layers))) else ()


def _is_on(name: str, stages: set[int], pp: int, stage_of_layer: tuple[int, ...]) -> bool:
    if match := _LAYER.match(name):
        layer = int(match[1])
        return layer >= len(stage_of_layer) or stage_of_layer[layer] in stages
    if match := _VOCAB.match(name):
        return pp - 1 in stages or (match["name"] == "embed_tokens" and 0 in stages)
    return pp - 1 in stages or not _LAST_NORM.match(name)


def _experts(shapes: Shapes) -> dict[str, int]:
    """Return the number of experts, by the part of the tensor name before the expert's number."""
    counts: dict[str, int] = {}
    for name in shapes:
        if match := _EXPERT.search(name):
            before = name[: match.start()]
            counts[before] = max(counts.get(before, 0), int(match[1]) + 1)
    return counts


def _of_experts(name: str, whole: Box, counts: Mapping[str, int], ep: int, ranks: Iterable[int]) -> list[Box]:
    """Return the boxes of an expert tensor that the ranks load. Each rank loads consecutive experts. If the experts do
    not divide evenly, the first ranks load one more."""
    if match := _EXPERT.search(name):
        own = _even_experts(counts[name[: match.start()]], ep, ranks)
        return [whole] if any(first <= int(match[1]) < last for first, last in own) else []
    if _EXPERTS.search(name) and len(whole) == 3:
        return [(each, *whole[1:]) for each in _even_experts(whole[0][1], ep, ranks)]
    return [whole]


def _even_experts(count: int, ep: int, ranks: Iterable[int]) -> list[Range]:
    each, more = divmod(count, ep)
    starts = {rank: rank * each + min(rank, more) for rank in sorted(set(ranks))}
    return _joined((first, first + each + (rank < more)) for rank, first in starts.items())


def _divided(
    name: str, shape: tuple[int, ...], shapes: Shapes, tp: int, ranks: Sequence[int]
) -> tuple[int | None, list[Range]]:
    """Return the axis that TP divides, and the ranges on this axis that the ranks load. The axis is None if every rank
    loads the whole tensor."""
    if tp == 1:
        return None, []
    if _VOCAB.match(name) and len(shape) == 2:
        rows = -(-shape[0] // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if rows % tp:
            return None, []
        own = [(rank * rows // tp, (rank + 1) * rows // tp) for rank in sorted(set(ranks))]
        return 0, _joined((first, min(last, shape[0])) for first, last in own)
    match = _DENSE.search(name) or _EXPERTS_PART.search(name)
    if match is None:
        return None, []
    part = match.groupdict().get("attention") or match.groupdict().get("mlp") or match.groupdict().get("part")
    axis, of, copies = 0, tp, 1
    if part in _COLUMNS_ARE_INPUTS:
        axis = 1
    elif part not in _ROWS_ARE_OUTPUTS:
        heads = _kv_heads(name, shape, shapes)
        if not heads or (heads % tp and tp % heads):
            return None, []
        of, copies = min(heads, tp), max(1, tp // heads)
    if axis >= len(shape) or len(shape) > 2 or shape[axis] % of:
        return None, []
    each = shape[axis] // of
    return axis, _joined((rank // copies * each, (rank // copies + 1) * each) for rank in sorted(set(ranks)))


def _kv_heads(name: str, shape: tuple[int, ...], shapes: Shapes) -> int:
    """Return the number of KV heads, or 0 if it is unknown. The number is derived from the head size, which is the
    length of the norm of the keys. Without this norm, the number of rows is returned if there are as many KV heads as
    query heads: TP then divides the rows evenly, whatever the number of heads. If there are fewer KV heads, their
    number must be known, because vLLM copies heads if there are fewer heads than ranks."""
    before = name[: name.rindex(".self_attn.") + len(".self_attn.")]
    norm = shapes.get(f"{before}k_norm.weight")
    if norm is not None and len(norm) == 1 and shape[0] % norm[0] == 0:
        return shape[0] // norm[0]
    query = shapes.get(f"{before}q_proj.{name.rsplit('.', 1)[1]}")
    return shape[0] if query == shape else 0


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges with adjacent ranges joined, without empty or duplicate ranges."""
    found = ByteRanges((first, last - first) for first, last in ranges)
    return [(first, first + size) for first, size in found.ranges]
