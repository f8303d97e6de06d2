"""Megatron shards, checked with a model that is cut as by Megatron-core and assembled again from all ranks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.publication import Publication
from orchestrrl.weights.trainer.boxes import to_stage
from orchestrrl.weights.trainer.megatron import MegatronShards, megatron_pieces
from orchestrrl.weights.trainer.staging import ArrayCopies, stage
from planner.model import PeerId
from planner.sync_tree.layout import TrainerLayout, megatron_stages
from planner.sync_tree.parameters import TransformerParameters
from tests.orchestrrl.weights.staged_parts import put_together

Array = np.ndarray[Any, Any]
DENSE = TransformerParameters(4, 16, 8, 4, 4, 24, vocab=50, has_qkv_bias=True)
TIED = replace(DENSE, is_tied=True, has_qk_norm=True, has_qkv_bias=False)
SPARSE = TransformerParameters(4, 16, 8, 4, 4, 12, vocab=50, experts=8, has_qk_norm=True)


def hugging_face(model: TransformerParameters) -> dict[str, Array]:
    """Return the whole model by Hugging Face's names; every element is different."""
    query, kv, hidden = model.heads * model.head_size, model.kv_heads * model.head_size, model.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not model.is_tied:
        shapes["lm_head.weight"] = (model.vocab, hidden)
    for layer in range(model.layers):
        of: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, query),
        }
        for name, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
            of[f"self_attn.{name}.weight"] = (rows, hidden)
            if model.has_qkv_bias:
                of[f"self_attn.{name}.bias"] = (rows,)
        if model.has_qk_norm:
            of |= {f"self_attn.{each}_norm.weight": (model.head_size,) for each in "qk"}
        if model.experts:
            of["mlp.gate.weight"] = (model.experts, hidden)
        for prefix in [f"mlp.experts.{number}" for number in range(model.experts)] or ["mlp"]:
            of |= {f"{prefix}.{name}_proj.weight": (model.intermediate, hidden) for name in ("gate", "up")}
            of[f"{prefix}.down_proj.weight"] = (hidden, model.intermediate)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of.items()}
    whole, at = {}, 1.0
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        whole[name] = np.arange(at, at + count, dtype=np.float32).reshape(shape)
        at += count
    return whole


