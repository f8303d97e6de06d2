"""OrchestrRL processes in one folder: daemon, gateways, agents and weight peers, with the daemon's configuration.

async with Stack(folder) as stack:
    await stack.start_daemon({"mode": "act"})
    await stack.start_gateway("--engine-kind", "simulated")
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import yaml

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.testbed.processes import LabProcess, command_of, until
from orchestrrl.rpc.codecs.weights import STATUS
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, fabric_pb2, weights_pb2
from orchestrrl.weights.controller.reports import WeightsStatus
from planner.model import Configuration

CONFIG_FILE, JOURNAL_FILE = "orchestrrl.yaml", "journal.sqlite"
ANY_PORT = "127.0.0.1:0"


class Stack:
    """An async context manager that starts OrchestrRL processes and stops them on exit, in reverse order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.config_path = self.folder / CONFIG_FILE
        self.processes: dict[str, LabProcess] = {}
        self.daemon_address = ""
        self.undo = contextlib.AsyncExitStack()  # callbacks to run on exit

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.undo.aclose()

    @property
    def daemon(self) -> LabProcess:
        return self.processes["daemon"]

    @property
    def gateway(self) -> LabProcess:
        return self.processes["gateway"]

    @property
    def gateway_url(self) -> str:
        return self.gateway.url

    @property
    def agent(self) -> LabProcess:
        return self.processes["agent"]

    def launch(self, process: LabProcess) -> LabProcess:
        """Start a process. It is stopped when the stack exits."""
        self.undo.push_async_callback(process.stop)
        process.spawn()
        self.processes[process.name] = process
        return process

    def command(self, name: str, *words: str | Path) -> LabProcess:
        """Start an `orchestrrl` command as the process `name`. `words` are its subcommands and arguments."""
        return self.launch(LabProcess(name, command_of(*words), self.folder))

    async def served(self, process: LabProcess) -> str:
        """Wait until the process is ready and prints its address. Return the address."""
        process.url = await process.next_line()
        return process.url

    async def start_daemon(self, document: Mapping[str, Any], *, keep_journal: bool = False) -> str:
        """Start the daemon and return its address, which a restart reuses. The journal of an earlier daemon is deleted
        unless `keep_journal` is true."""
        for stale in () if keep_journal else self.folder.glob(f"{JOURNAL_FILE}*"):
            stale.unlink()
        self.configure(document)
        self.daemon_address = await self.served(self.command("daemon", "daemon", "-c", self.config_path))
        self.config_path.write_text(self.config_path.read_text().replace(ANY_PORT, self.daemon_address, 1))
        return self.daemon_address

    def configure(self, document: Mapping[str, Any]) -> None:
        """Write the daemon's configuration file. Its content is `document` with defaults for mode, address and
        journal."""
        own = {"mode": "act", "listen": {"address": ANY_PORT}, "journal": {"path": str(self.folder / JOURNAL_FILE)}}
        self.config_path.write_text(yaml.safe_dump({**own, **document}, sort_keys=False))

    async def start_gateway(self, *flags: str, name: str = "gateway") -> str:
        """Start a gateway and return its URL, which a restart reuses."""
        words = ("gateway", "--listen", ANY_PORT, "--daemon", self.daemon_address, "--id", name, *flags)
        process = self.command(name, *words)
        url = await self.served(process)
        process.command[process.command.index(ANY_PORT)] = url.removeprefix("http://")
        return url

    def start_agent(self, *flags: str) -> LabProcess:
        return self.command("agent", "agent", "--daemon", self.daemon_address, *flags)

    def peer_words(self, name: str, folder: Path, engines: Mapping[str, str], *flags: str) -> list[str]:
        """Return the command-line flags of a weight peer. `engines` maps the ids of the engines on the peer's host to
        their URLs."""
        words = ["--id", name, "--folder", str(folder), "--daemon", self.daemon_address, *flags]
        return [*words, *engine_flags("--engine", engines)]

    async def run(self, *words: str) -> str:
        """Run an `orchestrrl` command with the address of the stack's daemon, and return the command's output. Raises
        Permanent if the command prints nothing."""
        command = command_of(*words, "--daemon", self.daemon_address)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
        if not out:
            raise Permanent(f"orchestrrl {' '.join(words)}: {err.decode(errors='replace').strip()}")
        return out.decode()

    async def status(self) -> control_pb2.Status:
        async with ControlClient(self.daemon_address) as control:
            return await control.call(control.control.GetStatus, control_pb2.GetStatusRequest())

    async def fabric(self, periods: int = 1) -> fabric_pb2.FabricStatus:
        """Return the fabric's status, which includes the last `periods` periods."""
        async with ControlClient(self.daemon_address) as control:
            return await control.call(control.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=periods))

    async def weights(self) -> WeightsStatus:
        async with ControlClient(self.daemon_address) as control:
            return STATUS.from_pb(await control.call(control.weights.GetWeights, weights_pb2.GetWeightsRequest()))

    async def until_reported(self, engines: int, kinds: Iterable[str] = ("agent", "gateway")) -> None:
        """Wait until at least `engines` engines have reported to the daemon and nodes of all `kinds` are attached.
        Raises Permanent if a process of the stack ends or the wait times out."""

        async def reported() -> bool:
            status = await self.status()
            attached = {node.kind for node in status.nodes if node.attached}
            # Without reported capabilities, such as sleep, a redeployment would stop an engine.
            known = [each for each in status.workers if each.HasField("age_s") and each.HasField("capabilities")]
            return attached >= set(kinds) and len(known) >= max(engines, len(status.workers))

        await until(reported, "every engine and the gateway report to the daemon", processes=[*self.processes.values()])

    async def until_attached(self, peers: Iterable[str]) -> None:
        """Wait until these weight peers are attached to the daemon. Raises Permanent if a process of the stack ends or
        the wait times out."""

        async def attached() -> bool:
            return {str(peer.id) for peer in (await self.weights()).peers if peer.attached} >= set(peers)

        await until(attached, "every peer is attached to the daemon", processes=[*self.processes.values()])


def engine_flags(flag: str, engines: Mapping[str, str]) -> list[str]:
    """Return one command-line flag and its value for each engine, such as `--engine e0=URL`. `engines` maps ids to
    URLs."""
    return [text for name, url in engines.items() for text in (flag, f"{name}={url}")]


def named(urls: Sequence[str]) -> dict[str, str]:
    """Return a dictionary from engine ids e0, e1, ... to the given URLs."""
    return {f"e{index}": url for index, url in enumerate(urls)}


def sped_up(configuration: Configuration, speed: float, overhead_s: float = 0.0) -> dict[str, Any]:
    """Return `configuration` as an entry of the daemon's configuration file, with times converted to wall-clock
    seconds. The engines run `speed` times as fast as `configuration` states. `overhead_s`, in wall-clock seconds, is
    added to the time of a redeployment."""
    document = asdict(configuration)
    for name in ("alpha_s", "beta_s", "gamma_s", "switch_s"):
        document[name] /= speed
    document["switch_s"] += overhead_s
    document["prefill_tokens_per_s"] *= speed
    return document
