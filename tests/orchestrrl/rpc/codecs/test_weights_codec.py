"""What is told of weight syncs is the same on both sides of the wire."""

from dataclasses import replace

import pytest
from fake_syncs import done

from orchestrrl.rpc.codecs.weights import SYNC, report_to_pb


def test_a_listed_report_lacks_its_edges_and_nothing_else() -> None:
    assert SYNC.from_pb(report_to_pb(done(), edges=False)) == replace(done(), slowest=())


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
        SYNC.from_pb(message)