@dataclass(frozen=True)
class Grid:
    """The ranks that torchrun would start, in Megatron's order: TP varies fastest, then DP, then PP."""

    model: TransformerParameters
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    chunks: int = 1  # pipeline chunks on each stage
    padded_vocab: int = 0
    has_fused_norms: bool = False  # names of Transformer Engine

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> TrainerLayout:
        stages = megatron_stages(self.model.layers, self.pp, self.chunks) if self.pp > 1 else ()
        multiple = self.padded_vocab or 1
        return TrainerLayout(
            tuple(range(self.world)),
            tp=self.tp,
            pp=self.pp,
            replicas=self.dp,
            ep=self.ep,
            stage_of_layer=stages,
            vocab_multiple=multiple,
        )

    def chunks_of(self, rank: int, whole: dict[str, Array]) -> list[dict[str, Array]]:
        """Return a rank's tensors, one mapping per chunk, named and cut as by Megatron-core."""
        model, tp, stage = self.model, rank % self.tp, rank // (self.tp * self.dp)
        rows = -(-model.vocab // self.padded_vocab) * self.padded_vocab if self.padded_vocab else model.vocab
        each = model.layers // (self.pp * self.chunks)
        found = []
        for chunk in range(self.chunks):
            first = (chunk * self.pp + stage) * each
            own: dict[str, Array] = {}
            for number in range(each):
                layer = {
                    name.split(".", 3)[3]: values
                    for name, values in whole.items()
                    if name.startswith(f"model.layers.{first + number}.")
                }
                own |= {f"decoder.layers.{number}.{name}": v for name, v in self._layer(layer, rank).items()}
            is_first, is_last = stage == 0 == chunk, stage == self.pp - 1 and chunk == self.chunks - 1
            if is_first:
                own["embedding.word_embeddings.weight"] = vocabulary(
                    whole["model.embed_tokens.weight"], rows, tp, self.tp
                )
            if is_last:
                own["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
                if not model.is_tied:
                    own["output_layer.weight"] = vocabulary(whole["lm_head.weight"], rows, tp, self.tp)
                elif not is_first:
                    own["output_layer.weight"] = vocabulary(whole["model.embed_tokens.weight"], rows, tp, self.tp)
            found.append(own)
        return found

    def _layer(self, layer: dict[str, Array], rank: int) -> dict[str, Array]:
        model, tp = self.model, rank % self.tp
        own = {"self_attention.linear_proj.weight": np.split(layer["self_attn.o_proj.weight"], self.tp, 1)[tp]}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in layer:
                q, k, v = (layer[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                groups = [
                    np.concatenate(of_group)
                    for of_group in zip(*(np.split(each, model.kv_heads) for each in (q, k, v)), strict=True)
                ]
                own[f"self_attention.linear_qkv.{kind}"] = np.split(np.concatenate(groups), self.tp)[tp]
        norms = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
        own[norms[0] if self.has_fused_norms else "input_layernorm.weight"] = layer["input_layernorm.weight"]
        has_norm_in_mlp = self.has_fused_norms and not model.experts
        own[norms[1] if has_norm_in_mlp else "pre_mlp_layernorm.weight"] = layer["post_attention_layernorm.weight"]
        if model.has_qk_norm:
            own |= {f"self_attention.{each}_layernorm.weight": layer[f"self_attn.{each}_norm.weight"] for each in "qk"}
        if not model.experts:
            own["mlp.linear_fc1.weight"] = gated(layer, "mlp", tp, self.tp)
            own["mlp.linear_fc2.weight"] = np.split(layer["mlp.down_proj.weight"], self.tp, 1)[tp]
            return own
        own["mlp.router.weight"] = layer["mlp.gate.weight"]
        ep = rank % (self.tp * self.dp) % self.ep  # expert TP is 1
        each = model.experts // self.ep
        for number in range(each):
            prefix = f"mlp.experts.{ep * each + number}"
            own |= {
                f"mlp.experts.linear_fc1.weight{number}": gated(layer, prefix, 0, 1),
                f"mlp.experts.linear_fc2.weight{number}": layer[f"{prefix}.down_proj.weight"],
            }
        return own


def gated(layer: dict[str, Array], prefix: str, tp: int, of: int) -> Array:
    return np.concatenate([np.split(layer[f"{prefix}.{name}_proj.weight"], of)[tp] for name in ("gate", "up")])


def vocabulary(whole: Array, rows: int, tp: int, of: int) -> Array:
    padding = np.full((rows - len(whole), whole.shape[1]), -1.0, np.float32)
    return np.split(np.concatenate([whole, padding]), of)[tp]


@pytest.mark.parametrize(
    "grid",
    [
        Grid(DENSE),
        Grid(DENSE, tp=2, has_fused_norms=True),
        Grid(DENSE, tp=4, pp=2, padded_vocab=16),
        Grid(DENSE, pp=2, chunks=2, dp=2),
        Grid(TIED, tp=2, pp=2, padded_vocab=8),
        Grid(TIED, tp=2),
        Grid(SPARSE, dp=4, ep=2),
        Grid(SPARSE, tp=2, pp=2, dp=2, ep=4, has_fused_norms=True),
    ],
    ids=str,
)
def test_parts_of_all_ranks_form_the_whole_model(grid: Grid, tmp_path: Path) -> None:
    whole = hugging_face(grid.model)
    pieces = {
        rank: megatron_pieces(
            grid.chunks_of(rank, whole), MegatronShards(grid.model, grid.layout, rank), lambda values: "F32"
        )
        for rank in range(grid.world)
    }
    hosts = {rank: rank * 2 // grid.world for rank in pieces}  # two hosts
    holders: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
    for rank, own in pieces.items():
        for piece in own:
            holders[hosts[rank]].setdefault(piece.key, []).append(rank)
    said = []
    for rank, own in pieces.items():
        staged = stage(tmp_path, 7, rank, grid.world, to_stage(own, rank, holders[hosts[rank]]), ArrayCopies())
        said.append(Publication(7, rank, grid.world, PeerId(f"p{hosts[rank]}"), staged.tensors, staged.part.boxes))
    got, times = put_together((tmp_path, each) for each in said)
    assert sorted(got) == sorted(whole)
    for name, values in whole.items():
        assert np.array_equal(got[name].view(np.float32), values), name
        assert 1 <= times[name].min() <= times[name].max() <= 2, name  # once per host


def test_names_of_expert_modules_wrappers_and_model_wide_layers() -> None:
    grid = Grid(SPARSE, dp=2, ep=2, pp=2)
    whole = hugging_face(SPARSE)
    rank = 3  # from the second stage
    (chunk,) = grid.chunks_of(rank, whole)
    plain = megatron_pieces([chunk], MegatronShards(SPARSE, grid.layout, rank), lambda values: "F32")
    renamed = {}
    for name, values in chunk.items():
        for fc in ("linear_fc1", "linear_fc2"):
            if f".experts.{fc}.weight" in name:
                prefix, number = name.split(f"{fc}.weight")
                name = f"{prefix}local_experts.{number}.{fc}.weight"
        for layer in (1, 0):
            name = name.replace(f"layers.{layer}.", f"layers.{layer + 2}.")
        renamed[f"module.module.{name}"] = values
    shards = MegatronShards(SPARSE, grid.layout, rank, layers="model")
    again = megatron_pieces([renamed], shards, lambda values: "F32")
    assert [(piece.meta, piece.box) for piece in again] == [(piece.meta, piece.box) for piece in plain]
    assert all(np.array_equal(a.values, b.values) for a, b in zip(again, plain, strict=True))
    with pytest.raises(Permanent, match='layers="model"'):
        megatron_pieces([renamed], replace(shards, layers="stage"), lambda values: "F32")


def test_missing_and_misshapen_tensors_are_reported_together() -> None:
    grid = Grid(DENSE, tp=2)
    (chunk,) = grid.chunks_of(0, hugging_face(DENSE))
    del chunk["decoder.layers.2.mlp.linear_fc1.weight"], chunk["decoder.layers.0.input_layernorm.weight"]
    chunk["decoder.layers.1.self_attention.linear_qkv.weight"] = np.zeros((5, 16), np.float32)
    with pytest.raises(Permanent) as told:
        megatron_pieces([chunk], MegatronShards(DENSE, grid.layout, 0), lambda values: "F32")
    assert "decoder.layers.2.mlp.linear_fc1.weight: is missing" in str(told.value)
    assert "input_layernorm.weight or decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in str(told.value)
    assert "linear_qkv.weight: must have shape (32, 16) by the layout, got (5, 16)" in str(told.value)
    with pytest.raises(ValueError, match=r"less than the layout's number of ranks \(2\)"):
        MegatronShards(DENSE, grid.layout, 2)


def test_rename_maps_names_for_engines() -> None:
    grid = Grid(SPARSE)
    (chunk,) = grid.chunks_of(0, hugging_face(SPARSE))

    def mixtral(name: str) -> str | None:
        return None if name.endswith("_norm.weight") else name.replace("mlp.experts", "block_sparse_moe.experts")

    names = {
        piece.meta.name
        for piece in megatron_pieces([chunk], MegatronShards(SPARSE, grid.layout, 0), lambda values: "F32", mixtral)
    }
    assert "model.layers.0.block_sparse_moe.experts.3.up_proj.weight" in names
    assert not any("q_norm" in name for name in names)
