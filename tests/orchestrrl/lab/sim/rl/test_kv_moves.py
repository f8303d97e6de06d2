"""Tests of KV transfers between instances: shares of GPUs in closed form, and recomputation if it is faster."""

import pytest

from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.generation_fleet import Leaving, OverFabric, Place
from planner.cost.profile import Parallelism
from planner.model import GpuId, RequestId

SERVERS = Servers(8)
KV_BYTES = 1e5  # per token
SLOW, QUICK = 1.0, 1e12  # prefill rates, tokens/s
TP8, TP4, TP2 = (Parallelism(tp=tp) for tp in (8, 4, 2))
AFD = Parallelism(attention_gpus=8, ffn_gpus=8, micro_batches=2)


def over(nic_gbps: float = 200.0) -> OverFabric:
    return OverFabric(build("fat_tree", Servers(8, nic_gbps=nic_gbps), servers_per_pod=4), 0, KV_BYTES)


def home(first: int, parallelism: Parallelism) -> Place:
    return parallelism, tuple(GpuId(gpu) for gpu in range(first, first + parallelism.gpus))


def leaving(
    source: Place, *destinations: Place, tokens: tuple[int, ...], rates: tuple[float, ...] = (SLOW,)
) -> list[Leaving]:
    """Return a request for each of `tokens`, with round-robin destinations and their prefill `rates`."""
    places = [number % len(destinations) for number in range(len(tokens))]
    return [
        Leaving(RequestId(f"r{number}"), source, destinations[place], rates[place % len(rates)], count)
        for number, (place, count) in enumerate(zip(places, tokens, strict=True))
    ]


def test_each_gpu_sends_its_heads_to_their_new_gpus() -> None:
    sent, _ = over().shares(leaving(home(0, TP2), home(8, TP4), tokens=(100,)))
    assert list(zip(sent.src.tolist(), sent.dst.tolist(), strict=True)) == [(0, 8), (0, 9), (1, 10), (1, 11)]
    assert sent.bytes.tolist() == pytest.approx([100 * KV_BYTES / 4] * 4)


@pytest.mark.parametrize("source", [TP2, TP8, AFD])
@pytest.mark.parametrize("destination", [TP2, TP8, Parallelism(tp=1, dp=4, ep=4)])
def test_all_kv_bytes_are_sent_once(source: Parallelism, destination: Parallelism) -> None:
    sent, _ = over().shares(leaving(home(0, source), home(32, destination), tokens=(100, 200, 300, 400)))
    assert sent.bytes.sum() == pytest.approx(1000 * KV_BYTES)


def test_only_attention_gpus_hold_kv() -> None:
    sent, _ = over().shares(leaving(home(0, AFD), home(16, TP8), tokens=(100,) * 16))
    assert set(sent.src.tolist()) == set(range(8))


def test_kv_that_stays_on_its_gpu_is_not_sent() -> None:
    assert not len(over().shares(leaving(home(0, TP8), home(0, TP8), tokens=(100,)))[0])


def test_kv_transfer_is_bound_by_nics() -> None:
    moved = over()(leaving(home(0, TP8), home(8, TP8), tokens=(10_000,)))
    assert moved.transferred == {"r0"}
    assert moved.seconds == pytest.approx(1e9 / (8 * SERVERS.nic_bytes_per_s), rel=0.01)
    assert moved.tier_bytes["nic"] == pytest.approx(2e9)  # up and down


def test_faster_nics_are_never_slower() -> None:
    wishes = leaving(
        home(0, AFD), home(16, TP8), home(24, TP8), tokens=tuple(1000 * number + 1 for number in range(10))
    )
    slow, fast = (over(gbps)(wishes).seconds for gbps in (100.0, 400.0))
    assert fast < slow


def test_kv_is_recomputed_if_that_is_faster() -> None:
    quick, slow = home(8, TP8), home(16, TP8)
    moved = over()(leaving(home(0, TP8), quick, slow, tokens=(10_000, 10_000), rates=(QUICK, SLOW)))
    assert moved.transferred == {"r1"}
    assert moved.tier_bytes["nic"] == pytest.approx(2e9)
    # The only transfer has all NICs of the sender.
    assert moved.ready_s == {slow[1]: pytest.approx(1e9 / (8 * SERVERS.nic_bytes_per_s), rel=0.01)}


def test_no_kv_takes_no_time() -> None:
    moved = over()([])
    assert (moved.seconds, moved.tier_bytes, moved.transferred) == (0.0, {}, frozenset())
