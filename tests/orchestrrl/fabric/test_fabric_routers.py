"""The routers of a fabric in the configuration: the result of a valid section, and all faults of an invalid one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.wiring import DaemonEdges, build_daemon, domain_of
from orchestrrl.rpc.switches_service import drivers_of
from planner.fabric.model import EndpointId, OcsId
from planner.fabric.route_plan import PacketSide, TorRouter

SITE = {
    "link_gbps": 100,
    "nic_gbps": 100,
    "pods": [{"id": "train0", "role": "train"}],
    "tors": [{"id": "r0", "pod": "train0"}, {"id": "r1", "pod": "train0"}],
    "uplinks": [],
    "servers": [
        {"id": "s0", "pod": "train0", "gpus": "0-1", "tors": ["r0"]},
        {"id": "s1", "pod": "train0", "gpus": "2-3", "tors": ["r1"]},
    ],
    "switches": [
        {
            "id": name,
            "tier": "agg",
            "pod": "train0",
            "device": "piezo_polatis",
            "ports": {"r0": "1", "r1": "2"},
        }
        for name in ("agg0", "agg1")
    ],
}


def router(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "tor": f"r{number}",
        "driver": "iproute",
        "options": {"prefix": ["ssh", f"tor{number}"]},
        "address": f"192.0.2.{number}",
        "prefixes": [f"10.0.{number}.0/24"],
        "interfaces": ["swp1", "swp2"],
        **changes,
    }


def document(*routers: dict[str, Any], **fabric: Any) -> str:
    switches = [{"id": name, "driver": "virtual", "options": {}} for name in ("agg0", "agg1")]
    return yaml.safe_dump({"ocs": switches, "fabric": {"site": "site.yaml", "routers": list(routers), **fabric}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(SITE))
    return tmp_path


def faults_of(text: str, folder: Path) -> list[str]:
    with pytest.raises(ProblemFaults) as refusal:
        parse_config(text, folder)
    return refusal.value.faults


def test_routers_become_a_domain(folder: Path) -> None:
    side = {"interface": "eth0", "address": "198.51.100.1"}
    text = document(router(0, packet_side=side), router(1), rerouting={"packet_hops": 2, "link_up_s": 0.5})
    config = parse_config(text, folder)
    assert config.fabric is not None
    domain = domain_of(config.fabric.routers, config.fabric.rerouting.packet_hops)
    assert domain.packet_hops == 2
    assert domain.routers == {
        EndpointId("r0"): TorRouter("192.0.2.0", ("10.0.0.0/24",), PacketSide("eth0", "198.51.100.1")),
        EndpointId("r1"): TorRouter("192.0.2.1", ("10.0.1.0/24",)),
    }


@pytest.mark.parametrize(
    ("routers", "route_s", "reckoned_s"),
    [((), 0.25, 0.25), ((), 0.0, 0.0), ((router(0), router(1)), 0.0, 1.0), ((router(0), router(1)), 0.25, 0.25)],
)
async def test_route_time_is_part_of_window_need(
    folder: Path, routers: tuple[dict[str, Any], ...], route_s: float, reckoned_s: float
) -> None:
    config, clock = parse_config(document(*routers, route_s=route_s), folder), VirtualClock()
    drivers = drivers_of(config.ocs, clock)
    with Journal(folder / "journal.sqlite", 0.0) as journal:
        parts = build_daemon(config, journal, clock, DaemonEdges(drivers=drivers))
        assert (parts.fabric.routing is not None) == bool(routers)
        assert parts.fabric.coordinator is not None
        assert parts.fabric.coordinator.times.need([OcsId("agg0")], 0.0).route_s == reckoned_s


def test_all_faults_are_reported_at_once(folder: Path) -> None:
    first = router(
        0,
        options={"prefix": "ssh", "colour": 1},
        interfaces=["swp1", "swp1", "b@d"],
        packet_side={"interface": "swp1", "address": "192.0.2.7"},
    )
    second = router(7, address="192.0.2.300", prefixes=["10.0.0.128/25", "10.9.9.1/24"])
    third = router(0, driver="router", address="192.0.2.7", prefixes=["10.7.0.0/16", "fe80::/64"])
    found = faults_of(document(first, second, third, rerouting={"link_up_s": -1}), folder)
    assert found == [
        "fabric.rerouting.link_up_s: must be >= 0, got -1",
        "fabric.routers[1].tor: must be a ToR of fabric.site, got 'r7'",
        "fabric.routers[2].tor: must be named once, and fabric.routers[0] has it already, got 'r0'",
        "fabric.routers: must list every ToR of fabric.site, or none (missing: r1), got 2",
        "fabric.routers[0].interfaces[2]: must be the name of an interface, got 'b@d'",
        "fabric.routers[0].interfaces[0]: must be named once per ToR, got 'swp1'",
        "fabric.routers[0].interfaces[1]: must be named once per ToR, got 'swp1'",
        "fabric.routers[0].packet_side.interface: must be named once per ToR, got 'swp1'",
        "fabric.routers[0].interfaces: must name an interface for each of 2 fibres (agg0:1, agg1:1), got 3",
        "fabric.routers[0].options.prefix: must be a list of words such as [ssh, tor3], got 'ssh'",
        "fabric.routers[0].options.colour: is not known (known: command_timeout_s, metric,"
        " prefix, protocol, table), got 1",
        "fabric.routers[1].address: must be an IPv4 address, got '192.0.2.300'",
        "fabric.routers[1].prefixes[0]: must not overlap with 10.0.0.0/24 of fabric.routers[0].prefixes[0],"
        " got '10.0.0.128/25'",
        "fabric.routers[1].prefixes[1]: must be an IPv4 network such as 10.0.2.0/24, got '10.9.9.1/24'",
        "fabric.routers[2].address: must be unique, and fabric.routers[0].packet_side.address has it already,"
        " got '192.0.2.7'",
        "fabric.routers[2].prefixes[1]: must be an IPv4 network such as 10.0.2.0/24, got 'fe80::/64'",
        "fabric.routers[2].driver: must be one of frr, iproute, virtual, got 'router'",
    ]


def test_driver_faults_have_paths(folder: Path) -> None:
    found = faults_of(document(router(0, options={"prefix": "ssh"}), router(1, options={"metric": 0})), folder)
    assert found == [
        "fabric.routers[0].options.prefix: must be a list of words such as [ssh, tor3], got 'ssh'",
        "fabric.routers[1].options.metric: must be a whole number within 1..4294967295, got 0",
    ]
