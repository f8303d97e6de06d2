"""The fabric's Prometheus metrics."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.daemon.metrics import defect_metrics, pause_metrics
from orchestrrl.fabric.metrics import fabric_metrics
from orchestrrl.fabric.site import read_site
from orchestrrl.fabric.switch_reader import SiteReading
from planner.fabric.model import OcsId, port_pair
from planner.fabric.plan import FabricFailures

ROOT = Path(__file__).resolve().parents[3]


def samples(metrics: Any) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for metric in metrics for sample in metric.samples}


def test_circuits_and_period_outcomes() -> None:
    site = read_site(ROOT / "deploy" / "examples" / "site.yaml")
    core, away = OcsId("core0"), OcsId("gen1/agg0")
    site_reading = SiteReading(
        frozenset({port_pair(core, 1, 5), port_pair(core, 500, 501)}),  # the second connects no fibres of the site
        FabricFailures(ports=frozenset({(core, 7)}), switches=frozenset({away})),
        unread={away: "no answer"},
        of_site=frozenset({port_pair(core, 1, 5)}),
    )
    fabric: Any = SimpleNamespace(
        site=site,
        site_reading=site_reading,
        counts=Counter({("committed", "committed"): 3, ("kept", "no_window"): 2}),
        times_of_switches=lambda: [(switch.id, 0.05, 3) for switch in site.switches],
    )
    seen = samples(fabric_metrics(fabric))
    assert seen["orchestrrl_fabric_periods_total", "committed", "committed"] == 3
    assert seen["orchestrrl_fabric_periods_total", "kept", "no_window"] == 2
    assert seen["orchestrrl_fabric_circuits", core] == 1
    assert ("orchestrrl_fabric_circuits", away) not in seen  # unknown
    assert seen["orchestrrl_fabric_switch_unreachable", away] == 1
    assert seen["orchestrrl_fabric_switch_unreachable", core] == 0
    assert seen["orchestrrl_fabric_failed_ports", core] == 1
    assert seen["orchestrrl_fabric_change_seconds", core] == 0.05


def test_pauses() -> None:
    seen = samples(pause_metrics({PauseScope.SYNC: None}))
    assert seen == {
        ("orchestrrl_paused", "balancer"): 0,
        ("orchestrrl_paused", "fabric"): 0,
        ("orchestrrl_paused", "sync"): 1,
    }


def test_internal_errors_are_counted_by_part() -> None:
    plane: Any = SimpleNamespace(
        circuits=SimpleNamespace(defects=2),
        weights=SimpleNamespace(syncs=SimpleNamespace(defects=1)),
        fabric=SimpleNamespace(coordinator=None, gen_circuits=None, routing=SimpleNamespace(defects=0)),
        fleet=SimpleNamespace(
            defects=SimpleNamespace(
                counts=Counter({"fast_loop": 3, "deployment": 1, "orchestrrl.v1.Control/GetStatus": 3})
            )
        ),
    )
    assert samples(defect_metrics(plane)) == {
        ("orchestrrl_defects_total", "orchestrrl.v1.Control/GetStatus"): 3,
        ("orchestrrl_defects_total", "circuits"): 2,
        ("orchestrrl_defects_total", "deployment"): 1,
        ("orchestrrl_defects_total", "fast_loop"): 3,
        ("orchestrrl_defects_total", "moves"): 0,
        ("orchestrrl_defects_total", "plans"): 0,
        ("orchestrrl_defects_total", "routes"): 0,
        ("orchestrrl_defects_total", "slow_loop"): 0,
        ("orchestrrl_defects_total", "weights"): 1,
    }
