"""Name the parameters of a model, and describe how parallelism divides each parameter. Has no side effects.

Coordinates are those of the whole tensor in vLLM's order, without padding. Fused parameters are concatenated ([q; k;
v], [gate; up]), and experts are the first axis. Trainers may use another order (`layout.py`).
"""

from dataclasses import dataclass, replace
from typing import Literal

Box = tuple[tuple[int, int], ...]  # (from, to) of each axis
Where = int | Literal["first", "last", "both"]  # a layer's number, or the first or last stage


def overlap(one: Box, other: Box) -> Box | None:
    """Return the box of elements that both boxes of a tensor share, or None if they share no element."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(first < last for first, last in box) else None


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One tensor of a fused parameter. If TP exceeds the tensor's number of `heads`, heads are copied to several ranks.
    If `heads` is 0, the tensor has no heads."""

    name: str
    length: int  # along the divided axis
    heads: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.heads < 0 or (self.heads and self.length % self.heads):
            raise ValueError(
                f"{self.name}: length must be a multiple of the number of heads ({self.heads}), got {self.length}"
            )


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """The division of a parameter by TP, and whether its first axis enumerates experts. If `axis` is None, every rank
    has the whole parameter."""

    axis: int | None
    parts: tuple[FusedPart, ...] = ()  # concatenated along that axis; each is divided separately
    is_vocab: bool = False  # its rows are padded before division
    has_experts: bool = False

    def __post_init__(self) -> None:
        if self.parts and self.axis is None:
            raise ValueError("axis must be set for a fused parameter, got None")


REPLICATED = ParameterSplit(None)
COLUMN = ParameterSplit(0)  # [out, in]: outputs are divided; also for biases and other 1-D parameters
ROW = ParameterSplit(1)  # [out, in]: inputs are divided
VOCAB = ParameterSplit(0, is_vocab=True)


def qkv(heads: int, kv_heads: int, head_size: int) -> ParameterSplit:
    """Return the split of grouped-query attention, in which `heads / kv_heads` query heads share each KV head. Raises
    ValueError if `heads` is not a multiple of `kv_heads`."""
    if heads % kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of KV heads ({kv_heads}), got {heads}"
        )
    kv = kv_heads * head_size
    query = FusedPart("q_proj", heads * head_size, heads)
    return ParameterSplit(0, (query, FusedPart("k_proj", kv, kv_heads), FusedPart("v_proj", kv, kv_heads)))


def gate_up(intermediate: int) -> ParameterSplit:
    return ParameterSplit(0, (FusedPart("gate_proj", intermediate), FusedPart("up_proj", intermediate)))


def experts(split: ParameterSplit) -> ParameterSplit:
    """Return the split of a stack of experts: `split` for each expert, with the expert as an additional first axis."""
    return replace(split, axis=None if split.axis is None else split.axis + 1, has_experts=True)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str  # in vLLM
    shape: tuple[int, ...]  # elements of the whole tensor, without padding
    dtype_bytes: int
    split: ParameterSplit
    where: Where

    def __post_init__(self) -> None:
        axis = self.split.axis
        if self.dtype_bytes < 1:
            raise ValueError(f"{self.name}: dtype_bytes must be >= 1, got {self.dtype_bytes}")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"{self.name}: every axis must be >= 1, got {self.shape}")
        if axis is not None and axis >= len(self.shape):
            raise ValueError(f"{self.name}: axis must be less than the number of axes ({len(self.shape)}), got {axis}")
        if axis is not None and self.split.parts and sum(part.length for part in self.split.parts) != self.shape[axis]:
            raise ValueError(
                f"{self.name}: the lengths of its parts must add up to {self.shape[axis]},"
                f" got {sum(part.length for part in self.split.parts)}"
            )


@dataclass(frozen=True, slots=True)
class TransformerParameters:
    """The dimensions of a decoder such as Llama's or Qwen's, from which its parameters are derived."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int  # of the MLP, or of one expert
    vocab: int
    experts: int = 0  # 0: dense
    dtype_bytes: int = 2
    is_tied: bool = False  # the output head shares the embedding
    has_qkv_bias: bool = False
    has_qk_norm: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        last = () if self.is_tied else (self._of("lm_head.weight", (self.vocab, self.hidden), VOCAB, "last"),)
        return (
            self._of(
                "model.embed_tokens.weight", (self.vocab, self.hidden), VOCAB, "both" if self.is_tied else "first"
            ),
            *(each for layer in range(self.layers) for each in self._layer(layer)),
            self._of("model.norm.weight", (self.hidden,), REPLICATED, "last"),
            *last,
        )

    def _layer(self, layer: int) -> list[Parameter]:
        attention = qkv(self.heads, self.kv_heads, self.head_size)
        rows = sum(part.length for part in attention.parts)
        named: list[tuple[str, tuple[int, ...], ParameterSplit]] = [
            ("input_layernorm.weight", (self.hidden,), REPLICATED),
            ("self_attn.qkv_proj.weight", (rows, self.hidden), attention),
            ("self_attn.o_proj.weight", (self.hidden, self.heads * self.head_size), ROW),
            ("post_attention_layernorm.weight", (self.hidden,), REPLICATED),
        ]
        if self.has_qkv_bias:
            named.append(("self_attn.qkv_proj.bias", (rows,), attention))
        if self.has_qk_norm:
            named += [(f"self_attn.{each}_norm.weight", (self.head_size,), REPLICATED) for each in "qk"]
        up, down = (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)
        if self.experts:
            named += [
                ("mlp.gate.weight", (self.experts, self.hidden), REPLICATED),
                ("mlp.experts.w13_weight", (self.experts, *up), experts(gate_up(self.intermediate))),
                ("mlp.experts.w2_weight", (self.experts, *down), experts(ROW)),
            ]
        else:
            named += [("mlp.gate_up_proj.weight", up, gate_up(self.intermediate)), ("mlp.down_proj.weight", down, ROW)]
        return [self._of(f"model.layers.{layer}.{name}", shape, split, layer) for name, shape, split in named]

    def _of(self, name: str, shape: tuple[int, ...], split: ParameterSplit, where: Where) -> Parameter:
        return Parameter(name, shape, self.dtype_bytes, split, where)


_MEGATRON = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.qkv_proj.weight": "self_attention.linear_qkv.weight",
    "self_attn.qkv_proj.bias": "self_attention.linear_qkv.bias",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate_up_proj.weight": "mlp.linear_fc1.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.w13_weight": "mlp.experts.linear_fc1.weight",
    "mlp.experts.w2_weight": "mlp.experts.linear_fc2.weight",
}


def megatron_name(name: str) -> str:
    """Return Megatron-core's name for vLLM's parameter `name`. For parameters of experts, the expert's number at the
    end of the name is left out. Raises KeyError if the parameter is unknown."""
    prefix, within = "model.layers.", name
    if not name.startswith(prefix):
        return _MEGATRON[name]
    layer, within = name.removeprefix(prefix).split(".", 1)
    return f"decoder.layers.{layer}.{_MEGATRON[within]}"
