"""The routing strategies, each checked against an independent implementation, and their common properties."""

import dataclasses
from collections import Counter
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.gateway.routing import strategies
from orchestrrl.gateway.routing.strategies import (
    PREFIX_CHARACTERS,
    PREFIX_TOKENS,
    STRATEGIES,
    EngineLoad,
    RoutedRequest,
    RoutingPolicy,
    concurrency_cap,
    fits,
    prefix_of,
    score,
)
from planner.model import EngineId


def load(name: str, running: int = 0, waiting: int = 0, **known: object) -> EngineLoad:
    tokens = {"running_tokens": running * 100, "waiting_tokens": waiting * 100}
    return EngineLoad(EngineId(name), running, waiting, **{**tokens, **known})  # type: ignore[arg-type]


def chosen(
    routing: RoutingPolicy, loads: list[EngineLoad], newcomer: RoutedRequest | int, last: str | None = None
) -> EngineLoad:
    newcomer = RoutedRequest(newcomer) if isinstance(newcomer, int) else newcomer
    found = routing.choose(loads, newcomer, None if last is None else EngineId(last))
    assert found is not None
    return found


def many_loads(least: int = 1, most: int = 6) -> st.SearchStrategy[list[EngineLoad]]:
    return st.lists(
        st.builds(
            EngineLoad,
            id=st.sampled_from([EngineId(name) for name in "abcdefgh"]),
            running=st.integers(0, 50),
            waiting=st.integers(0, 50),
            running_tokens=st.integers(0, 50_000),
            waiting_tokens=st.integers(0, 50_000),
            kv_capacity_tokens=st.sampled_from([0, 100_000]),
            kv_free_tokens=st.integers(-1000, 100_000),
            max_sequences=st.sampled_from([0, 8, 48]),
            seconds_per_token=st.sampled_from([None, 0.001, 0.002]),
            pool=st.sampled_from(["", "h20", "h800"]),
        ),
        min_size=least,
        max_size=most,
        unique_by=lambda load: load.id,
    )


newcomers = st.builds(
    RoutedRequest,
    context_tokens=st.integers(1, 50_000),
    prefix=st.integers(0, 2**64 - 1),
    tag=st.sampled_from(["", "math", "agent"]),
)
routings = st.builds(
    RoutingPolicy,
    policy=st.sampled_from(sorted(STRATEGIES)),
    affinity=st.sampled_from([{}, {"math": "h20"}, {"math": "h20", "agent": "h800"}]),
    slack=st.integers(0, 20),
)


# --- common properties ---


@given(routing=routings, loads=many_loads(least=0), newcomer=newcomers, last=st.sampled_from([None, "a", "d"]))
def test_choice_does_not_depend_on_the_order_of_loads(
    routing: RoutingPolicy, loads: list[EngineLoad], newcomer: RoutedRequest, last: EngineId | None
) -> None:
    choice = routing.choose(loads, newcomer, last)
    assert choice in loads or (choice is None and not loads)
    assert routing.choose(loads[::-1], newcomer, last) == choice


@given(
    policy=st.sampled_from(sorted(STRATEGIES.keys() - {"round_robin"})),
    loads=many_loads(),
    newcomer=newcomers,
)
def test_engine_without_kv_room_is_chosen_only_if_none_has_room(
    policy: str, loads: list[EngineLoad], newcomer: RoutedRequest
) -> None:
    choice = chosen(RoutingPolicy(policy), loads, newcomer)
    assert fits(choice, newcomer.context_tokens) == any(fits(load, newcomer.context_tokens) for load in loads)


def test_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of load_index, least_tokens, prefix_affinity, round_robin, got 'best'"):
        RoutingPolicy("best")


def test_negative_slack_is_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        RoutingPolicy(slack=-1)


# --- load_index ---


def test_unknown_loads_choose_fewest_requests_then_smallest_id() -> None:
    loads = [load("b", 2), load("a", 2), load("c", 1, 1), load("d", 3)]
    assert chosen(RoutingPolicy(), loads, 10).id == "a"


def test_more_seats_and_more_speed_attract_more_requests() -> None:
    wide, narrow = load("wide", 4, max_sequences=48), load("narrow", 3, max_sequences=8)
    assert chosen(RoutingPolicy(), [narrow, wide], 10) is wide
    slow = dataclasses.replace(wide, seconds_per_token=0.1)
    fast = dataclasses.replace(narrow, seconds_per_token=0.001)
    assert chosen(RoutingPolicy(), [slow, fast], 10) is fast


