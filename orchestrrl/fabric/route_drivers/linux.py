"""Run commands on a Linux router, and read its interfaces and neighbours with `ip -json`. Routes are handled by the
modules of the drivers.

The router is local (`ip ...`), a network namespace (`ip netns exec NAME ip ...`) or remote (`ssh tor3 ip ...`).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from planner.fabric.route_plan import NextHop

# The exit status of ssh if it could not connect or the connection broke.
SSH_FAILED = 255
RETRY_S = 1.0
# The states of a neighbour that has answered.
ANSWERED = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}


@dataclass(frozen=True, slots=True)
class CommandOutput:
    status: int
    out: str
    err: str

    @property
    def error_text(self) -> str:
        """The command's error output on one line. If there is none, this is the standard output. If both outputs are
        empty, this is the exit status."""
        message = " | ".join(line.strip() for line in (self.err or self.out).splitlines() if line.strip())
        return message or f"exit status {self.status}"


@dataclass(frozen=True, slots=True)
class RouterShell:
    """Runs commands on a router, with `prefix` before each command. Cancelling a call kills the command, so that
    callers can limit its duration."""

    prefix: tuple[str, ...] = ()

    async def run(self, *command: str, stdin: str = "", is_setter: bool = False) -> CommandOutput:
        """Run a command with the input `stdin` and return its output. Raises Permanent if the program cannot be run. If
        the connection to the router fails, raises OutcomeUnknown for a setter and Retryable for other commands."""
        process = await self._start(command, stdin=asyncio.subprocess.PIPE)
        try:
            out, err = await process.communicate(stdin.encode())
        finally:
            await _end(process)
        answer = CommandOutput(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))
        if answer.status == SSH_FAILED and self.is_remote:
            text = f"{' '.join(self.prefix)}: {answer.error_text}"
            raise OutcomeUnknown(text) if is_setter else Retryable(text, RETRY_S)
        return answer

    async def lines(self, *command: str) -> AsyncGenerator[str]:
        """Yield the command's output line by line while it runs."""
        process = await self._start(command, stdin=asyncio.subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\n")
        finally:
            await _end(process)

    @property
    def is_remote(self) -> bool:
        """True if commands run over a connection such as ssh. With the prefix `ip netns exec`, commands run locally,
        and exit status 255 means an unknown namespace instead of a broken connection."""
        return bool(self.prefix) and self.prefix[0] != "ip"

    @property
    def is_ssh(self) -> bool:
        return bool(self.prefix) and self.prefix[0].rsplit("/", 1)[-1] == "ssh"

    async def _start(self, command: Sequence[str], stdin: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                *self.prefix, *command, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise Permanent(f"cannot run {(*self.prefix, *command)[0]}: {error}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class LinuxHost:
    """The methods that the wires of all Linux routers share."""

    def __init__(self, shell: RouterShell) -> None:
        self.shell = shell

    async def read_links(self) -> Mapping[str, bool]:
        return {link["ifname"]: _is_up(link) for link in await self.show("link", "show")}

    async def link_events(self) -> AsyncGenerator[None]:
        async for _ in self.shell.lines("ip", "-oneline", "monitor", "link"):
            yield

    async def probe_neighbours(self, hops: Collection[NextHop]) -> None:
        # `use` makes the kernel resolve the neighbour at once, as a packet for it would.
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
        """Do nothing, because no connection stays open between commands."""

    async def show(self, *command: str) -> list[Any]:
        answer = await self.shell.run("ip", "-json", *command)
        if answer.status:
            raise Permanent(f"ip {' '.join(command)} failed: {answer.error_text}")
        # `ip -json` prints nothing for an empty result.
        try:
            rows = json.loads(answer.out or "[]")
        except ValueError as error:
            raise OutcomeUnknown(f"ip {' '.join(command)} must return valid JSON, got {answer.out[:200]!r}") from error
        if not isinstance(rows, list):
            raise OutcomeUnknown(f"ip {' '.join(command)} must return a JSON list, got {answer.out[:200]!r}")
        return rows

    async def batch(self, lines: list[str], *options: str) -> None:
        """Run all lines in one `ip -batch` command, which continues after failed lines. Raises Permanent with the
        router's message if a line failed."""
        text = "".join(f"{line}\n" for line in lines)
        answer = await self.shell.run("ip", *options, "-force", "-batch", "-", stdin=text, is_setter=True)
        if answer.status:
            raise Permanent(answer.error_text)


def _is_up(link: dict[str, Any]) -> bool:
    """Return whether the link is up and passes packets. A signal alone (LOWER_UP) is not sufficient, because the kernel
    drops packets until `operstate` changes too."""
    return {"UP", "LOWER_UP"} <= set(link["flags"]) and link.get("operstate") in ("UP", "UNKNOWN")
