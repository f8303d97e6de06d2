"""Reports of weight syncs are equal on both sides of a connection."""

from dataclasses import replace

import pytest
from fake_syncs import done

from orchestrrl.rpc.codecs.weights import SYNC, report_to_pb


def test_listed_report_lacks_only_edges() -> None:
    assert SYNC.from_pb(report_to_pb(done(), edges=False)) == replace(done(), slowest=())


@pytest.mark.parametrize("field", ["state", "phase", "engine"])
def test_values_of_newer_daemon_are_refused_as_unknown(field: str) -> None:
    message = report_to_pb(done())
    match field:
        case "state":
            message.state = "pondering"
        case "phase":
            message.phases[0].phase = "pondering"
        case _:
            message.engines[0].state = "pondering"
    with pytest.raises(ValueError, match="pondering"):
        SYNC.from_pb(message)