def test_waiting_tokens_count_against_the_room() -> None:
    assert fits(load("a", kv_capacity_tokens=1000, kv_free_tokens=300), 250)
    assert not fits(load("a", waiting=1, kv_capacity_tokens=1000, kv_free_tokens=300), 250)


def mean_and_typical(loads: list[EngineLoad], context_tokens: int) -> tuple[float, float]:
    known = [load.seconds_per_token for load in loads if load.seconds_per_token]
    tokens = sum(load.running_tokens + load.waiting_tokens for load in loads) + context_tokens
    mean = max(1.0, tokens / (sum(load.running + load.waiting for load in loads) + 1))
    return mean, median(known) if known else 1.0


@given(loads=many_loads(), context_tokens=st.integers(1, 50_000))
def test_load_index_choice_is_minimal(loads: list[EngineLoad], context_tokens: int) -> None:
    mean, typical_s = mean_and_typical(loads, context_tokens)

    def key(load: EngineLoad) -> tuple[bool, float, int, str]:
        index = (load.running + load.waiting + 1) / concurrency_cap(load, mean) * (load.seconds_per_token or typical_s)
        return not fits(load, context_tokens), index, load.running + load.waiting, load.id

    assert chosen(RoutingPolicy(), loads, context_tokens) == min(loads, key=key)


@given(loads=many_loads())
def test_concurrency_cap_is_at_least_one_and_bounded(loads: list[EngineLoad]) -> None:
    for load in loads:
        cap = concurrency_cap(load, 100.0)
        assert cap >= 1
        if load.max_sequences:
            assert cap <= load.max_sequences


# --- least_tokens, round_robin ---


def test_least_tokens_weighs_contexts_not_requests() -> None:
    few_long = load("a", 1, running_tokens=9000)
    many_short = load("b", 8, running_tokens=800)
    assert chosen(RoutingPolicy("least_tokens"), [few_long, many_short], 10) is many_short
    assert chosen(RoutingPolicy("load_index"), [few_long, many_short], 10) is few_long


def test_round_robin_takes_turns_and_survives_changes() -> None:
    routing, last, seen = RoutingPolicy("round_robin"), None, []
    three = [load("c"), load("a"), load("b")]
    for loads in (three, three, three, three, three[:2], three[:2]):
        last = chosen(routing, loads, 10, last).id
        seen.append(last)
    assert seen == ["a", "b", "c", "a", "c", "a"]


# --- prefix_affinity ---


def allowed(loads: list[EngineLoad], context_tokens: int, slack: int) -> list[EngineLoad] | None:
    """Return the ids of engines within the load bound; None if an engine is at its edge, where rounding decides."""
    mean, typical_s = mean_and_typical(loads, context_tokens)
    candidates = [load for load in loads if fits(load, context_tokens)] or loads

    def per_request(load: EngineLoad) -> float:
        return (load.seconds_per_token or typical_s) / concurrency_cap(load, mean)

    least = min((load.running + load.waiting + 1) * per_request(load) for load in candidates)
    found = []
    for load in candidates:
        requests = load.running + load.waiting + 1
        most = 1.25 * least / per_request(load) + slack
        if abs(requests - most) < 1e-6:
            return None
        if requests <= most + 1e-6:
            found.append(load)
    return found


@given(loads=many_loads(least=2), newcomer=newcomers)
def test_prefix_affinity_chooses_the_best_ranked_within_the_bound(
    loads: list[EngineLoad], newcomer: RoutedRequest
) -> None:
    expected = allowed(loads, newcomer.context_tokens, slack=4)
    if newcomer.prefix and expected is not None:
        choice = chosen(RoutingPolicy("prefix_affinity", slack=4), loads, newcomer)
        assert choice == max(expected, key=lambda load: score(newcomer.prefix, load.id))


def test_prefix_spills_to_the_same_second_engine_at_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategies, "AFFINITY_SLACK", 0.0)
    routing = RoutingPolicy("prefix_affinity", slack=8)
    counts: Counter[EngineId] = Counter()
    for _ in range(30):
        loads = [load(name, counts[EngineId(name)]) for name in "abcd"]
        counts[chosen(routing, loads, RoutedRequest(100, prefix=12345)).id] += 1
    ranked = sorted("abcd", key=lambda name: score(12345, name), reverse=True)
    # Each is filled up to 8 beyond the least loaded, counting the new request for both. The last one's first request
    # lets the others take one more each.
    assert [counts[EngineId(name)] for name in ranked] == [10, 10, 9, 1]


