"""A daemon that starts and stops engines, a gateway with a ledger, and a step of requests, all of them processes.

Three engines on four GPUs, `NARROW`: a wide one, which stays, and two narrow ones, which a redeployment to `WIDE`
replaces by another wide one. The present engines are found as the deployer does, independently of any report.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from front import WITHIN_S, Question, check, session, until
from marked import MarkedProcess

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.journal.store import EntryKind, JournalEntry, JournalReader
from orchestrrl.daemon.configuration import load_config
from orchestrrl.fleet.deployers.base import DeployedInstance
from orchestrrl.fleet.deployers.conformance import RANGE, free_range
from orchestrrl.fleet.deployers.local_machine import EngineLogs, FoundProcess, find_processes, is_alive
from orchestrrl.fleet.launch import deployer_of
from orchestrrl.lab.testbed.processes import command_of
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from tests.orchestrrl.gateway.processes import free_port, operator_url
from tests.system.streams import Answer, read_stream

Targets = Sequence[tuple[str, int]]
NARROW: Targets = (("tp1", 2), ("tp2", 1))
WIDE: Targets = (("tp2", 2),)

AT_MARK = Path(__file__).parent / "daemon_at_mark.py"
SPEED = 5.0  # of engines: 4 ms a token
TOKENS = 600
GPUS = 4
REQUESTS = 9
LENGTHS = "{quantiles: [0.0, 1.0], tokens: [100, 200]}"
LIMITS_S = {"drain_within_s": 20, "stop_within_s": 40, "start_within_s": 40, "ready_within_s": 60}

# Wide engines that fail, by what they are started with.
FAULTS = {
    "fails": ["--fail-start"],
    "hangs": ["--hang"],
    "wrong": ["--wrong-answers"],
    "lies": ["--misreport", "tp=1"],
    "late": ["--start-delay-s", "1000"],
}


class Harness:
    """A fleet in an empty `folder` of its own. It finds its engines on the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lengths = folder / "lengths.yaml"  # without it, engines of `own-file` do not start
        config_path = folder / "orchestrrl.yaml"
        document = _document(folder, self.lengths)
        config_path.write_text(yaml.safe_dump(document, sort_keys=False))
        self.daemon_address: str = document["listen"]["address"]
        self.daemon = MarkedProcess("daemon", [sys.executable, AT_MARK, "-c", config_path], folder, cwd=folder)
        self.gateway = self.make_gateway("gateway")
        config, deployer = load_config(config_path), deployer_of(load_config(config_path), WallClock())
        assert deployer is not None
        assert config.fleet.deployer is not None
        self.deployer = deployer
        self._fleet = f"{config.fleet.deployer.name} in {os.path.realpath(config.fleet.deployer.folder)}"
        self._logs = EngineLogs(Path(config.fleet.deployer.folder), 3)
        self._journal_path = Path(config.journal.path)
        self._numbers = itertools.count(100, 100)
        self._ports: set[int] = set()

    def make_gateway(self, name: str) -> MarkedProcess:
        words = ["--listen", f"127.0.0.1:{free_port()}", "--engine-kind", "simulated"]
        words += ["--daemon", self.daemon_address, "--id", name, "--drain-s", "0"]
        words += ["--policy", "round_robin"]  # requests are on all engines, even if one seemed slow
        command = command_of("gateway", *words, "--ledger", self.folder / f"{name}.ledger")
        return MarkedProcess(name, command, self.folder, cwd=self.folder)

    async def open(self) -> None:
        self.lengths.write_text(LENGTHS)
        await asyncio.gather(self.daemon.start(), self.gateway.start())

    async def close(self) -> None:
        """End all processes and free their ports."""
        await asyncio.gather(self.daemon.stop(), self.gateway.stop())
        for deployed in await self.deployer.list_engines():
            await self.deployer.stop(deployed.engine)
        assert self.found() == {}
        assert await self.deployer.list_engines() == ()
        for port in self._ports:
            with socket.socket() as holder:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("127.0.0.1", port))

    # --- observations

    def found(self) -> dict[str, list[FoundProcess]]:
        """Return the processes by engine."""
        return {str(engine): found for engine, found in find_processes(self._fleet, self._logs).items()}

    def leader(self, engine: str) -> int:
        """Return the process id of the engine's server."""
        (process,) = [found.process.pid for found in self.found()[engine] if found.leads]
        return process

    async def kill(self, engine: str) -> None:
        """Kill the engine's server and return when it has ended: the delivery of a signal may take a while."""
        server = psutil.Process(self.leader(engine))
        server.kill()

        async def ended() -> bool:
            try:
                return server.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        await until(ended, 0.005)

    async def engines(self) -> dict[str, DeployedInstance]:
        """Return the engines as the deployer lists them."""
        deployed = {str(each.engine): each for each in await self.deployer.list_engines()}
        self._ports.update(int(each.url.rsplit(":", 1)[1]) for each in deployed.values() if each.url)
        return deployed

    async def named(self, configuration: str) -> str:
        """Return the first engine of this configuration."""
        return next(
            name for name, engine in sorted((await self.engines()).items()) if engine.configuration == configuration
        )

    def check_gpus(self) -> None:
        """Check that no two processes have the same GPU."""
        owner: dict[int, str] = {}
        for engine, found in self.found().items():
            for record in (each.record for each in found if each.leads and is_alive(each.identity)):
                for gpu in record.spec.gpus if record is not None else ():
                    assert owner.setdefault(gpu, engine) == engine, f"GPU {gpu}: {owner[gpu]} and {engine}"

    def journal(self, *kinds: EntryKind) -> list[JournalEntry]:
        reader = JournalReader(self._journal_path)
        try:
            return reader.tail(1000, kinds)
        finally:
            reader.close()

    # --- the daemon

    def mark(self, *, before: bool = False, stop: bool = False, **where: object) -> None:
        """Make the daemon die, or stop, at an entry."""
        sent = signal.SIGSTOP if stop else signal.SIGKILL
        draft = self.folder / "mark.draft"
        draft.write_text(json.dumps({**where, "before": before, "signal": sent}))
        draft.replace(self.folder / "mark.json")

    @property
    def marked(self) -> bool:
        """Return whether the daemon has not reached the mark yet."""
        return (self.folder / "mark.json").exists()

    def unmark(self) -> None:
        (self.folder / "mark.json").unlink(missing_ok=True)

    async def ask(self, method: str, request: Any) -> Any:
        async with ControlClient(self.daemon_address) as client:
            return await client.call(getattr(client.control, method), request)

    async def begin(self, targets: Targets) -> str:
        """Start a redeployment and return its id. Raises the daemon's refusal; the daemon may need a moment to finish
        the previous one."""
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            try:
                return await self._begin(targets)
            except Permanent as refusal:
                if "another change of the deployment" not in str(refusal) or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(0.1)

    async def _begin(self, targets: Targets) -> str:
        wanted = [control_pb2.RedeployTarget(configuration=name, engines=count) for name, count in targets]
        order = control_pb2.RedeployRequest(targets=wanted, reason="requested by the test")
        async with ControlClient(self.daemon_address) as client:
            async for report in client.watch(client.control.Redeploy, order):
                return str(report.redeployment_id)
        raise AssertionError("the daemon did not answer")

    async def begin_and_die(self, targets: Targets) -> str:
        """Start a redeployment in which the daemon reaches a mark that kills it; return the redeployment's id."""
        with contextlib.suppress(OrchestrRLError):  # it may die before it answers
            await self.begin(targets)
        assert await self.daemon.until_ended() == -signal.SIGKILL
        assert not self.marked
        return self.journal(EntryKind.REDEPLOYMENT_BEGAN)[-1].subject

    @contextlib.asynccontextmanager
    async def standing_still(self, targets: Targets, kind: str, state: str) -> AsyncIterator[str]:
        """Run the block in a redeployment whose daemon is stopped after it wrote this entry; it continues after the
        block."""
        self.mark(stop=True, kind=kind, state=state)
        redeployment = await self.begin(targets)
        await self.daemon.until_still()
        yield redeployment
        self.daemon.go_on()

    @contextlib.asynccontextmanager
    async def evacuating(self, targets: Targets, *steps: "Step") -> AsyncIterator[tuple[str, list[set[str]]]]:
        """Run the block while the daemon is about to evacuate the engines of configurations that are not in the target.
        These engines are stopped, so that their requests remain when the daemon continues. Yields the redeployment's
        id, and the ids of each step's requests that have to leave."""
        wanted = {name for name, _ in targets}
        self.mark(stop=True, number=1)  # before anything else
        redeployment = await self.begin(targets)
        await self.daemon.until_still()
        leave = {name: each for name, each in (await self.engines()).items() if each.configuration not in wanted}
        for engine in leave.values():
            async with session() as http, http.post(f"{engine.url}/pause?mode=keep&clear_cache=false") as response:
                assert response.status == 200
        self.mark(stop=True, kind="evacuate", state="running")
        self.daemon.go_on()
        await self.daemon.until_still()
        there = [{i["id"] for i in (await step.shown())["in_flight"] if i["engine"] in leave} for step in steps]
        try:
            yield redeployment, there
        finally:
            self.daemon.go_on()

    async def report(self, redeployment: str) -> control_pb2.RedeploymentReport:
        reported: control_pb2.RedeploymentReport = await self.ask(
            "GetRedeployment", control_pb2.GetRedeploymentRequest(redeployment_id=redeployment)
        )
        return reported

    async def until_over(self, redeployment: str) -> control_pb2.RedeploymentReport:
        """Wait until the redeployment has ended, by any daemon."""

        async def over() -> control_pb2.RedeploymentReport | None:
            self.check_gpus()
            reported = await self.report(redeployment)
            return reported if reported.state != "running" else None

        report = await until(over, 0.1)
        assert report is not None
        return report

    async def until_at(self, redeployment: str, kind: str, state: str = "running") -> None:
        """Wait until a step of this kind is in this state, or later."""
        states = ["pending", "running", "done", "failed"]

        async def reached() -> bool:
            reported = await self.report(redeployment)
            return any(s.kind == kind and states.index(s.state) >= states.index(state) for s in reported.steps)

        await until(reached, 0.01)

    async def become(self, targets: Targets) -> None:
        """Redeploy to the target, unless the fleet is there already."""
        wanted = sorted(name for name, count in targets for _ in range(count))
        if sorted(engine.configuration for engine in (await self.engines()).values()) != wanted:
            report = await self.until_over(await self.begin(targets))
            assert report.state == "done", report.detail
        await self.routed(self.gateway)

    async def routed(self, gateway: MarkedProcess) -> None:
        """Return when the gateway would use all engines."""
        wanted = set(await self.engines())

        async def trusts() -> bool:
            async with session() as http, http.get(gateway.url + "/health") as response:
                return set((await response.json())["engines"]) == wanted

        await until(trusts)

    # --- requests

    @contextlib.asynccontextmanager
    async def step(self, gateway: MarkedProcess | None = None, tokens: int = TOKENS) -> AsyncIterator["Step"]:
        """Run the block while a step is in flight on all engines; afterwards check that all requests were answered once
        and correctly."""
        async with session() as http:
            step = Step(http, gateway or self.gateway, _asked(next(self._numbers), tokens))
            await step.begin(len(await self.engines()))
            yield step
            await step.ended()


