"""Nouns of the command line, whose verbs live in several modules, and the panels of `orchestrrl --help`."""

from typing import NamedTuple

SERVICES = "Services"
RUNNING_DAEMON = "Ask and steer a running daemon"


class CommandGroup(NamedTuple):
    help: str
    panel: str | None = None


GROUPS = {
    "sim": CommandGroup("Try policies on a simulated fleet, or a whole cluster; the control plane is the real one."),
    "engine": CommandGroup("Engines that come with OrchestrRL."),
    "engines": CommandGroup("Engines that come and go while the daemon runs.", RUNNING_DAEMON),
    "plan": CommandGroup("What the planner proposes and why; override, pin and release it.", RUNNING_DAEMON),
    "profile": CommandGroup("What engines cost: measured, imported and predicted step times."),
    "fabric": CommandGroup(
        "The optical fabric: its site, circuits for a demand, and when they are changed.", RUNNING_DAEMON
    ),
    "balancer": CommandGroup("Pause and resume moves of the fast loop.", RUNNING_DAEMON),
    "sync": CommandGroup("How new weights reach every engine.", RUNNING_DAEMON),
    "ocs": CommandGroup("Optical circuit switches: what they are and where their light goes.", RUNNING_DAEMON),
}
