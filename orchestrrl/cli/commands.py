"""The table of commands. Help and completion list the commands in this table, so that only the module of the invoked
command is imported."""

import re
from functools import cache
from pathlib import Path

SERVICES = "Services"
RUNNING_DAEMON = "Inspect and control a running daemon"


# Each group's help and the panel that lists it.
GROUPS: dict[str, tuple[str, str | None]] = {
    "sim": ("Simulate policies on a fleet or a whole cluster, with the real control plane.", None),
    "engine": ("Run the engines that come with OrchestrRL.", None),
    "engines": ("List, add, drain and remove engines while the daemon runs.", RUNNING_DAEMON),
    "plan": ("Explain, override and pin the planner's plans; solve and render plans offline.", RUNNING_DAEMON),
    "profile": ("Measure, import, fit and predict the step times of engines.", None),
    "fabric": ("Manage the optical fabric: its site file, its circuits and their changes.", RUNNING_DAEMON),
    "balancer": ("Pause and resume the moves of the fast loop.", RUNNING_DAEMON),
    "sync": ("Plan, publish and monitor the distribution of new weights to engines.", RUNNING_DAEMON),
    "ocs": ("Inspect and operate optical circuit switches.", RUNNING_DAEMON),
}

# The parts that an operator can pause, each with the effect of the pause.
HELD = {
    "balancer": "Pause the fast loop's moves until resumed or expired. Moves that an operator orders continue.",
    "fabric": "Pause every circuit change that a communication period requests, until resumed or expired.",
    "sync": "Pause weight syncs until resumed or expired: none starts or changes circuits; a running one continues.",
}

# Modules of orchestrrl.cli with their commands, in the order in which help lists them.
_MODULES = {
    "demo.demo": ["demo"],
    "bench": ["bench"],
    "up.up": ["up"],
    "daemon": ["daemon", "check-config"],
    "gateway": ["gateway"],
    "agent": ["agent"],
    "fleet.status": [
        *("status", "workers", "requests", "mode", "move", "moves"),
        *(f"{part} {verb}" for part in HELD for verb in ("pause", "resume")),
    ],
    "fleet.top": ["top"],
    "fleet.engine": ["engine simulated"],
    "fleet.engines": [f"engines {verb}" for verb in ("list", "add", "drain", "remove")],
    "fleet.pause": ["pause", "renew", "resume", "barrier", "cancel", "engines set-version"],
    "fleet.redeploy": ["redeploy"],
    "journal": ["journal"],
    "fleet.balance": ["balance"],
    "sim.generation": ["sim gen", "sim paper"],
    "sim.cluster": [f"sim {verb}" for verb in ("run", "compare", "report", "daemon-config", "split", "sweep")],
    "plan.live": [f"plan {verb}" for verb in ("explain", "list", "history", "override", "pin", "release")],
    "plan.offline": ["plan solve", "plan render"],
    "profile.model": [f"profile {verb}" for verb in ("score", "fit", "predict")],
    "profile.measure": ["profile measure", "profile import", "profile show"],
    "fabric.live": [
        f"fabric {verb}" for verb in ("status", "periods", "announce", "pin", "override", "release", "mask")
    ],
    "fabric.slack": ["fabric slack", "fabric trace"],
    "fabric.site": [f"fabric {verb}" for verb in ("check", "generate", "show")],
    "box": ["fabric box", "sync box"],
    "fabric.offline": [f"fabric {verb}" for verb in ("allocate", "place", "transition")],
    "sync.plan": ["sync plan"],
    "sync.peer": ["sync peer"],
    "sync.live": [f"sync {verb}" for verb in ("status", "history", "profile", "watch", "abort", "install")],
    "sync.publish": ["sync publish"],
    "ocs.live": [f"ocs {verb}" for verb in ("list", "show", "connect", "disconnect", "confirm", "take-over", "verify")],
    "ocs.emulate": ["ocs emulate"],
    "ocs.conformance": ["ocs conformance"],
}
MODULE_OF = {path: module for module, paths in _MODULES.items() for path in paths}

_PANELS = {
    SERVICES: "up daemon gateway agent",
    RUNNING_DAEMON: "status workers requests mode move top pause renew resume barrier cancel moves redeploy journal",
}
PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}


def function_names(path: str) -> list[str]:
    """Return the possible names of a command's function: its path, its last part, or its last part followed by `_`."""
    words = (path.replace(" ", "_"), path.rpartition(" ")[2])
    return [name.replace("-", "_") for name in (*words, f"{words[1]}_")]


@cache
def summary(path: str) -> str:
    """Return the first paragraph of a command's docstring, read from the source so that no command is imported."""
    part, _, verb = path.partition(" ")
    if part in HELD and verb in ("pause", "resume"):
        return HELD[part] if verb == "pause" else f"End the pause that `orchestrrl {part} pause` began."
    file = Path(__file__).parent / f"{MODULE_OF[path].replace('.', '/')}.py"
    start = rf"^(async )?def ({'|'.join(function_names(path))})\("
    found = re.search(rf'{start}.*?"""(?P<summary>.*?)(\n\n|""")', file.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{file} has no function for the command {path!r}"
    return " ".join(found["summary"].split())
