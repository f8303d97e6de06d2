"""A gateway process and engine processes, without a daemon: requests to them, and their own reports."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from orchestrrl.engines.base import EngineSample
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.tokens import TokenModel
from orchestrrl.lab.testbed.engines import LocalEngine, start_simulated
from orchestrrl.lab.testbed.processes import flags_of
from tests.orchestrrl.gateway.processes import GatewayProcess, operator_url
from tests.system.streams import Answer, read_stream, read_whole

WITHIN_S = 120.0  # for events that never happen; not a measurement
PATH = "/v1/completions"
_MODEL = TokenModel()
Found = TypeVar("Found")


async def until(look: Callable[[], Awaitable[Found]], every_s: float = 0.02) -> Found:
    """Poll `look` until it returns a value, and return that."""
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := await look()):
        assert time.monotonic() < deadline_s, f"{look.__name__}: not within {WITHIN_S:g} s"
        await asyncio.sleep(every_s)
    return found


@dataclass(frozen=True)
class Question:
    """A request whose undisturbed answer can be computed without an engine."""

    number: int
    prompt_tokens: int = 8
    max_tokens: int = 40
    stream: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"q{self.number}"

    @property
    def prompt(self) -> list[int]:
        return [1000 + self.number % 20_000, *(2000 + index % 1000 for index in range(self.prompt_tokens - 1))]

    @property
    def body(self) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "stream": self.stream, **fixed, **self.more}

    @property
    def answer(self) -> tuple[list[int], str]:
        """Compute the answer: token ids and text."""
        generation = _MODEL.begin(self.prompt)
        ids = [generation.next_token()[0] for _ in range(self.max_tokens)]
        return ids, _MODEL.detokenize(ids)


def check(question: Question, answer: Answer) -> None:
    """Check that every token occurs once, in order, with one end."""
    assert (answer.token_ids, answer.text) == question.answer, question.id
    assert (answer.finish_reason, answer.finish_reasons) == ("length", 1)


@dataclass
class Front:
    """A gateway in front of engines e0, e1, ..."""

    engines: Sequence[LocalEngine]
    gateway: GatewayProcess
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.gateway.url

    async def operator(self, path: str) -> str:
        return f"{await operator_url(self.http, self.url)}/orchestrrl/{path}"

    async def ask(self, question: Question) -> Answer:
        headers = {"X-Request-Id": question.id}
        async with self.http.post(self.url + PATH, json=question.body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await (read_stream(response) if question.stream else read_whole(response))

    async def ask_all(self, questions: Iterable[Question]) -> None:
        """Send all requests at once, and check every answer."""
        questions = list(questions)
        answers = await asyncio.gather(*(self.ask(question) for question in questions))
        for question, answer in zip(questions, answers, strict=True):
            check(question, answer)

    def asking(self, question: Question) -> "asyncio.Task[Answer]":
        return asyncio.create_task(self.ask(question))

    async def refused(self, question: Question) -> tuple[int, dict[str, Any]]:
        """Return the status and error object of a refused request."""
        headers = {"X-Request-Id": question.id}
        async with self.http.post(self.url + PATH, json=question.body, headers=headers) as response:
            error: dict[str, Any] = (await response.json())["error"]
            return response.status, error

    async def shown(self, question: Question) -> dict[str, Any] | None:
        """Return the ledger's records of requests in flight."""
        async with self.http.get(await self.operator("requests"), params={"id": question.id}) as response:
            return await response.json() if response.status == 200 else None

    async def running(self, question: Question, tokens: int = 1) -> dict[str, Any]:
        """Return the record once it has this many tokens on its engine."""

        async def has_tokens() -> dict[str, Any] | None:
            shown = await self.shown(question)
            there = shown is not None and shown["state"] == "running" and shown["generated_tokens"] >= tokens
            return shown if there else None

        shown = await until(has_tokens)
        assert shown is not None
        return shown

    async def running_at(self, engine: str, count: int) -> list[dict[str, Any]]:
        """Return this many records of requests that run on the engine, once there are that many."""

        async def run() -> list[dict[str, Any]] | None:
            async with self.http.get(await self.operator("requests")) as response:
                shown = (await response.json())["in_flight"]
            there = [item for item in shown if (item["engine"], item["state"]) == (engine, "running")]
            return there if len(there) >= count else None

        return await until(run) or []

    async def waiting_at(self, question: Question, engine: str) -> dict[str, Any]:
        """Return the record once it waits for its next token on that engine."""

        async def waits() -> dict[str, Any] | None:
            shown = await self.shown(question)
            return shown if shown is not None and (shown["engine"], shown["state"]) == (engine, "waiting") else None

        shown = await until(waits)
        assert shown is not None
        return shown

    async def move(self, *moves: tuple[Question, str], method: str = "recompute") -> list[dict[str, Any]]:
        """Send one order for all moves; return one result for each."""
        items = [{"request_id": question.id, "to_engine_id": engine, "method": method} for question, engine in moves]
        async with self.http.post(await self.operator("move"), json={"moves": items}) as response:
            assert response.status == 200, await response.text()
            results: list[dict[str, Any]] = (await response.json())["items"]
            return results

    async def trusts(self, *engines: str) -> None:
        """Return when the gateway would use all of these engines."""

        async def trusted() -> bool:
            async with self.http.get(self.url + "/health") as response:
                return set(engines) <= set((await response.json())["engines"])

        await until(trusted)

    async def finished(self, *questions: Question) -> list[dict[str, Any]]:
        """Return how each request ended, once none is in flight. Each must have ended exactly once."""

        async def ledger() -> list[dict[str, Any]] | None:
            async with self.http.get(await self.operator("requests")) as response:
                shown = await response.json()
            return shown["finished"] if not shown["in_flight"] else None

        wanted = [question.id for question in questions]
        ended = [item for item in await until(ledger) or [] if item["id"] in wanted]
        assert sorted(item["id"] for item in ended) == sorted(wanted)
        return sorted(ended, key=lambda item: wanted.index(item["id"]))

    async def metrics(self, engine: int) -> EngineSample:
        """Return the engine's own metrics."""
        return await _metrics(self.engines[engine].url)

    async def idle(self, engine: int) -> EngineSample:
        """Return the engine's metrics once it has no request and no KV in use."""

        async def freed() -> EngineSample | None:
            now = await self.metrics(engine)
            return now if now.running == now.waiting == 0 and now.kv_usage_fraction == 0 else None

        now = await until(freed)
        assert now is not None
        return now

    async def pause(self, engine: int) -> None:
        """Pause the engine: it accepts requests but generates no token."""
        async with self.http.post(f"{self.engines[engine].url}/pause?mode=keep&clear_cache=false") as response:
            assert response.status == 200

    async def resume(self, engine: int) -> None:
        async with self.http.post(f"{self.engines[engine].url}/resume") as response:
            assert response.status == 200

    async def pause_all(self) -> None:
        """Pause all engines, so that no request ends while the test acts."""
        await asyncio.gather(*(self.pause(engine) for engine in range(len(self.engines))))

    async def resume_all(self) -> None:
        await asyncio.gather(*(self.resume(engine) for engine in range(len(self.engines))))

    def freeze(self, engine: int) -> None:
        """Stop the engine's process: the kernel still accepts connections, but no answer is sent."""
        os.killpg(self.engines[engine].pid, signal.SIGSTOP)

    def thaw(self, engine: int) -> None:
        os.killpg(self.engines[engine].pid, signal.SIGCONT)


