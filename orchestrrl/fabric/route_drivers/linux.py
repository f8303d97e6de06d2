"""Interfaces and neighbours of a Linux router, by `ip -json`. Which routes it has is its products' business."""

import json
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.fabric.route_drivers.command import RouterShell
from planner.fabric.route_plan import NextHop

# As what a neighbour stands that has answered.
ANSWERED = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}


class LinuxHost:
    """The verbs that every wire to a Linux router shares."""

    def __init__(self, shell: RouterShell) -> None:
        self.shell = shell

    async def read_links(self) -> Mapping[str, bool]:
        return {link["ifname"]: _is_up(link) for link in await self.show("link", "show")}

    async def link_events(self) -> AsyncGenerator[None]:
        async for _ in self.shell.lines("ip", "-oneline", "monitor", "link"):
            yield

    async def probe_neighbours(self, hops: Collection[NextHop]) -> None:
        # `use` has the kernel ask for the neighbour at once, as a packet for it would.
        await self.batch(
            [f"neigh flush dev {interface}" for interface in sorted({hop.interface for hop in hops})]
            + [f"neigh replace {hop.gateway} dev {hop.interface} use" for hop in sorted(hops)],
            "-4",
        )

    async def found(self, hops: Collection[NextHop]) -> frozenset[NextHop]:
        rows = await self.show("-4", "neigh", "show")
        answered = {(row["dst"], row.get("dev")) for row in rows if ANSWERED & set(row.get("state", ()))}
        return frozenset(hop for hop in hops if hop.way in answered)

    async def close(self) -> None:
        """Every command is a session of its own."""

    async def show(self, *command: str) -> list[Any]:
        answer = await self.shell.run("ip", "-json", *command)
        if answer.status:
            raise Permanent(f"ip {' '.join(command)}: {answer.error_text}")
        # `ip -json` prints nothing at all where there is nothing.
        try:
            rows = json.loads(answer.out or "[]")
        except ValueError as error:
            raise OutcomeUnknown(f"ip {' '.join(command)}: not JSON: {answer.out[:200]!r}") from error
        if not isinstance(rows, list):
            raise OutcomeUnknown(f"ip {' '.join(command)}: not a list: {answer.out[:200]!r}")
        return rows

    async def batch(self, lines: list[str], *options: str) -> None:
        """All lines in one command, each whatever becomes of the others. Raises Permanent with the router's words."""
        text = "".join(f"{line}\n" for line in lines)
        answer = await self.shell.run("ip", *options, "-force", "-batch", "-", stdin=text, is_setter=True)
        if answer.status:
            raise Permanent(answer.error_text)


def _is_up(link: dict[str, Any]) -> bool:
    """With a signal alone (LOWER_UP) the kernel still drops packets: it opens the queue together with the state."""
    return {"UP", "LOWER_UP"} <= set(link["flags"]) and link.get("operstate") in ("UP", "UNKNOWN")
