"""The table of commands. Help and completion list them from it; only the module of the one in use is imported."""

import re
from functools import cache
from pathlib import Path

SERVICES = "Services"
RUNNING_DAEMON = "Ask and steer a running daemon"


# With their help and the panel in which they are listed.
GROUPS: dict[str, tuple[str, str | None]] = {
    "sim": ("Try policies on a simulated fleet, or a whole cluster; the control plane is the real one.", None),
    "engine": ("Engines that come with OrchestrRL.", None),
    "engines": ("Engines that come and go while the daemon runs.", RUNNING_DAEMON),
    "plan": ("What the planner proposes and why; override, pin and release it.", RUNNING_DAEMON),
    "profile": ("What engines cost: measured, imported and predicted step times.", None),
    "fabric": ("The optical fabric: its site, circuits for a demand, and when they are changed.", RUNNING_DAEMON),
    "balancer": ("Pause and resume moves of the fast loop.", RUNNING_DAEMON),
    "sync": ("How new weights reach every engine.", RUNNING_DAEMON),
    "ocs": ("Optical circuit switches: what they are and where their light goes.", RUNNING_DAEMON),
}

# What operators may pause, and what is held meanwhile.
HELD = {
    "balancer": "the fast loop's moves; an operator's own go on",
    "fabric": "every change of circuits that periods ask for",
    "sync": "weight syncs: none begins, and no circuits are changed for one; what is under way goes on",
}

# Modules of orchestrrl.cli with their commands, in the order of help.
_MODULES = {
    "demo.demo": ["demo"],
    "bench": ["bench"],
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
    SERVICES: "daemon gateway agent",
    RUNNING_DAEMON: "status workers requests mode move top pause renew resume barrier cancel moves redeploy journal",
}
PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}


def function_names(path: str) -> list[str]:
    """Return the names that the function of a command may have: its path, its last word, or that with an underscore."""
    words = (path.replace(" ", "_"), path.rpartition(" ")[2])
    return [name.replace("-", "_") for name in (*words, f"{words[1]}_")]


@cache
def summary(path: str) -> str:
    """Return the first paragraph of a command's docstring, read from the source: listing commands imports none."""
    part, _, verb = path.partition(" ")
    if part in HELD and verb in ("pause", "resume"):
        return f"Hold {HELD[part]}, until resumed or expired." if verb == "pause" else "Let it go on."
    file = Path(__file__).parent / f"{MODULE_OF[path].replace('.', '/')}.py"
    start = rf"^(async )?def ({'|'.join(function_names(path))})\("
    found = re.search(rf'{start}.*?"""(?P<summary>.*?)(\n\n|""")', file.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{file} has no function of {path}"
    return " ".join(found["summary"].split())
