"""A Linux router in a namespace, as the conformance suite requires it, with connections that can break."""

from pathlib import Path

from namespaces import Lab, inside, run

from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind

INTERFACES = ("swp1", "swp2", "swp3")

# Fails once, before or after the next command that changes something, as ssh does.
FLAKY = """\
folder=$1; shift
case "$*" in
  *-batch*|*configure*)
    if rm "$folder/drop_command" 2>/dev/null; then exit 255; fi
    if rm "$folder/drop_connection" 2>/dev/null; then "$@"; exit 255; fi;;
esac
exec "$@"
"""


class LinuxRouter:
    """A namespace with three interfaces to another namespace, which answers for 192.0.2.2."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.folder = folder
        self.namespace = lab.add("router", "192.0.2.1/32")
        self.far = lab.add("peer", "192.0.2.2/32")
        for interface in INTERFACES:
            lab.veth(self.namespace, interface, self.far, interface)
        script = folder / "flaky.sh"
        script.write_text(FLAKY)
        self.prefix = ["sh", str(script), str(folder), "ip", "netns", "exec", self.namespace]

    def inject(self, fault: RouterFault) -> None:
        if fault.kind in (RouterFaultKind.DROP_COMMAND, RouterFaultKind.DROP_CONNECTION):
            (self.folder / fault.kind).touch()
        else:
            up = "up" if fault.kind is RouterFaultKind.LINK_UP else "down"
            run("ip", "-n", self.far, "link", "set", fault.interface, up)

    def inside(self, *command: str) -> str:
        return inside(self.namespace, *command)