@given(prefixes=st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=50), gone=st.sampled_from("abcdefgh"))
def test_removed_engine_moves_only_its_own_prefixes(prefixes: list[int], gone: str) -> None:
    routing = RoutingPolicy("prefix_affinity")
    before = [load(name) for name in "abcdefgh"]
    after = [one for one in before if one.id != gone]
    for prefix in prefixes:
        home = chosen(routing, before, RoutedRequest(100, prefix)).id
        moved = chosen(routing, after, RoutedRequest(100, prefix)).id
        assert moved == home or home == gone


def test_prefixes_are_spread_evenly() -> None:
    prefixes = [prefix_of(f"group-{number}", {}) for number in range(4000)]
    homes = Counter(max("abcdefgh", key=lambda name: score(prefix, name)) for prefix in prefixes)
    assert set(homes) == set("abcdefgh")
    # The expected number is 500 each, with a standard deviation of 21.
    assert all(400 < count < 600 for count in homes.values())


def test_prefix_ranking_never_changes() -> None:
    """Gateways of other versions and after restarts must agree, so these numbers must never change."""
    assert prefix_of("g1", {}) == 14934111651356031682
    assert prefix_of("", {"prompt": "What is 2 + 2?"}) == 10153235702229683630
    assert prefix_of("", {"prompt": [1, 2, 3]}) == 7295133460052662141
    assert score(1, "e0") == 10913826579868761931


def test_prefix_is_the_group_or_the_start_of_the_prompt() -> None:
    long = "x" * PREFIX_CHARACTERS
    ids = list(range(PREFIX_TOKENS))
    same = [
        (prefix_of("g", {"prompt": "a"}), prefix_of("g", {"prompt": "b"})),
        (prefix_of("", {"prompt": long + "a"}), prefix_of("", {"prompt": long + "b"})),
        (prefix_of("", {"prompt": [*ids, 1]}), prefix_of("", {"prompt": [*ids, 2]})),
        (prefix_of("", {"messages": [{"content": long}]}), prefix_of("", {"messages": [{"content": long}, {}]})),
    ]
    assert all(one == other != 0 for one, other in same)
    assert len({one for one, _ in same}) == len(same)
    assert prefix_of("", {"prompt": "a"}) != prefix_of("", {"prompt": "b"})
    assert prefix_of("", {"messages": [{"content": "a"}]}) != prefix_of("", {"messages": [{"content": "b"}]})
    assert prefix_of("", {}) == prefix_of("", {"messages": 3}) == 0
    assert prefix_of("", {"messages": [3, {"content": [{"type": "text", "text": "\ud800"}]}]})


# --- hardware affinity ---

AFFINE = RoutingPolicy(affinity={"math": "h20"}, slack=2)


def test_tag_goes_to_its_pool_up_to_the_bound() -> None:
    other, inside = load("a", 0, pool="h800"), load("b", 1, pool="h20")
    assert chosen(AFFINE, [other, inside], RoutedRequest(10, tag="math")) is inside
    assert chosen(AFFINE, [other, inside], RoutedRequest(10, tag="chat")) is other
    full = load("b", 3, pool="h20")
    assert chosen(AFFINE, [other, full], RoutedRequest(10, tag="math")) is other
    assert chosen(AFFINE, [other], RoutedRequest(10, tag="math")) is other


@given(routing=routings, loads=many_loads(), newcomer=newcomers)
def test_strategy_chooses_among_the_engines_of_the_pool(
    routing: RoutingPolicy, loads: list[EngineLoad], newcomer: RoutedRequest
) -> None:
    """Among the pool's engines within the load bound, or among all if there are none."""
    pool = routing.affinity.get(newcomer.tag)
    plain = dataclasses.replace(routing, affinity={})
    candidates = allowed(loads, newcomer.context_tokens, routing.slack)
    if candidates is None:
        return
    narrowed = [load for load in candidates if load.pool == pool] if pool else []
    if all(load.pool == pool for load in loads):
        narrowed = loads  # nothing to narrow
    assert chosen(routing, loads, newcomer) == plain.choose(narrowed or loads, newcomer)
