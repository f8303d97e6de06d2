"""Map a Megatron rank's fused and sharded tensors to pieces of whole tensors under Hugging Face's names.

`linear_qkv` has the rows of one KV group after another. `linear_fc1` of a gated MLP has this rank's rows of the gate
projection, followed by its rows of the up projection. Vocabulary tensors may have padding rows. Layers are numbered
from 0 on each stage, and experts from 0 on each rank. Tensors are not gathered: every piece is a view of the rank's own
tensor. Names are those of Megatron-core's GPTModel, with local layers and with Transformer Engine's layers, in which a
norm is part of the following linear layer.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.trainer.boxes import TensorPiece, shape_of, slices
from planner.sync_tree.layout import LocalShard, TrainerLayout
from planner.sync_tree.parameters import Box, Parameter, TransformerParameters, megatron_name

_NORM_IN_LINEAR = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_EXPERTS = {"w13_weight": "gate_up_proj.weight", "w2_weight": "down_proj.weight"}
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


@dataclass(frozen=True, slots=True)
class MegatronShards:
    """The model, its parallel layout, and the rank whose tensors are published. If `layers` is "stage", the layer
    numbers in names start from 0 on each stage, across its chunks, as in Megatron. If `layers` is "model", the layers
    of the whole model are numbered consecutively."""

    model: TransformerParameters
    layout: TrainerLayout
    rank: int
    layers: Literal["stage", "model"] = "stage"

    def __post_init__(self) -> None:
        ranks = len(self.layout.endpoints)
        if not 0 <= self.rank < ranks:
            raise ValueError(f"rank must be >= 0 and less than the layout's number of ranks ({ranks}), got {self.rank}")


def megatron_pieces(
    chunks: Sequence[Mapping[str, Any]],
    shards: MegatronShards,
    dtype_of: Callable[[Any], str],
    rename: Callable[[str], str | None] = lambda name: name,
) -> list[TensorPiece]:
    """Return the pieces of a rank's tensors. `chunks` has the tensors by Megatron's names, one mapping for each
    pipeline chunk. `dtype_of` returns the dtype in which a tensor is published. `rename` returns the name under which a
    tensor is published, or None to leave the tensor out. Tensors that are not parameters of the model are not
    published. Raises Permanent, listing the tensors, if tensors are missing or have an unexpected shape."""
    named = _through_the_model(chunks, shards)
    faults: list[str] = []
    pieces: list[TensorPiece] = []
    for parameter in shards.model.parameters():
        for local in shards.layout.local(parameter, shards.rank):
            for values, own, whole, name, shape in _blocks_of(parameter, local, shards.model, named, faults):
                if (published := rename(name)) is not None:
                    meta = TensorMeta(published, dtype_of(values), shape)
                    pieces.append(TensorPiece(meta, whole, values[slices(own)]))
    if faults:
        raise Permanent("; ".join(faults))
    return pieces


def _through_the_model(chunks: Sequence[Mapping[str, Any]], shards: MegatronShards) -> dict[str, Any]:
    """Return the tensors of all chunks by name, with the layer numbers of the whole model. Raises Permanent if a layer
    number exceeds the number of layers of the stage."""
    layout = shards.layout
    stage = shards.rank // (len(layout.endpoints) // layout.pp)
    layers = [layer for layer in range(shards.model.layers) if stage in layout.stages(layer)]
    named: dict[str, Any] = {}
    before = 0
    for chunk in chunks:
        highest = -1
        for name, tensor in chunk.items():
            plain = re.sub(r"^(module\.)+", "", name)
            if (match := _LAYER.match(plain)) and shards.layers == "stage":
                number = int(match[2])
                highest = max(highest, number)
                if before + number >= len(layers):
                    raise Permanent(
                        f"{name}: the layer must be less than {len(layers)}, the number of layers of stage {stage}"
                        f" in the layout, got {before + number}; if layers are numbered across the whole model, pass"
                        ' layers="model"'
                    )
                plain = f"{match[1]}{layers[before + number]}{match[3]}"
            named[plain] = tensor
        before += highest + 1
    return named


def _blocks_of(
    parameter: Parameter, local: LocalShard, model: TransformerParameters, named: Mapping[str, Any], faults: list[str]
) -> Iterator[tuple[Any, Box, Box, str, tuple[int, ...]]]:
    """Yield one parameter's boxes on this rank, as (tensor, box in the tensor, box in the published tensor, published
    name, published shape). Adds a fault for each tensor that is missing or has an unexpected shape."""
    tensors = _tensors(parameter, local, model, named, faults)
    skip = 1 if parameter.split.has_experts else 0  # each expert is a tensor of its own here, not an axis
    at = 0
    for box in local.boxes:
        length = box[local.axis][1] - box[local.axis][0]
        corner = tuple(at - a if axis == local.axis else -a for axis, (a, _) in enumerate(box))
        at += length
        for part, start, inner, shape in _parts(parameter, box):
            own = tuple((a + by, b + by) for (a, b), by in zip(inner, corner, strict=True))
            axis = parameter.split.axis
            whole = tuple((a - start, b - start) if each == axis else (a, b) for each, (a, b) in enumerate(inner))
            for expert, tensor in tensors.items():
                yield tensor, own[skip:], whole[skip:], _published(parameter, part, expert), shape[skip:]


def _parts(parameter: Parameter, box: Box) -> Iterator[tuple[str, int, Box, tuple[int, ...]]]:
    """Split a box of a fused parameter into the parameter's parts. Yield (name, start, box, shape) of each part: its
    name, its start on the split axis, its box in the fused parameter, and the shape of the whole part."""
    axis, start = parameter.split.axis, 0
    if axis is None or not parameter.split.parts:
        yield "", 0, box, parameter.shape
        return
    for part in parameter.split.parts:
        first, last = max(box[axis][0], start), min(box[axis][1], start + part.length)
        if first < last:
            shape = (*parameter.shape[:axis], part.length, *parameter.shape[axis + 1 :])
            yield part.name, start, (*box[:axis], (first, last), *box[axis + 1 :]), shape
        start += part.length


def _published(parameter: Parameter, part: str, expert: int) -> str:
    name = parameter.name
    if parameter.split.has_experts:
        prefix, weight = name.rsplit(".", 1)
        name = f"{prefix}.{expert}.{_EXPERTS[weight]}"
    for fused in ("qkv_proj", "gate_up_proj"):
        if part:
            name = name.replace(f".{fused}.", f".{part}.")
    return name


def _tensors(
    parameter: Parameter, local: LocalShard, model: TransformerParameters, named: Mapping[str, Any], faults: list[str]
) -> dict[int, Any]:
    """Return this rank's tensors of a parameter by expert number. For a parameter without experts, the only tensor has
    number 0. Adds a fault for each tensor that is missing or has an unexpected shape."""
    first, last = local.boxes[0][0] if parameter.split.has_experts else (0, 1)
    found = {}
    for number in range(first, last):
        names = _names(parameter, model, number - first)
        there = [name for name in names if name in named]
        if not there:
            faults.append(f"{' or '.join(names)}: is missing")
            continue
        tensor = named[there[0]]
        if fault := _misfit(parameter, local, tuple(tensor.shape)):
            faults.append(f"{there[0]}: {fault}")
            continue
        found[number] = tensor
    return found


def _names(parameter: Parameter, model: TransformerParameters, expert: int) -> list[str]:
    name = megatron_name(parameter.name)
    if parameter.split.has_experts:
        inside = name.replace(".experts.", f".experts.local_experts.{expert}.")
        return [f"{name}{expert}", inside]
    names = [name]
    for apart, within in _NORM_IN_LINEAR.items():
        if name.endswith(f".{apart}"):
            names.append(name.removesuffix(apart) + within)
    if model.is_tied and parameter.name == "model.embed_tokens.weight":
        names.append(megatron_name("lm_head.weight"))  # the last stage has its own copy
    return names


def _misfit(parameter: Parameter, local: LocalShard, shape: tuple[int, ...]) -> str:
    expected = list(shape_of(local.boxes[0]))
    expected[local.axis] = sum(box[local.axis][1] - box[local.axis][0] for box in local.boxes)
    if parameter.split.has_experts:
        expected = expected[1:]
    fits = shape == tuple(expected)
    if parameter.split.is_vocab and len(shape) == len(expected):  # it may have padding rows
        fits = shape[0] >= expected[0] and shape[1:] == tuple(expected[1:])
    return "" if fits else f"must have shape {tuple(expected)} by the layout, got {shape}"