async def _metrics(url: str) -> EngineSample:
    client = SimulatedEngine(url)
    try:
        return await client.metrics()
    finally:
        await client.close()


def resident_peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process since its start, or since `forget_peak`."""
    return _memory_bytes(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    return _memory_bytes(pid, "VmRSS")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) << 10


async def start_engine(name: str, log_dir: Path, **flags: object) -> LocalEngine:
    """Start a simulated engine; `kv_capacity_tokens=4096` becomes `--kv-capacity-tokens 4096`."""
    return await start_simulated(name, log_dir=log_dir, arguments=flags_of(flags))


async def start_bad_engine(log_dir: Path) -> LocalEngine:
    engine = LocalEngine("bad-engine", [sys.executable, Path(__file__).with_name("bad_engine.py")], log_dir)
    await engine.start()
    return engine


async def start_gateway(engines: Sequence[LocalEngine], log_dir: Path, *arguments: str) -> GatewayProcess:
    flags = [f"--engine=e{index}={engine.url}" for index, engine in enumerate(engines)]
    gateway = GatewayProcess(log_dir / "gateway.log", ["--engine-kind", "simulated", *flags, *arguments])
    await gateway.start()
    return gateway


def session() -> aiohttp.ClientSession:
    """Open a client session with a connection per request and no limit."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20)
