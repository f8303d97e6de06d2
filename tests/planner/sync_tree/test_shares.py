"""Shares derived from tensor names, against layouts with full geometry."""

import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sync_tree.layout import EngineLayout, vllm_stages
from planner.sync_tree.parameters import Box, Parameter, TransformerParameters
from planner.sync_tree.shares import EngineShare, needed_boxes

Shapes = dict[str, tuple[int, ...]]
Elements = dict[str, set[int]]


def checkpoint(parameter: Parameter) -> dict[str, Any]:
    """Split a vLLM parameter into tensors with Hugging Face names, and map each element to its index in the
    parameter."""
    numbers = np.arange(math.prod(parameter.shape)).reshape(parameter.shape)
    name = parameter.name
    if "qkv_proj" in name:
        cuts = np.cumsum([part.length for part in parameter.split.parts])[:-1]
        split = np.split(numbers, cuts)
        return {name.replace("qkv_proj", f"{each}_proj"): part for each, part in zip("qkv", split, strict=True)}
    if "gate_up_proj" in name:
        return dict(zip([name.replace("gate_up", each) for each in ("gate", "up")], np.split(numbers, 2), strict=True))
    before = name.rpartition(".")[0]
    if "w13_weight" in name:
        return {
            f"{before}.{expert}.{each}_proj.weight": part
            for expert, both in enumerate(numbers)
            for each, part in zip(("gate", "up"), np.split(both, 2), strict=True)
        }
    if "w2_weight" in name:
        return {f"{before}.{expert}.down_proj.weight": each for expert, each in enumerate(numbers)}
    return {name: numbers}


def of(boxes: dict[str, tuple[Box, ...]], numbers: dict[str, Any], owner: dict[str, str]) -> Elements:
    found: Elements = defaultdict(set)
    for name, each in boxes.items():
        for box in each:
            found[owner[name]] |= set(numbers[name][tuple(slice(*axis) for axis in box)].ravel().tolist())
    return found


@given(st.integers(0, 2**32))
def test_needed_boxes_cover_layout_with_little_excess(seed: int) -> None:
    rng = random.Random(seed)
    tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    kv_heads = rng.choice([1, 2, 4])
    model = TransformerParameters(
        layers=rng.choice([3, 4, 5]),
        hidden=8,
        heads=rng.choice([4, 8]),
        kv_heads=kv_heads,
        head_size=4,
        intermediate=16,
        vocab=rng.choice([29, 64, 200]),
        experts=rng.choice([0, 4, 6]),
        is_tied=rng.random() < 0.5,
        has_qkv_bias=rng.random() < 0.5,
        has_qk_norm=rng.random() < 0.5,
    )
    has_expert_parallel = bool(model.experts) and rng.random() < 0.5
    layout = EngineLayout(
        tuple(range(tp * pp)),
        tp=tp,
        pp=pp,
        has_expert_parallel=has_expert_parallel,
        stage_of_layer=vllm_stages(model.layers, pp),
    )
    tp_ranks = tuple(rng.sample(range(tp), rng.randint(1, tp)))
    pp_ranks = tuple(rng.sample(range(pp), rng.randint(1, pp)))
    expected: Elements = defaultdict(set)
    owner, numbers = {}, {}
    for parameter in model.parameters():
        flat = np.arange(math.prod(parameter.shape)).reshape(parameter.shape)
        for name, each in checkpoint(parameter).items():
            owner[name], numbers[name] = parameter.name, each
        for rank in (stage * tp + number for stage in pp_ranks for number in tp_ranks):
            for local in layout.local(parameter, rank):
                for box in local.boxes:
                    expected[parameter.name] |= set(flat[tuple(slice(*axis) for axis in box)].ravel().tolist())
    found = of(
        needed_boxes(
            {name: each.shape for name, each in numbers.items()},
            EngineShare(
                tp,
                tp_ranks,
                pp,
                pp_ranks,
                ep=tp if has_expert_parallel else 1,
                ep_ranks=tp_ranks if has_expert_parallel else (0,),
            ),
        ),
        numbers,
        owner,
    )
    is_exact = model.has_qk_norm or model.heads == kv_heads or tp == 1
    for name in owner.values():
        assert expected[name] <= found[name], name
        may_be_more = name == "model.embed_tokens.weight" and not model.is_tied
        if not may_be_more and (is_exact or "qkv_proj" not in name):
            assert expected[name] == found[name], name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("transformer.h.0.attn.c_attn.weight", (8, 24)),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", (8, 2)),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", (8, 8)),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 8)),
        ("model.layers.0.self_attn.k_proj.weight", (8, 8)),
        ("model.layers.0.mlp.up_proj.weight", (9, 8)),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", (8, 8)),
        ("model.visual.blocks.0.attn.qkv.weight", (24, 8)),
        ("model.layers.0.self_attn.o_proj.bias", (8,)),
        ("model.scale", ()),
    ],
)
def test_undetermined_tensors_are_needed_whole(name: str, shape: tuple[int, ...]) -> None:
    assert needed_boxes({name: shape}, EngineShare(tp=4, tp_ranks=(1,))) == {
        name: (tuple((0, each) for each in shape),)
    }


def test_draft_layers_belong_to_no_stage() -> None:
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(5)]
    shapes: Shapes = dict.fromkeys([*names, "model.layers.4.eh_proj.weight"], (8,))
    assert set(needed_boxes(shapes, EngineShare(pp=2, pp_ranks=(0,)))) == {
        *names[:2],
        names[4],
        "model.layers.4.eh_proj.weight",
    }


def test_incomplete_layers_belong_to_no_stage() -> None:
    shapes: Shapes = {"model.layers.3.input_layernorm.weight": (8,), "model.layers.0.input_layernorm.weight": (8,)}
    assert set(needed_boxes(shapes, EngineShare(pp=2, pp_ranks=(1,)))) == set(shapes)


def test_experts_in_one_tensor_are_divided_by_first_axis() -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    assert needed_boxes({name: (6, 4, 8)}, EngineShare(ep=4, ep_ranks=(0, 3))) == {
        name: (((0, 2), (0, 4), (0, 8)), ((5, 6), (0, 4), (0, 8)))
    }
