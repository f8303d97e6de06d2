"""Create the namespaces and cables of a plan: hosts below ToRs, fibres from ToRs to switches, and rate-limited lines.

    host --tbf-- ToR --tbf-- port of a switch | bridge | port -- ToR -- host

A port of a switch receives light only while the patch panel (patch_panel.py) joins it to another port. In addition to
the optical fabric, a slow electrical network joins all ToRs, so that every host can always reach every other host.
"""

from orchestrrl.lab.box.namespaces import Script
from orchestrrl.lab.box.plan import PACKET_SIDE_SHARE, TestbedPlan
from planner.fabric.model import EndpointId, OcsId, Port
from planner.fabric.topology import ServerId

PACKET_SIDE = "eps"
# First interface indices, high enough to differ from the index of the cable's other end, see `Script.cable`.
HOST_INDEX, PACKET_SIDE_INDEX = 20_000, 40_000
_BRIDGE = "type bridge forward_delay 0 stp_state 0 mcast_snooping 0"


def port_name(port: int) -> str:
    return f"p{port}"


def bridge_name(port: int) -> str:
    return f"b{port}"


async def build(plan: TestbedPlan) -> None:
    """Create all namespaces and cables of a plan, with all ports dark. Raises Permanent, with the tool's output, if
    `ip` or `tc` fails."""
    script = Script()
    for tor in plan.tors:
        _tor(script, plan, tor)
    _packet_side(script, plan)
    for server in plan.site.servers:
        _host(script, plan, server.id)
    for switch in plan.switches.values():
        script.room(switch)
    for place, port in enumerate(sorted(plan.ends)):
        _port(script, plan, port, 1000 + place)
    await script.run()


def _tor(script: Script, plan: TestbedPlan, tor: EndpointId) -> None:
    room = script.room(plan.tors[tor])
    script.ip(room, f"addr add {plan.addresses[tor]}/32 dev lo")
    script.ip(room, "link add hosts type bridge forward_delay 0")
    script.ip(room, f"addr add {plan.gateways[tor]}/24 dev hosts")
    script.ip(room, "link set hosts up")


def _packet_side(script: Script, plan: TestbedPlan) -> None:
    script.room(PACKET_SIDE)
    script.ip(PACKET_SIDE, f"link add br0 {_BRIDGE}")
    script.ip(PACKET_SIDE, "link set br0 up")
    for place, (tor, room) in enumerate(plan.tors.items()):
        script.cable(room, PACKET_SIDE, PACKET_SIDE, room, PACKET_SIDE_INDEX + place)
        script.ip(PACKET_SIDE, f"link set {room} master br0 up")
        script.ip(room, f"addr add {plan.packet_side[tor]}/16 dev {PACKET_SIDE}")
        script.ip(room, f"link set {PACKET_SIDE} up")
        line = plan.tbf(plan.site.link_gbps * PACKET_SIDE_SHARE)
        script.tc(room, f"qdisc add dev {PACKET_SIDE} root {line}")


def _host(script: Script, plan: TestbedPlan, server: ServerId) -> None:
    nics = plan.nics[server]
    room = script.room(plan.hosts[server])
    line = plan.tbf(plan.site.nic_gbps)
    for k, nic in enumerate(nics):
        tor = plan.tors[nic.tor]
        script.cable(room, nic.interface, tor, nic.tor_interface, HOST_INDEX + k)
        script.ip(tor, f"link set {nic.tor_interface} master hosts up")
        script.tc(tor, f"qdisc add dev {nic.tor_interface} root {line}")
        script.ip(room, f"addr add {nic.address}/24 dev {nic.interface}")
        script.ip(room, f"link set {nic.interface} up")
        script.tc(room, f"qdisc add dev {nic.interface} root {line}")
        gateway = plan.gateways[nic.tor]
        if k == 0:
            script.ip(room, f"route add default via {gateway}")
        else:  # packets with the NIC's source address leave through the NIC
            script.ip(room, f"rule add from {nic.address} table {100 + k}")
            script.ip(room, f"route add default via {gateway} dev {nic.interface} table {100 + k}")


def _port(script: Script, plan: TestbedPlan, port: Port, index: int) -> None:
    """Create the bridge and the cable of a switch port. The cable of a lane, which joins two switch ports, is created
    with the lower of the two ports."""
    switch, number = port
    room, name, bridge = plan.switches[switch], port_name(number), bridge_name(number)
    script.ip(room, f"link add {bridge} {_BRIDGE}")
    script.ip(room, f"link set {bridge} up")
    match plan.ends[port]:
        case (tor, str(interface)):
            there = plan.tors[EndpointId(tor)]
            script.cable(room, name, there, interface, index)
            script.ip(there, f"link set {interface} up")
            script.tc(there, f"qdisc add dev {interface} root {plan.tbf(plan.site.link_gbps)}")
        case (core, int(lane)) if port < (core, lane):
            script.cable(room, name, plan.switches[OcsId(core)], port_name(lane), index)
            script.ip(room, f"link set {name} up")
            script.ip(plan.switches[OcsId(core)], f"link set {port_name(lane)} up")
