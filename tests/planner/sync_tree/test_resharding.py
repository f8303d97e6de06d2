"""Test resharding against brute force: every rank's tensor is built from numbers as Megatron and vLLM would build it,
shards are carried by their slices, and the result is compared element by element."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_checker import check
from sync_sites import answer_of, problem_of, regular

from planner.sync_tree.layout import EngineLayout, LocalShard, TrainerLayout, megatron_stages, vllm_stages
from planner.sync_tree.parameters import (
    Box,
    Parameter,
    ParameterSplit,
    TransformerParameters,
    megatron_name,
)
from planner.sync_tree.plan import make_plan
from planner.sync_tree.reshard import reshard, reshard_boxes

Array = np.ndarray[Any, Any]
seeds = st.integers(0, 2**32)


@dataclass(frozen=True)
class Case:
    model: TransformerParameters
    trainer: TrainerLayout
    engines: tuple[EngineLayout, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.model.parameters()


def case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([1, 2]) * (4 // kv_heads)
    experts = rng.choice([0, 0, 4, 8])
    layers = rng.choice([2, 4])
    model = TransformerParameters(
        layers=layers,
        hidden=rng.choice([8, 12]),
        heads=heads,
        kv_heads=kv_heads,
        head_size=4,
        intermediate=16,
        vocab=rng.choice([29, 64, 70]),
        experts=experts,
        dtype_bytes=rng.choice([1, 2, 4]),
        is_tied=rng.random() < 0.3,
        has_qkv_bias=rng.random() < 0.5,
        has_qk_norm=rng.random() < 0.5,
    )
    trainer = _trainer(rng, layers, bool(experts))
    # engines on other GPUs, or on the trainer's
    first = rng.choice([0, len(trainer.endpoints) // 2, len(trainer.endpoints)])
    engines = []
    for _ in range(rng.randint(1, 3)):
        engines.append(_engine(rng, layers, bool(experts), first))
        first += len(engines[-1].endpoints)
    return Case(model, trainer, tuple(engines))


def _trainer(rng: random.Random, layers: int, has_experts: bool) -> TrainerLayout:
    tp, pp, replicas = rng.choice([1, 2, 4]), rng.choice([1, 1, 2]), rng.choice([1, 2])
    width = tp * replicas
    ep, expert_tp = tp, 1
    if has_experts and rng.random() < 0.5:
        ep, expert_tp = rng.choice([(e, t) for e in (1, 2, 4) for t in (1, 2) if width % (e * t) == 0])
    return TrainerLayout(
        tuple(range(width * pp)),
        tp=tp,
        pp=pp,
        replicas=replicas,
        ep=ep,
        expert_tp=expert_tp,
        vocab_multiple=8 * tp,
        stage_of_layer=megatron_stages(layers, pp, rng.choice([1, 2]) if layers == 4 else 1),
    )


def _engine(rng: random.Random, layers: int, has_experts: bool, first: int) -> EngineLayout:
    tp, pp, dp = rng.choice([1, 2, 4]), rng.choice([1, 1, 2]), rng.choice([1, 2]) if has_experts else 1
    return EngineLayout(
        tuple(range(first, first + tp * pp * dp)),
        tp=tp,
        pp=pp,
        dp=dp,
        has_expert_parallel=rng.random() < 0.5,
        vocab_multiple=rng.choice([4, 64]),
        stage_of_layer=vllm_stages(layers, pp),
    )


# The oracle: tensors as the frameworks build them, from numbers that identify each element.


def whole(parameter: Parameter) -> Array:
    return np.arange(math.prod(parameter.shape)).reshape(parameter.shape)


def _even(tensor: Array, rank: int, of: int, axis: int) -> Array:
    return np.split(tensor, of, axis=axis)[rank]


def _padded_vocab(tensor: Array, rank: int, of: int, multiple: int) -> Array:
    padding = -len(tensor) % multiple
    return _even(np.concatenate([tensor, np.full((padding, *tensor.shape[1:]), -1)]), rank, of, 0)


def _parts(tensor: Array, split: ParameterSplit) -> list[Array]:
    assert split.axis is not None
    return np.split(tensor, np.cumsum([part.length for part in split.parts])[:-1], axis=split.axis)


def in_engine(model: TransformerParameters, engine: EngineLayout, parameter: Parameter, rank: int) -> list[Array]:
    """Return what vLLM's loaders would place there; -1 is padding."""
    grid = np.arange(len(engine.endpoints)).reshape(engine.dp, engine.pp, engine.tp)
    dp, stage, tp = (int(each[0]) for each in np.nonzero(grid == rank))
    tensor, split, name = whole(parameter), parameter.split, parameter.name
    if isinstance(parameter.where, int):
        if engine.pp > 1 and engine.stage_of_layer[parameter.where] != stage:
            return []
    elif stage not in {"first": {0}, "last": {engine.pp - 1}, "both": {0, engine.pp - 1}}[parameter.where]:
        return []
    if split.is_vocab:
        return [_padded_vocab(tensor, tp, engine.tp, engine.vocab_multiple)]
    of = engine.tp
    if ".experts." in name:
        of, number = engine.dp * engine.tp, dp * engine.tp + tp
        if engine.has_expert_parallel:
            return [np.array_split(tensor, of)[number]]
        tp = number
        if "w13" in name:
            return [np.concatenate([_even(each, tp, of, 1) for each in _parts(tensor, split)], axis=1)]
        return [_even(tensor, tp, of, 2)]
    if "qkv_proj" in name:
        q, k, v = _parts(tensor, split)
        if of > model.kv_heads:
            copies = of // model.kv_heads
            kv = [_even(each, tp // copies, model.kv_heads, 0) for each in (k, v)]
        else:
            kv = [_even(each, tp, of, 0) for each in (k, v)]
        return [np.concatenate([_even(q, tp, of, 0), *kv])]
    if "gate_up" in name:
        return [np.concatenate([_even(each, tp, of, 0) for each in _parts(tensor, split)])]
    if "o_proj" in name or "down_proj" in name:
        return [_even(tensor, tp, of, 1)]
    return [tensor]


def in_trainer(model: TransformerParameters, trainer: TrainerLayout, parameter: Parameter, rank: int) -> list[Array]:
    grid = np.arange(len(trainer.endpoints)).reshape(trainer.pp, trainer.replicas, trainer.tp)
    stage, _, tp = (int(each[0]) for each in np.nonzero(grid == rank))
    tensor, split, of = whole(parameter), parameter.split, trainer.tp
    if isinstance(parameter.where, int):
        if trainer.stage_of_layer[parameter.where] != stage:
            return []
    elif stage not in {"first": {0}, "last": {trainer.pp - 1}, "both": {0, trainer.pp - 1}}[parameter.where]:
        return []
    if split.has_experts:
        experts = np.arange(len(trainer.endpoints)).reshape(trainer.pp, -1, trainer.ep, trainer.expert_tp)
        _, _, ep, tp = (int(each[0]) for each in np.nonzero(experts == rank))
        tensor, of = _even(tensor, ep, trainer.ep, 0), trainer.expert_tp
    if split.is_vocab:
        return [_padded_vocab(tensor, tp, of, trainer.vocab_multiple)]
    if "qkv_proj" in parameter.name:
        grouped = [each.reshape(model.kv_heads, -1, *tensor.shape[1:]) for each in _parts(tensor, split)]
        return [_even(np.concatenate(grouped, axis=1).reshape(tensor.shape), tp, of, 0)]
    if split.parts:
        axis = split.axis or 0
        return [np.concatenate([_even(each, tp, of, axis) for each in _parts(tensor, split)], axis=axis)]
    return [tensor if split.axis is None else _even(tensor, tp, of, split.axis)]


def places(local: LocalShard, box: Box) -> Iterator[tuple[Box, Box]]:
    """Return where parts of a box of the whole tensor are: in this tensor, and in the box."""
    at = 0
    for own in local.boxes:
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, box, strict=True))
        if all(first < last for first, last in common):
            start = tuple(at - a if axis == local.axis else -a for axis, (a, _) in enumerate(own))
            here = tuple((first + by, last + by) for (first, last), by in zip(common, start, strict=True))
            yield here, tuple((first - a, last - a) for (first, last), (a, _) in zip(common, box, strict=True))
        at += own[local.axis][1] - own[local.axis][0]


