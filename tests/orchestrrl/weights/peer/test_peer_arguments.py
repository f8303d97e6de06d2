"""Command-line options of a peer: all faults at once, and the derived settings."""

from dataclasses import replace

import pytest

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.model import PeerRole
from orchestrrl.weights.peer.arguments import PeerArguments
from orchestrrl.weights.peer.settings import settings_of
from planner.sync_tree.shares import EngineShare


def test_settings_report_all_faults_at_once() -> None:
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
        "--id", "--daemon", "--engine[0]", "--engine[2]", "--ranks-of[0]", "--ranks-of[1]", "--engine-kind", "--folder",
        "--transport", "--site-gpu", "--tp, --pp, --ep", "--nic-gbps", "--poll-engines-s",
    }  # fmt: skip


def test_ranks_of_names_engines_of_another_host() -> None:
    ranks = tuple(range(8, 16))
    settings = settings_of(
        PeerArguments("gen1", "unix:/run/daemon", ranks_of=["e0", "e0"], tp=16, tp_ranks=ranks, folder="/weights")
    )
    assert (settings.peer.role, settings.peer.ranks_of, settings.engines) == (PeerRole.ENGINE, ("e0",), {})
    assert settings.peer.share == EngineShare(16, ranks)


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7"])
def test_remote_host_requires_allow_remote(host: str) -> None:
    words = PeerArguments("gen1", "unix:/run/daemon", host=host, folder="/weights")
    with pytest.raises(ProblemFaults) as raised:
        settings_of(words)
    assert raised.value.faults == [
        f"--host: is not a loopback address; add --allow-remote to serve other machines, got {host!r}"
    ]
    assert settings_of(replace(words, allow_remote=True)).address == host


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1", "localhost"])
def test_loopback_host_does_not_require_allow_remote(host: str) -> None:
    settings_of(PeerArguments("gen1", "127.0.0.1:7070", host=host, folder="/weights"))
