"""Commands on a router, here or elsewhere: `ip ...`, `ip netns exec NAME ip ...`, `ssh tor3 ip ...`."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable

# What ssh exits with when it could not get there, or when the connection broke.
SSH_FAILED = 255
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class CommandOutput:
    status: int
    out: str
    err: str

    @property
    def error_text(self) -> str:
        """What was said about what went wrong, in one line."""
        said = " | ".join(line.strip() for line in (self.err or self.out).splitlines() if line.strip())
        return said or f"exit status {self.status}"


@dataclass(frozen=True, slots=True)
class RouterShell:
    """How commands get to a router: `prefix` stands before each. Time limits are the caller's: a command that is
    cancelled is killed."""

    prefix: tuple[str, ...] = ()

    async def run(self, *command: str, stdin: str = "", is_setter: bool = False) -> CommandOutput:
        """Raises Permanent where there is no such program, and, where the way to the router broke, Retryable, or
        OutcomeUnknown for a setter."""
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
        """Line by line while it runs."""
        process = await self._start(command, stdin=asyncio.subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\n")
        finally:
            await _end(process)

    @property
    def is_remote(self) -> bool:
        """`ip netns exec` uses the same status for a name that it does not know, and is no connection."""
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
            raise Permanent(f"{(*self.prefix, *command)[0]} cannot be run: {error}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