def gathered(local: LocalShard, tensor: Array) -> Array:
    return np.concatenate([tensor[_at(box)] for box in local.boxes], axis=local.axis)


def _at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in box)


def tensors(case: Case) -> Iterator[tuple[bool, Parameter, int, tuple[LocalShard, ...], list[Array]]]:
    """Yield for every rank: whether it trains, the parameter, the endpoint, the layout's shards, and the oracle's
    tensor."""
    for parameter in case.parameters:
        for rank, end in enumerate(case.trainer.endpoints):
            found = in_trainer(case.model, case.trainer, parameter, rank)
            yield True, parameter, end, case.trainer.local(parameter, rank), found
        for engine in case.engines:
            for rank, end in enumerate(engine.endpoints):
                found = in_engine(case.model, engine, parameter, rank)
                yield False, parameter, end, engine.local(parameter, rank), found


@given(seeds)
def test_layout_matches_elements_and_order_of_frameworks(seed: int) -> None:
    for _, parameter, _, locals_, arrays in tensors(case(seed)):
        tensor = whole(parameter)
        expected = [array[array >= 0] for array in arrays if (array >= 0).any()]
        assert [gathered(local, tensor).ravel().tolist() for local in locals_] == [each.tolist() for each in expected]


@given(seeds)
def test_each_needed_element_arrives_exactly_once(seed: int) -> None:
    requested = case(seed)
    has: dict[tuple[int, str], set[int]] = defaultdict(set)
    needs: dict[tuple[int, str], set[int]] = defaultdict(set)
    for trains, parameter, end, _, arrays in tensors(requested):
        for array in arrays:
            (has if trains else needs)[end, parameter.name] |= set(array[array >= 0].ravel().tolist())
    parameters = {parameter.name: parameter for parameter in requested.parameters}
    came: Counter[tuple[int, str, int]] = Counter()
    shards = reshard(requested.parameters, requested.trainer, requested.engines)
    for each in shards:
        at = 0
        assert not set(each.shard.holders) & set(each.shard.receivers)
        assert set(each.at_home) <= set(each.shard.holders)
        for piece in each.slices:
            parameter = parameters[piece.parameter]
            elements = set(whole(parameter)[_at(piece.box)].ravel().tolist())
            assert (piece.offset, piece.bytes) == (at, len(elements) * parameter.dtype_bytes)
            at += piece.bytes
            for end in each.shard.holders:
                assert elements <= has[end, piece.parameter]
            for end in (*each.shard.receivers, *each.at_home):
                came.update((end, piece.parameter, element) for element in elements)
        assert at == each.shard.bytes
    assert came == Counter((*key, element) for key, elements in needs.items() for element in elements)
    missing = {key: elements - has[key] for key, elements in needs.items()}
    sent = sum(each.shard.bytes * len(each.shard.receivers) for each in shards)
    assert sent == sum(len(elements) for elements in missing.values()) * requested.model.dtype_bytes
    assert len(shards) == len(kinds(has, needs)), "no fewer shards could do"


