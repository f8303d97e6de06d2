"""Tests of fault schedules: active failures over time, and the durations of affected stages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.rl.faults import (
    ClusterFaultSchedule,
    ClusterFaultSection,
    FaultyPart,
    NeverEnds,
    stretched_s,
    with_lost_work_s,
)


def schedule(*faults: tuple[float, FaultyPart, int | tuple[int, ...], dict[str, float]]) -> ClusterFaultSchedule:
    rows = [{"at_s": at_s, "fail": fail, "of": of, **more} for at_s, fail, of, more in faults]
    return ClusterFaultSchedule(tuple(ClusterFaultSection.model_validate(row) for row in rows))


def test_schedule_returns_failures_by_time() -> None:
    faults = schedule(
        (12.0, FaultyPart.NIC, 7, {"back_after_s": 60.0}),
        (30.0, FaultyPart.TOR_UPLINKS, 3, {"share": 0.25}),
        (40.0, FaultyPart.TOR_UPLINKS, (2, 3), {"share": 0.5, "back_after_s": 10.0}),
    )
    assert faults.changes_s() == (12.0, 30.0, 40.0, 50.0, 72.0)
    assert faults.network(0.0) == SimulatedFailures()
    assert faults.network(45.0) == SimulatedFailures(nics=frozenset({7}), tor_uplinks={2: 0.5, 3: 0.75})
    assert faults.network(72.0) == SimulatedFailures(tor_uplinks={3: 0.25})
    assert [str(fault) for fault in faults.faults] == ["nic 7", "tor uplinks 3, 25%", "tor uplinks 2, 3, 50%"]


def test_lost_share_of_a_bundle_is_at_most_one() -> None:
    faults = schedule(
        (0.0, FaultyPart.POD_UPLINKS, 1, {"share": 0.75}), (1.0, FaultyPart.POD_UPLINKS, (0, 1), {"share": 0.5})
    )
    assert faults.network(2.0).pod_uplinks == {0: 0.5, 1: 1.0}


def test_completed_work_is_kept() -> None:
    slow = schedule((10.0, FaultyPart.NIC, 0, {"back_after_s": 10.0}))
    # Half of the work at full speed, ten seconds at half speed, the remaining quarter at full speed.
    assert stretched_s(slow, 0.0, lambda now_s: 40.0 if slow.holding(now_s, FaultyPart.NIC) else 20.0) == pytest.approx(
        25.0
    )
    assert stretched_s(slow, 0.0, lambda now_s: math.inf if slow.holding(now_s, FaultyPart.NIC) else 20.0) == 30.0
    with pytest.raises(NeverEnds, match="never ends: nic 0 does not recover; set back_after_s"):
        stretched_s(schedule((5.0, FaultyPart.NIC, 0, {})), 0.0, lambda now_s: math.inf if now_s >= 5 else 20.0)


def test_iteration_restarts_after_a_server_failure() -> None:
    faults = schedule(*((at_s, FaultyPart.SERVER, server, {}) for at_s, server in ((8.0, 1), (12.0, 9), (35.0, 0))))
    # Begins at 0, fails at 8, restarts at 18, ends at 28: server 9 is not in use, and server 0 fails later.
    assert with_lost_work_s(faults, 0.0, lambda _: 10.0, range(4), 10.0) == 28.0
    assert with_lost_work_s(faults, 30.0, lambda _: 10.0, range(4), 10.0) == 25.0
    assert with_lost_work_s(faults, 0.0, lambda _: 10.0, range(2, 4), 10.0) == 10.0


@pytest.mark.parametrize(
    ("fields", "wish"), [({"at_s": -1.0}, "at_s"), ({"share": 0.0}, "share"), ({"back_after_s": 0.0}, "back_after_s")]
)
def test_invalid_faults_are_rejected(fields: dict[str, float], wish: str) -> None:
    with pytest.raises(ValueError, match=wish):
        ClusterFaultSection.model_validate({"at_s": 1.0, "fail": FaultyPart.NIC, "of": 0, **fields})


FAULTS = st.lists(
    st.tuples(st.floats(0, 50), st.floats(0.1, 50)).map(
        lambda each: ClusterFaultSection(at_s=each[0], fail=FaultyPart.NIC, of=(0,), back_after_s=each[1])
    ),
    max_size=5,
).map(lambda faults: ClusterFaultSchedule(tuple(faults)))


@given(FAULTS, st.floats(0, 60), st.floats(0.1, 40), st.floats(1, 5))
def test_faults_lengthen_a_stage_within_bounds(
    faults: ClusterFaultSchedule, begin_s: float, whole_s: float, slower: float
) -> None:
    length_s = stretched_s(
        faults, begin_s, lambda now_s: whole_s * (slower if faults.holding(now_s, FaultyPart.NIC) else 1)
    )
    assert whole_s * (1 - 1e-9) <= length_s <= whole_s * slower * (1 + 1e-9)
