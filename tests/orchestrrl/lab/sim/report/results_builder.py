"""Builders of small results for tests of the report, in which every number is different."""

from dataclasses import replace
from typing import Any

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.model import RlRun, TimelineSpan
from orchestrrl.lab.sim.rl.results import Bill, ClusterResult
from orchestrrl.lab.sim.train.model import OverlapWindow

SCENARIO = {"name": "made up", "seeds": [1, 2], "model": "qwen2.5-14b", "cluster": {"train_gpus": 32}}


def run(fabric: str = "rfabric", arm: str = "both", seed: int = 1, rate: float = 40.0) -> RlRun:
    return RlRun(
        fabric=fabric,
        arm=arm,
        seed=seed,
        seconds=300.5,
        samples=12288,
        samples_per_s=rate + seed,
        spans=(
            TimelineSpan("gen", FabricStage.GEN, 0, 0.0, 100.0, "with version 0"),
            TimelineSpan("gen", FabricStage.GEN, 1, 100.0, 210.0, "with version 0"),
            TimelineSpan("train", FabricStage.TRAIN, 0, 100.0, 180.0, "to version 1"),
            TimelineSpan("sync", FabricStage.WEIGHT_SYNC, 1, 210.0, 216.5, "version 1"),
            TimelineSpan("fault", FabricStage.TRAIN, 0, 50.0, 70.0, "tor 3"),
        ),
        steps=(
            {"gen_s": 100.0, "train_s": 80.0, "sync_s": 0.0},
            {"gen_s": 110.0, "train_s": 0.0, "sync_s": 6.5},
        ),
        staleness={0: 1024, 1: 3072},
        idle_share={FabricStage.TRAIN: 0.25, FabricStage.GEN: 0.125},
        tier_bytes={"train": {"nvlink": 8e12, "nic": 2e12}},
        windows=tuple(OverlapWindow(float(at), at + 0.001 * 2**at, "dp", "dp") for at in range(8)),
        remaining=((0.0, 1024), (40.0, 500), (110.0, 0)),
        notes=("weight sync to 4 x tp8",),
    )


def result(network_usd: float = 1.5e6, scenario: dict[str, Any] = SCENARIO, **of_run: Any) -> ClusterResult:
    return ClusterResult(
        scenario=scenario,
        run=run(**of_run),
        bill=Bill(network_usd, {"nics": network_usd / 3, "transceivers": network_usd * 2 / 3}),
        train_parts_s={"compute": 60.0, "bubble": 12.0, "dp": 8.0},
        train_mfu=0.41,
        gen_phases_s={"afd24+16": 70.0, "tp8": 40.0},
        sync_phases_s={"circuits": 0.5, "phase A": 4.0, "phase B": 2.0},
    )


def bare(**changes: Any) -> ClusterResult:
    """Return a result without any data."""
    empty = RlRun("", "", 1, 0.0, 0, 0.0, (), (), {}, {})
    return ClusterResult(replace(empty, **changes), Bill(0.0))


def several() -> list[ClusterResult]:
    """Return results of three fabrics and two seeds; the second fabric is more expensive and slower than the first."""
    fabrics = (("rfabric", 1.0e6, 40.0), ("fat_tree", 3.0e6, 38.0), ("rail", 5.0e6, 50.0))
    return [result(usd, fabric=fabric, seed=seed, rate=rate) for fabric, usd, rate in fabrics for seed in (1, 2)]
