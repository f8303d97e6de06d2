"""What a peer is told on its command line: all that is wrong with it at once, and what follows from the rest."""

from dataclasses import replace

import pytest

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.model import PeerRole
from orchestrrl.weights.peer.arguments import PeerArguments
from orchestrrl.weights.peer.settings import settings_of
from planner.sync_tree.shares import EngineShare


def test_all_faults_at_once() -> None:
    words = PeerArguments(
        "a/b",
        "nowhere",
        engines=["e0", "e1=http://127.0.0.1:8000", "e1=http://127.0.0.1:8001"],
        ranks_of=["e1", ""],
        product="other",
        folder="here",
        host="127.0.0.1",
        transports=["pigeon"],
        gpu=-1,
        pod="p",
        tp=2,
        tp_ranks=[2],
        nic_gbps=-1,
        poll_engines_s=0,
    )
    with pytest.raises(ProblemFaults) as raised:
        settings_of(words)
    named = {fault.partition(":")[0] for fault in raised.value.faults}
    assert named == {
        "--id", "--daemon", "--engine[0]", "--engine[2]", "--ranks-of[0]", "--ranks-of[1]", "--product", "--folder",
        "--transport", "--gpu", "--tp, --pp, --ep", "--nic-gbps", "--poll-engines-s",
    }  # fmt: skip


def test_a_host_with_other_ranks_of_an_engine() -> None:
    ranks = tuple(range(8, 16))
    settings = settings_of(
        PeerArguments("gen1", "unix:/run/daemon", ranks_of=["e0", "e0"], tp=16, tp_ranks=ranks, folder="/weights")
    )
    assert (settings.peer.role, settings.peer.ranks_of, settings.engines) == (PeerRole.ENGINE, ("e0",), {})
    assert settings.peer.share == EngineShare(16, ranks)


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7"])
def test_a_peer_that_other_machines_reach_is_asked_for(host: str) -> None:
    words = PeerArguments("gen1", "unix:/run/daemon", host=host, folder="/weights")
    with pytest.raises(ProblemFaults) as raised:
        settings_of(words)
    assert raised.value.faults == [
        f"--host: is not a loopback address; add --allow-remote to serve other machines, got {host!r}"
    ]
    assert settings_of(replace(words, allow_remote=True)).address == host


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1", "localhost"])
def test_a_peer_of_one_machine_is_not(host: str) -> None:
    settings_of(PeerArguments("gen1", "127.0.0.1:7070", host=host, folder="/weights"))
