"""Prometheus metrics of weight syncs: each sync is counted once, when it is over."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fake_syncs import BEGAN_S, PEERS, FakeSyncs, carrying, done
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import WeightSyncParts, build_daemon
from orchestrrl.weights.controller.metrics import SyncMetrics
from orchestrrl.weights.controller.reports import EngineStatus, EngineSync, SyncPhase, SyncState
from planner.model import EngineId


def samples(metrics: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for metric in metrics for sample in metric.samples}


def test_each_sync_is_counted_once_when_it_is_over() -> None:
    metrics, syncs = SyncMetrics(since_s=BEGAN_S), FakeSyncs(done(7), committed=7)
    first = samples(metrics.collect(syncs))
    assert first["orchestrrl_syncs_total", "done", "done"] == 1
    assert first["orchestrrl_sync_running",] == 0
    assert first["orchestrrl_sync_committed_version",] == 7
    syncs.change(carrying(8))
    assert samples(metrics.collect(syncs))["orchestrrl_sync_running",] == 1
    aborted = replace(carrying(8), state=SyncState.ABORTED, code="peer_lost", ended_s=BEGAN_S + 3.5, mended_edges=2)
    syncs.change(aborted)
    for _ in range(3):
        seen = samples(metrics.collect(syncs))
        assert seen["orchestrrl_syncs_total", "done", "done"] == 1
        assert seen["orchestrrl_syncs_total", "aborted", "peer_lost"] == 1
        assert seen["orchestrrl_sync_phase_seconds_count", "phase_a"] == 2
        assert seen["orchestrrl_sync_phase_seconds_sum", "phase_a"] == pytest.approx(5.0)
        assert seen["orchestrrl_sync_phase_seconds_count", "circuits"] == 0
        assert seen["orchestrrl_sync_seconds_count",] == 1  # completed syncs only
        assert seen["orchestrrl_sync_seconds_sum",] == pytest.approx(4.0)
        assert seen["orchestrrl_sync_still_seconds_total",] == pytest.approx(1.5)
        assert seen["orchestrrl_sync_carried_bytes_total",] == 6_500_000_000
        assert seen["orchestrrl_sync_mended_edges_total",] == 2
        assert ("orchestrrl_sync_transfer_ratio", "bound") not in seen  # the last transfer was not completed
    syncs.change(done(9))
    assert samples(metrics.collect(syncs))["orchestrrl_sync_transfer_ratio", "bound"] == pytest.approx(1.25)


def test_syncs_of_an_earlier_daemon_are_not_counted() -> None:
    seen = samples(SyncMetrics(since_s=BEGAN_S + 60).collect(FakeSyncs(done(7), committed=7)))
    assert ("orchestrrl_syncs_total", "done", "done") not in seen
    assert seen["orchestrrl_sync_seconds_count",] == 0
    assert seen["orchestrrl_sync_committed_version",] == 7


def test_quarantined_engines_and_attached_peers_are_counted() -> None:
    syncs = FakeSyncs()
    seen = samples(SyncMetrics(0.0).collect(syncs))
    assert ("orchestrrl_sync_committed_version",) not in seen
    assert seen["orchestrrl_sync_peers_attached", "engine"] == 0
    syncs.peers = PEERS
    syncs.quarantined = (EngineStatus(EngineId("e1"), EngineSync.QUARANTINED),)
    seen = samples(SyncMetrics(0.0).collect(syncs))
    assert seen["orchestrrl_sync_peers_attached", "trainer"] == 1
    assert seen["orchestrrl_sync_peers_attached", "engine"] == 1  # the other peer has detached
    assert seen["orchestrrl_sync_quarantined_engines",] == 1


def test_daemon_metrics_page_has_them_with_help(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", BEGAN_S) as journal:
        parts = build_daemon(parse_config("mode: act"), journal, VirtualClock(BEGAN_S))
        syncs = cast(Any, FakeSyncs(done(7), committed=7))
        registry = CollectorRegistry()
        registry.register(DaemonCollector(replace(parts, weights=WeightSyncParts(parts.weights.hub, syncs))))
        page = generate_latest(registry).decode()
    assert 'orchestrrl_sync_phase_seconds_sum{phase="install"} 1.0' in page
    assert "# HELP orchestrrl_sync_carried_bytes_total Bytes of weights" in page


def test_every_phase_is_exported_from_the_start() -> None:
    seen = samples(SyncMetrics(0.0).collect(FakeSyncs()))
    assert all(("orchestrrl_sync_phase_seconds_count", phase) in seen for phase in SyncPhase)
