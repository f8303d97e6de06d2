"""KV between instances: shares of GPUs in closed form, and computing again where that is sooner."""

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.kv_moves import Home, KvWish, kv_flows, move_kv
from planner.cost.profile import Parallelism

SERVERS = Servers(8)
KV_BYTES = 1e5  # of a token
SLOW, QUICK = 1.0, 1e12  # tokens/s that are prefilled


def fabric(nic_gbps: float = 200.0) -> SimulatedFabric:
    return build("fat_tree", Servers(8, nic_gbps=nic_gbps), servers_per_pod=4)


def home(first: int, parallelism: Parallelism) -> Home:
    return Home(parallelism, np.arange(first, first + parallelism.gpus))


TP8, TP4, TP2 = (Parallelism(tp=tp) for tp in (8, 4, 2))
AFD = Parallelism(attention_gpus=8, ffn_gpus=8, micro_batches=2)


def test_each_gpu_sends_the_heads_it_has_to_whoever_gets_them() -> None:
    flows = kv_flows([home(0, TP2), home(8, TP4)], [KvWish(0, 1, 100)], KV_BYTES)
    assert list(zip(flows.src.tolist(), flows.dst.tolist(), strict=True)) == [(0, 8), (0, 9), (1, 10), (1, 11)]
    np.testing.assert_allclose(flows.bytes, 100 * KV_BYTES / 4)


@pytest.mark.parametrize("source", [TP2, TP8, AFD])
@pytest.mark.parametrize("destination", [TP2, TP8, Parallelism(tp=1, dp=4, ep=4)])
def test_all_bytes_go_once(source: Parallelism, destination: Parallelism) -> None:
    wishes = [KvWish(0, 1, tokens) for tokens in (100, 200, 300, 400)]
    flows = kv_flows([home(0, source), home(32, destination)], wishes, KV_BYTES)
    assert flows.bytes.sum() == pytest.approx(1000 * KV_BYTES)


def test_attention_gpus_alone_hold_kv() -> None:
    flows = kv_flows([home(0, AFD), home(16, TP8)], [KvWish(0, 1, 100)] * 16, KV_BYTES)
    assert set(flows.src.tolist()) == set(range(8))


def test_what_stays_on_its_gpu_is_not_sent() -> None:
    flows = kv_flows([home(0, TP8), home(0, TP8)], [KvWish(0, 1, 100)], KV_BYTES)
    assert not len(flows)


def test_kv_takes_what_its_nics_take() -> None:
    moved = move_kv([home(0, TP8), home(8, TP8)], [KvWish(0, 1, 10_000)], KV_BYTES, np.full(2, SLOW), fabric())
    assert moved.transferred == (True,)
    assert moved.seconds == pytest.approx(1e9 / (8 * SERVERS.nic_bytes_per_s), rel=0.01)
    assert moved.bytes == pytest.approx(1e9)


def test_faster_nics_are_never_slower() -> None:
    homes = [home(0, AFD), home(16, TP8), home(24, TP8)]
    wishes = [KvWish(0, 1 + number % 2, 1000 * number + 1) for number in range(10)]
    slow, fast = (move_kv(homes, wishes, KV_BYTES, np.full(3, SLOW), fabric(gbps)).seconds for gbps in (100.0, 400.0))
    assert fast < slow


def test_what_is_computed_sooner_is_computed_again() -> None:
    rates = np.array([SLOW, QUICK, SLOW])
    wishes = [KvWish(0, 1, 10_000), KvWish(0, 2, 10_000)]
    moved = move_kv([home(0, TP8), home(8, TP8), home(16, TP8)], wishes, KV_BYTES, rates, fabric())
    assert moved.transferred == (False, True)
    assert moved.recomputed_tokens == 10_000
    assert moved.bytes == pytest.approx(1e9)
    # Alone on its way, it has the sender's NICs to itself.
    assert moved.ready_s[2] == pytest.approx(1e9 / (8 * SERVERS.nic_bytes_per_s), rel=0.01)


def test_nothing_to_move_takes_no_time() -> None:
    moved = move_kv([home(0, TP8), home(8, TP8)], [], KV_BYTES, np.full(2, SLOW), fabric())
    assert (moved.seconds, moved.bytes, moved.transferred) == (0.0, 0.0, ())
