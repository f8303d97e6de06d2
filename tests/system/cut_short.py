"""Run deployers that are killed (SIGKILL) during a change: before its first effect, before its second, and so on.

An effect is an event that Python's audit hooks report in advance: a file of the fleet is written, renamed or removed, a
process is spawned, or a signal is sent. Run as `cut_short.py FOLDER CHANGE LAUNCH SPEC`, with LAUNCH and SPEC as JSON.
Each kill position has its own fleet `FOLDER/PLACE`. Prints the effects of an undisturbed change, one per line.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.clock import WallClock
from orchestrrl.fleet.deployers.base import FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.local import LocalDeployer

MOST_PLACES = 100


def fleet_at(folder: Path, place: int) -> FleetIdentity:
    return FleetIdentity(f"cut-{place}", str(folder / str(place)))


def launch_at(launch: EngineLaunch, place: int) -> EngineLaunch:
    """Return the launch of one fleet. Fleets do not share ports, because processes that do not serve hold no port."""
    return replace(launch, first_port=launch.first_port + 8 * place)


def _effect(event: str, arguments: tuple[Any, ...], folder: str) -> str | None:
    reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in ("open", "os.rename", "os.remove") and not reads and str(arguments[0]).startswith(folder):
        return f"{event} {Path(str(arguments[0])).name}"
    return event if event in ("os.posix_spawn", "os.kill") else None


async def _change(deployer: LocalDeployer, change: str, spec: EngineSpec) -> None:
    match change:
        case "start":
            await deployer.start(spec)
        case "stop":
            await deployer.stop(spec.engine)
        case "lend":
            await deployer.lend(spec.engine, True)


def _run(change: str, deployer: LocalDeployer, spec: EngineSpec, folder: Path, place: int) -> None:
    """Run the change in a separate process and exit it."""
    if change != "start":
        asyncio.run(deployer.start(spec))
    effects: list[str] = []

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        effect = _effect(event, arguments, str(folder))
        if effect is not None and len(effects) == place:
            signal.raise_signal(signal.SIGKILL)
        if effect is not None:
            effects.append(effect)

    sys.addaudithook(count)
    asyncio.run(_change(deployer, change, spec))
    print("\n".join(effects), flush=True)
    os._exit(0)


def main() -> None:
    folder, change = Path(sys.argv[1]), sys.argv[2]
    launch = TypeAdapter(EngineLaunch).validate_python(json.loads(sys.argv[3]))
    spec = TypeAdapter(EngineSpec).validate_python(json.loads(sys.argv[4]))
    for place in range(MOST_PLACES):
        pid = os.fork()
        if not pid:
            deployer = LocalDeployer(launch_at(launch, place), fleet_at(folder, place), {"grace_s": 0.5}, WallClock())
            _run(change, deployer, spec, folder, place)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