@given(seeds)
def test_reshard_boxes_matches_reshard(seed: int) -> None:
    requested = case(seed)
    has: dict[int, dict[str, list[Box]]] = defaultdict(lambda: defaultdict(list))
    needs: dict[int, dict[str, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for trains, parameter, end, locals_, _ in tensors(requested):
        (has if trains else needs)[end][parameter.name] += [box for local in locals_ for box in local.boxes]
    shapes = {each.name: (each.shape, each.dtype_bytes) for each in requested.parameters}
    assert reshard_boxes(shapes, has, needs) == reshard(requested.parameters, requested.trainer, requested.engines)


@given(seeds)
def test_random_boxes_and_scalars_are_carried_element_by_element(seed: int) -> None:
    rng = random.Random(seed)
    shapes = {f"t{number}": tuple(rng.choice([1, 3, 5]) for _ in range(rng.randint(0, 3))) for number in range(3)}
    mappings = [
        {name: [_box(rng, shape) for _ in range(rng.randint(0, 2))] for name, shape in shapes.items()} for _ in range(3)
    ]
    everything = {name: [tuple((0, length) for length in shape)] for name, shape in shapes.items()}
    having = {0: everything} | {end: rng.choice(mappings) for end in rng.sample(range(1, 6), 3)}
    needing = {end: rng.choice(mappings) for end in rng.sample(range(6), 4)}
    has, needs = _elements(shapes, having), _elements(shapes, needing)
    found = reshard_boxes({name: (shape, 2) for name, shape in shapes.items()}, having, needing)
    came: Counter[tuple[int, str, int]] = Counter()
    for each in found:
        at = 0
        for piece in each.slices:
            numbers = np.arange(math.prod(shapes[piece.parameter])).reshape(shapes[piece.parameter])
            elements = numbers[_at(piece.box)].ravel().tolist()
            assert (piece.offset, piece.bytes) == (at, 2 * len(elements))
            at += piece.bytes
            assert all(set(elements) <= has[end, piece.parameter] for end in each.shard.holders)
            for end in (*each.shard.receivers, *each.at_home):
                came.update((end, piece.parameter, element) for element in elements)
        assert at == each.shard.bytes
    assert came == Counter((*key, element) for key, elements in needs.items() for element in elements)
    assert len(found) == len(kinds(has, needs))


def _box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    firsts = [rng.randrange(length) for length in shape]
    return tuple((first, rng.randint(first + 1, length)) for first, length in zip(firsts, shape, strict=True))


def _elements(shapes: dict[str, tuple[int, ...]], boxes: Any) -> dict[tuple[int, str], set[int]]:
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for end, mapping in boxes.items():
        for name, each in mapping.items():
            numbers = np.arange(math.prod(shapes[name])).reshape(shapes[name])
            for box in each:
                found[end, name] |= set(numbers[_at(box)].ravel().tolist())
    return found


def test_missing_elements_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"w: no endpoint holds box \(\(2, 4\),\)"):
        reshard_boxes({"w": ((4,), 2)}, {0: {"w": [((0, 2),)]}}, {1: {"w": [((0, 4),)]}})


def kinds(has: dict[tuple[int, str], set[int]], needs: dict[tuple[int, str], set[int]]) -> set[tuple[Any, Any]]:
    """Return holders and receivers of every needed element."""
    found: dict[tuple[str, int], tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for side, of in enumerate((has, needs)):
        for (end, name), elements in of.items():
            for element in elements:
                found[name, element][side].add(end)
    return {(frozenset(holders), frozenset(needing)) for holders, needing in found.values() if needing}


@given(seeds)
def test_bytes_from_holder_arrive_in_engine_order(seed: int) -> None:
    """The executor's part: buffers are filled from a holder's own tensors alone, and emptied into a receiver's."""
    requested = case(seed)
    sides: dict[bool, dict[tuple[int, str], list[tuple[LocalShard, Array]]]]
    sides = {True: defaultdict(list), False: defaultdict(list)}
    for trains, parameter, end, locals_, arrays in tensors(requested):
        solid = [array for array in arrays if (array >= 0).any()]
        sides[trains][end, parameter.name] += list(zip(locals_, solid, strict=True))
    got = {key: [np.full_like(array, -1) for _, array in each] for key, each in sides[False].items()}
    for each in reshard(requested.parameters, requested.trainer, requested.engines):
        sender = each.shard.holders[len(each.slices) % len(each.shard.holders)]
        for piece in each.slices:
            buffer = np.full([last - first for first, last in piece.box], -1)
            for local, array in sides[True][sender, piece.parameter]:
                for here, there in places(local, piece.box):
                    buffer[_at(there)] = array[_at(here)]
            for end in (*each.shard.receivers, *each.at_home):
                key = end, piece.parameter
                for (local, _), into in zip(sides[False][key], got[key], strict=True):
                    for here, there in places(local, piece.box):
                        into[_at(here)] = buffer[_at(there)]
    for key, arrays in got.items():
        for (_, expected), found in zip(sides[False][key], arrays, strict=True):
            assert (expected == found).all(), key


QWEN3_32B = TransformerParameters(64, 5120, 64, 8, 128, 25600, 151936, has_qk_norm=True)


def engines(first: int, count: int, tp: int) -> list[EngineLayout]:
    return [EngineLayout(tuple(range(first + tp * each, first + tp * (each + 1))), tp=tp) for each in range(count)]


def test_shards_are_few_and_cover_model_bytes() -> None:
    trainer = TrainerLayout(
        tuple(range(64)), tp=8, pp=2, replicas=4, vocab_multiple=1024, stage_of_layer=megatron_stages(64, 2)
    )
    shards = reshard(QWEN3_32B.parameters(), trainer, engines(64, 32, 4))
    assert len(shards) <= 2 * 8 + 2 + 8  # by stage and TP rank, shared by all, and vocabularies with different padding
    total = sum(2 * math.prod(parameter.shape) for parameter in QWEN3_32B.parameters())
    assert sum(each.shard.bytes for each in shards) == total
    assert {end for each in shards for end in each.shard.receivers} == set(range(64, 192))


def test_resharded_version_can_be_planned() -> None:
    """Eight GPUs train with TP 4; two engines of TP 2 are in another PoD."""
    document = regular(1, 1, 8, shards=1, circuits=4)
    model = TransformerParameters(2, 1024, 8, 2, 128, 4096, 32000)
    trainer = TrainerLayout(tuple(range(8)), tp=4, replicas=2, vocab_multiple=512)
    shards = tuple(each.shard for each in reshard(model.parameters(), trainer, engines(8, 2, 2)))
    problem = replace(problem_of(document), shards=shards)
    names = problem.endpoints
    document["shards"] = [
        {
            "id": shard.id,
            "bytes": shard.bytes,
            "holders": [names[end] for end in shard.holders],
            "receivers": [names[end] for end in shard.receivers],
        }
        for shard in shards
    ]
    plan = make_plan(problem)
    check(document, answer_of(problem, plan))
    assert plan.estimate_s <= 1.1 * plan.lower_bound_s


def test_stages_match_vllm_and_megatron() -> None:
    assert [vllm_stages(10, 4).count(stage) for stage in range(4)] == [2, 3, 3, 2]
    assert [vllm_stages(7, 4).count(stage) for stage in range(4)] == [2, 2, 2, 1]
    assert megatron_stages(8, 2, chunks=2) == (0, 0, 1, 1, 0, 0, 1, 1)


def test_parameter_names_map_to_megatron() -> None:
    names = {megatron_name(parameter.name) for parameter in QWEN3_32B.parameters()}
    assert len(names) == len(QWEN3_32B.parameters())
    assert {"embedding.word_embeddings.weight", "decoder.layers.63.self_attention.linear_qkv.weight"} <= names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineLayout((1, 2), tp=4), "need 4 endpoints, got 2"),
        (lambda: EngineLayout((1, 1), tp=2), "a different endpoint"),
        (lambda: EngineLayout((1, 2), pp=2), "stage_of_layer must not be empty"),
        (lambda: TrainerLayout((1, 2), tp=2, ep=3), "a multiple of EP x expert TP .3., got 2"),
        (lambda: megatron_stages(7, 2), "7 layers cannot be divided evenly into 2 stages"),
        (lambda: reshard(QWEN3_32B.parameters(), TrainerLayout((0,)), engines(1, 1, 3)), "cannot be divided by TP 3"),
        (lambda: Parameter("w", (4, 0), 2, ParameterSplit(0), 1), "w: every axis must be >= 1"),
    ],
)
def test_invalid_layouts_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()