class Step:
    """Streamed requests. A client sends the same id again if the gateway breaks the connection, as trainers do."""

    def __init__(self, http: aiohttp.ClientSession, gateway: MarkedProcess, questions: list[Question]) -> None:
        self.questions = questions
        self._http = http
        self._gateway = gateway
        self._asking: dict[str, asyncio.Task[Answer]] = {}
        self.gateway_was_killed = False

    async def begin(self, engines: int) -> None:
        self._asking = {question.id: asyncio.create_task(self._ask(question)) for question in self.questions}

        seen: set[str] = set()

        async def under_way() -> bool:
            shown = await self.shown()
            seen.update(i["engine"] for i in shown["in_flight"] + shown["finished"] if i["generated_tokens"])
            return len(seen) >= engines

        await until(under_way)

    async def ended(self) -> None:
        answers = await asyncio.gather(*(self._asking[question.id] for question in self.questions))
        for question, answer in zip(self.questions, answers, strict=True):
            check(question, answer)
        shown = await self.shown()
        assert shown["in_flight"] == []
        ids = {question.id for question in self.questions}
        ended = Counter(item["id"] for item in shown["finished"] if item["id"] in ids)
        assert set(ended.values()) == ({1} if ids else set())  # all may have left
        assert self.gateway_was_killed or ended.keys() == ids  # it lists no earlier process's

    async def leave(self, *ids: str) -> None:
        """Close the clients."""
        self.questions = [question for question in self.questions if question.id not in ids]
        gone = [self._asking.pop(id) for id in ids]
        for asking in gone:
            asking.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

    async def shown(self) -> dict[str, Any]:
        """Return the gateway's ledger."""
        operator = await operator_url(self._http, self._gateway.url)
        async with self._http.get(operator + "/orchestrrl/requests") as response:
            shown: dict[str, Any] = await response.json()
            return shown

    async def _ask(self, question: Question) -> Answer:
        headers = {"X-Request-Id": question.id}
        while True:
            try:
                url = self._gateway.url + "/v1/completions"
                async with self._http.post(url, json=question.body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    return await read_stream(response)
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


def _asked(first: int, tokens: int) -> list[Question]:
    return [Question(first + place, max_tokens=tokens + 10 * place, stream=True) for place in range(REQUESTS)]


def _configuration(name: str, gpus: int) -> dict[str, Any]:
    rates = {"alpha_s": 0.02, "beta_s": 1e-4, "gamma_s": 4e-8, "prefill_tokens_per_s": 40_000}
    return {"id": name, "gpus": gpus, **rates, "kv_capacity_tokens": 200_000, "max_sequences": 16, "switch_s": 3}


def _document(folder: Path, lengths: Path) -> dict[str, Any]:
    narrow: dict[str, list[str]] = {"tp1": [], "own-file": ["--lengths", str(lengths)]}
    wide: dict[str, list[str]] = {"tp2": [], **FAULTS}
    sizes = [(name, 1) for name in narrow] + [(name, 2) for name in wide]
    own = {name: {"arguments": words} for name, words in {**narrow, **wide}.items()}
    first_port = free_range()
    launch = {
        "engine": "simulated",
        "ports": [first_port, first_port + RANGE - 1],
        "arguments": ["--speed", str(SPEED), "--tick-s", "0.01"],
        "configurations": own,
    }
    return {
        "mode": "act",
        "listen": {"address": f"127.0.0.1:{free_port()}"},
        "journal": {"path": str(folder / "journal.sqlite")},
        "slow": {"interval_s": 3600},
        "fleet": {
            "gpus": {"count": GPUS, "per_node": GPUS},
            "configurations": [_configuration(*size) for size in sizes],
            "launch": launch,
            "deployer": {"product": "local", "folder": str(folder / "engines"), "name": "faults", **LIMITS_S},
        },
    }
