"""Tests of the parameters of servers, and of the payload of a link."""

import numpy as np
import pytest

from orchestrrl.lab.sim.net.model import GBPS, Servers


def test_payload_excludes_headers() -> None:
    """9,172 of 9,254 bytes on the wire are data; with the standard Ethernet MTU, 1,456 of 1,538."""
    assert Servers(1).nic_bytes_per_s == pytest.approx(200 * GBPS * 9172 / 9254)
    assert Servers(1, mtu_bytes=1500).payload_share == pytest.approx(1456 / 1538)


def test_gpus_share_nics_in_order() -> None:
    servers = Servers(2, gpus_per_server=8, nics_per_server=2)
    assert servers.nic_of(np.arange(0, 16, 4)).tolist() == [0, 1, 2, 3]
    assert servers.nic_of(np.arange(3, 16, 4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("count", 0),
        ("nics_per_server", 3),
        ("nic_gbps", 0.0),
        ("nvlink_bytes_per_s", float("nan")),
        ("propagation_s", -1e-6),
        ("processing_s", -1e-6),
        ("mtu_bytes", 44.0),
        ("frame_bytes", -1.0),
    ],
)
def test_servers_reject_invalid_values(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        Servers(**{"count": 1} | {option: value})  # type: ignore[arg-type]
