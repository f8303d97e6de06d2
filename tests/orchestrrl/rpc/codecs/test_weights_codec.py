"""What is told of weight syncs is the same on both sides of the wire."""

from dataclasses import replace

import pytest
from fake_syncs import done
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.rpc.codecs.weights import report_from_pb, report_to_pb, status_from_pb, status_to_pb
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.weights.controller.reports import (
    EdgeTime,
    EngineStatus,
    EngineSync,
    PeerStatus,
    PhaseTime,
    SyncPhase,
    SyncReport,
    SyncState,
    WeightsStatus,
)

SMALL, LARGE = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SECONDS, TEXT, FEW = st.floats(allow_nan=False), st.text(max_size=8), 3


def several(each: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(each, max_size=FEW).map(tuple)


ENGINES = st.builds(EngineStatus, engine=TEXT, state=st.sampled_from(EngineSync), detail=TEXT, install_s=SECONDS)
REPORTS = st.builds(
    SyncReport,
    id=TEXT,
    version=LARGE,
    state=st.sampled_from(SyncState),
    began_s=SECONDS,
    code=TEXT,
    detail=TEXT,
    ended_s=st.none() | SECONDS,
    backend=TEXT,
    attempt=SMALL,
    world=SMALL,
    published=several(SMALL),
    phases=several(
        st.builds(PhaseTime, phase=st.sampled_from(SyncPhase), began_s=SECONDS, ended_s=st.none() | SECONDS)
    ),
    engines=several(ENGINES),
    bytes=LARGE,
    carried_bytes=LARGE,
    arrived_bytes=LARGE,
    estimate_s=SECONDS,
    lower_bound_s=SECONDS,
    naive_s=SECONDS,
    waves=SMALL,
    edges=SMALL,
    mended_edges=SMALL,
    slowest=several(
        st.builds(EdgeTime, src=TEXT, dst=TEXT, phase=TEXT, bytes=LARGE, seconds=SECONDS, planned_s=SECONDS)
    ),
    notes=several(TEXT),
)
STATUSES = st.builds(
    WeightsStatus,
    committed=st.none() | LARGE,
    sync=st.none() | REPORTS,
    quarantined=several(ENGINES),
    peers=several(
        st.builds(
            PeerStatus,
            id=TEXT,
            role=TEXT,
            host=TEXT,
            attached=st.booleans(),
            engines=several(TEXT),
            versions=several(LARGE),
            pod=TEXT,
            tor=TEXT,
        )
    ),
)


@given(REPORTS)
def test_a_report_is_the_same_on_the_other_side(report: SyncReport) -> None:
    wire = report_to_pb(report).SerializeToString()
    assert report_from_pb(pb.SyncReport.FromString(wire)) == report


@given(STATUSES)
def test_a_status_is_the_same_on_the_other_side(status: WeightsStatus) -> None:
    wire = status_to_pb(status).SerializeToString()
    assert status_from_pb(pb.WeightsStatus.FromString(wire)) == status


def test_a_listed_report_lacks_its_edges_and_nothing_else() -> None:
    assert report_from_pb(report_to_pb(done(), edges=False)) == replace(done(), slowest=())


@pytest.mark.parametrize("field", ["state", "phase", "engine"])
def test_what_a_newer_daemon_tells_is_said_to_be_unknown(field: str) -> None:
    message = report_to_pb(done())
    match field:
        case "state":
            message.state = "pondering"
        case "phase":
            message.phases[0].phase = "pondering"
        case _:
            message.engines[0].state = "pondering"
    with pytest.raises(ValueError, match="pondering"):
        report_from_pb(message)
